"""Processes of a recorded program that the recording does not reach, and what to type instead.

A recording reaches a process by its environment: ``GPUTRACE_DIR`` names the folder, PYTHONPATH the
hooks. Containers, batch systems, sudo and `env -i` start programs in another one, and a Python may
ignore PYTHONPATH. The evidence is the command line as typed, and what /proc shows, while they run,
of the processes that descend from the recorder.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gputrace.collectors import exit_watch
from gputrace.collectors.launch import gputrace_command
from gputrace.collectors.launch.supervised import SUPERVISOR
from gputrace.collectors.masking import masked
from gputrace.collectors.processes import PARENT, orphans_of, pids, read_environment, read_stat

HOOKS: Final = Path(__file__).parent / "hooks"


class _Wrapper(NamedTuple):
    """Kind of command that starts a program outside of the recorder's environment."""

    command: str
    """Pattern of its words; the first one is without a path."""
    does: str
    where: str
    """Where the recorder belongs; a command line follows."""
    example: str
    """This line where the wrapper's own does not show the program; ``{}`` is the recorder."""
    is_here: bool = False
    """True if the recorder of this machine can be named by its path."""
    may_reach: bool = False
    """True if some of its programs keep the recorder's environment."""


_IN_CONTAINER: Final = "in the container (gputrace in its image, -o in a mounted folder)"
_WRAPPERS: Final = (
    _Wrapper(
        r"(docker|podman|nerdctl)( -\S+)*( (container|compose)( -\S+)*)? (run|exec|start|up)",
        "the container has an environment of its own",
        _IN_CONTAINER,
        "docker run IMAGE {} COMMAND",
    ),
    _Wrapper(
        r"(kubectl|oc)( -\S+)* (run|exec|apply|create)",
        "the pod has an environment of its own",
        _IN_CONTAINER,
        "kubectl exec POD -- {} COMMAND",
    ),
    _Wrapper(
        r"(apptainer|singularity)( -\S+)* (run|exec|shell|instance)",
        "what ran in the container found no recorder there",
        _IN_CONTAINER,
        "apptainer exec --nv IMAGE {} COMMAND",
        may_reach=True,
    ),
    _Wrapper(
        "sbatch|qsub|bsub|msub|condor_submit",
        "it submits a job and returns: the program runs later, without the recorder",
        "in the job's script, before the program",
        "srun {} python train.py",
    ),
    _Wrapper(
        "srun",
        "its tasks are not processes of this recorder, and none of them reached its folder",
        "in each task",
        "srun {} COMMAND",
        may_reach=True,
    ),
    _Wrapper(
        "ssh|pdsh|clush",
        "the other machine has an environment of its own",
        "on that machine",
        "ssh HOST {} COMMAND",
    ),
    _Wrapper(
        "sudo|doas|pkexec|su|runuser|systemd-run",
        "it starts the program in a new environment (sudo -E loses PYTHONPATH, too)",
        "within it",
        "sudo {} COMMAND",
        is_here=True,
        may_reach=True,
    ),
    _Wrapper(
        r"env( -\S+( [^-=\s]+(?= ))?| \S+=\S*)*? (-|-\w*i\w*|--ignore-environment)",
        "it starts the program in an empty environment",
        "within it",
        "env -i {} COMMAND",
        is_here=True,
        may_reach=True,
    ),
)
_TRANSPARENT: Final = re.compile(
    r"(nohup|time|nice|ionice|timeout|stdbuf|setsid|numactl|taskset)( -\S+| [\d.]+[smhd]?)* "
)
"""Commands that may stand before a wrapper and start it in their own environment."""
_PROGRAM: Final = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec")
"""Names of programs before which a recorder belongs."""
_LONGEST: Final = 200
"""Characters of a command line that is shown."""
_ISOLATING: Final = "EIS"
"""Options with which Python ignores PYTHONPATH, or imports no sitecustomize."""
_OURS: Final = (
    *("/dev/fd/3", str(SUPERVISOR), "gputrace.collectors.nvml.sampling"),
    *(exit_watch.__file__, gputrace_command()[-1]),
)
"""Words by which the recorder's own processes are known."""


class _Process(NamedTuple):
    """A process, as /proc shows it."""

    pid: int
    parent: int
    words: Sequence[str]
    environment: Mapping[str, str] | None
    """None if it may not be read."""

    def __str__(self) -> str:
        return f"{_name(self.words)} (process {self.pid})"


class _Wrapped(NamedTuple):
    """Wrapper, the words of its command line, and those of them that name what it does."""

    wrapper: _Wrapper
    words: Sequence[str]
    what: str

    def __str__(self) -> str:
        does, where = self.wrapper.does, self.wrapper.where
        record = _recorder() if self.wrapper.is_here else "gputrace record --"
        shown = _shown(record, self.words, self.wrapper.example)
        return f"nothing of {self.what} was recorded: {does}; record {where}: {shown}"


class ReachWatch:
    """Watch for what a recording does not reach; it looks less and less often."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        """Take the recording's folder, and the command as the user typed it."""
        self._folder, self._typed = folder, command
        self._began, self._next_s = time.monotonic(), 0.0
        self._python = ""
        self._wrapped: _Wrapped | None = None
        self._has_reached = False

    def look_now_and_then(self) -> None:
        """Look if twice as much time has passed as at the last look."""
        elapsed = time.monotonic() - self._began
        if elapsed >= self._next_s:
            self._next_s = 2 * elapsed
            processes = _descendants(os.getpid())
            for pid in orphans_of(self._folder):
                if pid not in processes and (orphan := _read(pid, 0)) is not None:
                    processes[pid] = orphan
            for process in processes.values():
                wrapped = _find_wrapper(process.words)
                if _PROGRAM.fullmatch(_name(process.words)):
                    why = self._why_unreached(process, processes)
                    self._has_reached |= why is None
                    self._python = self._python or why or ""
                elif wrapped is not None:
                    self._wrapped = self._wrapped or wrapped

    def notice(self) -> str:
        """Return a line on what was not reached, and what to type instead; empty if unknown.

        A Python that was seen says more than a wrapper that was, and that than what was typed.
        """
        if self._python:
            return self._python
        written = (path for end in ("host", "spool") for path in self._folder.glob(f"*.{end}"))
        is_reached = self._has_reached or any(written)
        wrapped = self._wrapped or _find_wrapper(self._typed)
        if wrapped is not None and not (is_reached and wrapped.wrapper.may_reach):
            return str(wrapped)
        return "" if is_reached else _isolated(_name(self._typed), self._typed)

    def _why_unreached(self, process: _Process, known: Mapping[int, _Process]) -> str | None:
        """Return why a Python has no hooks; None if it has them, empty if that is unknown."""
        variables, wrapped, above = process.environment, _find_wrapper(self._typed), process
        source = None
        while above.parent in known:
            above = known[above.parent]
            wrapped = wrapped or _find_wrapper(above.words)
            if source is None and "GPUTRACE_DIR" in (above.environment or ()):
                source = above
        if variables is None or "GPUTRACE_DIR" not in variables:
            if wrapped is not None or source is None or variables is None:
                return str(wrapped or "")
            why = f"{source} started it in an environment without the recorder's"
            here = _shown(_recorder(), process.words)
            return f"nothing of {process} was recorded: {why}; record there: {here}"
        if os.path.realpath(variables["GPUTRACE_DIR"]) != os.path.realpath(self._folder):
            return ""  # Another recorder's.
        if str(HOOKS) not in variables.get("PYTHONPATH", "").split(os.pathsep):
            kept = "keep what is there, as PYTHONPATH=$PYTHONPATH:/more"
            return str(wrapped or f"{_unhooked(process)}: its PYTHONPATH was replaced; {kept}")
        return _isolated(str(process), process.words) or None


def _name(words: Sequence[str]) -> str:
    """Return the name of a command line's program without its path."""
    return Path(words[0]).name


def _unhooked(python: object) -> str:
    return f"{python} ran without the hooks, so no steps of it are known"


def _isolated(python: str, words: Sequence[str]) -> str:
    """Return the line on a Python that an option makes ignore the hooks; empty without one."""
    option = isolating_option(words) if _PROGRAM.fullmatch(_name(words)) else ""
    if not option:
        return ""
    if any(word.endswith(".pex") or "/.pex/" in word for word in words):
        pex = "as a pex does; run the program from a virtual environment (pex3 venv create)"
        return f"{_unhooked(python)}: it was started with {option}, {pex}"
    kept = option.translate(dict.fromkeys(map(ord, _ISOLATING)))
    put = {option: [kept] if len(kept) > 1 else []}
    without = _shown("gputrace record --", [w for word in words for w in put.get(word, [word])])
    return f"{_unhooked(python)}: it was started with {option}; leave that out: {without}"


def isolating_option(words: Sequence[str]) -> str:
    """Return the option by which the Python of a command line ignores PYTHONPATH or has no site;
    empty without one.
    """
    is_value = False
    for word in words[1:]:
        option = re.fullmatch(r"-(?!-|$)([^cmWXQ]*)([cmWXQ]?)(.*)", word, re.DOTALL)
        if is_value:
            is_value = False
        elif option is None:
            break
        elif set(option[1]) & set(_ISOLATING):
            return word
        elif option[2] and option[2] in "cm":
            break
        else:
            is_value = bool(option[2]) and not option[3]
    return ""


def _find_wrapper(words: Sequence[str]) -> _Wrapped | None:
    """Return the wrapper that a command line begins with, but for what hands its environment on."""
    line = " ".join([_name(words), *words[1:]]) if words and words[0] else ""
    if re.match("(ba|da|k|z)?sh /", line):  # A wrapper may be a script.
        return _find_wrapper([_name(words[1:]), *words[2:]])
    if before := _TRANSPARENT.match(line):
        found = _find_wrapper(words[before[0].count(" ") :])
        return found and found._replace(words=words)
    for wrapper in _WRAPPERS:
        if what := re.match(rf"(?:{wrapper.command})(?= |$)", line):
            return _Wrapped(wrapper, words, what[0])
    return None


def _recorder() -> str:
    """Return the words that start a recorder on this machine, whatever PATH is."""
    script = Path(sys.executable).with_name("gputrace")
    return f"{script} record --" if script.exists() else f"{sys.executable} -m gputrace record --"


def _shown(record: str, words: Sequence[str], example: str = "{} COMMAND") -> str:
    """Return a command line with a recorder before its program; the example if it shows none."""
    programs = [_PROGRAM.fullmatch(Path(word).name) is not None for word in words]
    # An image may have the name of the program that runs in it.
    at = next((n for n, one in enumerate(programs) if one and not any(programs[n + 1 : n + 2])), -1)
    if at < 0:
        return example.format(record)
    hidden = masked(words)
    line = " ".join(filter(None, [shlex.join(hidden[:at]), record, shlex.join(hidden[at:])]))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def _descendants(root: int) -> dict[int, _Process]:
    """Return the processes below one by pid, parents first, without the recorder's own."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        if status := read_stat(pid):
            children.setdefault(int(status[PARENT]), []).append(pid)
    found: dict[int, _Process] = {}
    waiting = [(pid, root) for pid in children.get(root, [])]
    for pid, parent in waiting:
        process = _read(pid, parent)
        if process is not None and set(_OURS).isdisjoint(process.words[:6]):
            found[pid] = process
        waiting += [(child, pid) for child in children.get(pid, [])]
    return found


def _read(pid: int, parent: int) -> _Process | None:
    """Read a process from /proc; None if it is gone, or not a program."""
    # Before the words, of which one that ends meanwhile has none.
    environment = read_environment(pid)
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[:-1]
    except OSError:
        return None
    return _Process(pid, parent, words, environment) if words and words[0] else None
