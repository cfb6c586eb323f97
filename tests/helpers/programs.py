"""Programs with the hooks, in real processes, with modules that stand for frameworks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.api import Report
from gputrace.collectors.session import HOOKS
from gputrace.collectors.spool.host_events import HostEvents, join_hosts, read_host_file
from tests.helpers import command
from tests.helpers.command import ROOT, Ran

SECOND: Final = 1_000_000_000

TORCH: Final = {
    "torch/utils/data/dataloader.py": """
class _BaseDataLoaderIter:
    def __init__(self, items, wait=0): self.items, self.wait = iter(items), wait
    def __iter__(self): return self
    def __next__(self):
        import time
        time.sleep(self.wait)
        return next(self.items)
""",
    "torch/optim/__init__.py": "from .optimizer import Optimizer",
    "torch/optim/optimizer.py": """
_hooks = []
def register_optimizer_step_post_hook(hook): _hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in _hooks: assert hook(self, (), {}) is None
        return "stepped"
""",
}
LOOP: Final = """
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.optim import Optimizer
"""
ITERATOR: Final = """
class {name}:
    def __init__(self): self.left = 2
    def __iter__(self): return self
    def __next__(self):
        if not self.left: raise StopIteration
        self.left -= 1
        return self.left
    next = __next__
"""
LOAD: Final = """
import ctypes, os
def load(): ctypes.CDLL(os.environ["GPUTRACE_LIBRARY"])
def calls():
    path = os.environ["CALLS"]
    return ",".join(open(path).read().splitlines()) if os.path.exists(path) else "none"
"""
"""Loads a library that stands for the collector's, and looks which calls came to it."""


class Program:
    """Runs programs with the hooks, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = folder / "modules"
        self.spool = folder / "spool"
        self.modules.mkdir()
        self.spool.mkdir()

    def write(self, sources: Mapping[str, str]) -> None:
        """Writes modules that the program can import, packages among them."""
        for name, source in sources.items():
            path = self.modules / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
            for parent in path.relative_to(self.modules).parents:
                (self.modules / parent / "__init__.py").touch()
        (self.modules / "__init__.py").unlink(missing_ok=True)

    def environment(self, hooked: bool = True, **extra: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GPUTRACE", "PYTHON"))}
        paths = [str(HOOKS)] * hooked + [str(self.modules), str(ROOT)]
        env["PYTHONPATH"] = os.pathsep.join(paths)
        if hooked:
            env["GPUTRACE_DIR"] = str(self.spool)
        return env | extra

    def start(self, source: str, *options: str, python: str = sys.executable, **how: Any) -> Any:
        main = self.folder / "main.py"
        main.write_text(source, encoding="utf-8")
        return subprocess.Popen(
            [python, *options, str(main)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment(**how),
            cwd=self.folder,
        )

    def run(self, source: str, *options: str, **how: Any) -> Ran:
        with self.start(source, *options, **how) as process:
            out, err = process.communicate(timeout=60)
        return Ran(process.returncode, out.decode(), err.decode())

    def quietly(self, source: str, *options: str, **how: Any) -> str:
        """Runs the program, which has to end well and silently; what it printed."""
        ran = self.run(source, *options, **how)
        assert (ran.code, ran.err) == (0, "")
        return ran.out

    def files(self) -> list[Path]:
        return sorted(self.spool.iterdir())

    def all_events(self) -> list[HostEvents]:
        return [join_hosts([read_host_file(path)]) for path in self.files()]

    def events(self) -> HostEvents:
        """Return the events of the only process that left some."""
        [events] = self.all_events()
        return events


def check_waits(program: Program, module: str, name: str) -> None:
    """Check that waits for the items of an iterator, a class of that name, are recorded."""
    program.write({module.replace(".", "/") + ".py": ITERATOR.format(name=name)})
    source = f"from {module} import {name}\nprint(list({name}()), {name}().next())"
    assert program.quietly(source) == "[1, 0] 1\n"
    assert event_names(program.events(), "data_wait") == [f"{module}.{name}"] * 4
    assert numbers(program.events(), "data_wait") == [0, 0, 1, 0]


def check_generator(program: Program, module: str, name: str, method: str) -> None:
    """Check that waits for the items of a generator are recorded, and that it remains one."""
    body = f"class {name}:\n    def {method}(self):\n"
    body += "        try:\n            yield 1; yield 2\n        finally: print('closed')\n"
    program.write({module.replace(".", "/") + ".py": body})
    out = program.quietly(
        f"from {module} import {name}\nprint(list({name}().{method}()))\n"
        f"items = {name}().{method}(); next(items); items.close(); print(type(items).__name__)\n"
    )
    assert out == "closed\n[1, 2]\nclosed\ngenerator\n"
    assert numbers(program.events(), "data_wait") == [0, 0, 1, 0]


def check_steps(program: Program, module: str, name: str, method: str, mark: str) -> None:
    """Check that calls of a method are steps, which bear a name, and return what they did."""
    body = f"class {name}:\n    def {method}(self, *args, **keywords): return args, keywords\n"
    program.write({module.replace(".", "/") + ".py": body})
    call = f"from {module} import {name}\nit = {name}()\nprint(it.{method}(1, a=2)); it.{method}()"
    assert program.quietly(call) == "((1,), {'a': 2})\n"
    assert event_names(program.events(), "step") == [mark] * 2
    assert numbers(program.events(), "step") == [0, 1]


def torch_python(needs: str = "torch") -> str:
    """A Python that has torch; GPUTRACE_TORCH_PYTHON may name it, if this one has none."""
    python = os.environ.get("GPUTRACE_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", f"import {needs}"], capture_output=True).returncode:
        pytest.skip(f"no {needs}; GPUTRACE_TORCH_PYTHON may name a Python that has it")
    return python


def recorded_with_torch(folder: Path, source: str) -> tuple[str, Report]:
    """Record a program that uses torch; its output and its analysis."""
    script, trace = folder / "train.py", folder / "trace.sqlite"
    script.write_text(source, encoding="utf-8")
    options = "--backend", "host", "-o", trace
    ran = command.gputrace("record", *options, "--", torch_python(), script)
    assert ran.code == 0, ran.err
    with gputrace.open(trace) as opened:
        return ran.out, opened.analyze()


def event_names(events: HostEvents, kind: str) -> list[str]:
    """Names of the events of a kind, in the order of their ends."""
    return [events.names[int(row["name"])] for row in events.records[kind]]


def numbers(events: HostEvents, kind: str) -> list[int]:
    """Numbers of the events of a kind, in the order of their ends."""
    return [int(number) for number in events.records[kind]["number"]]


def calls(library: Mapping[str, str]) -> list[str]:
    """Calls that came to a library which stands for the collector's."""
    path = Path(library["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def phases(events: HostEvents) -> list[str]:
    """Names of the recorded phases of a step, in the order of their ends."""
    return event_names(events, "phase")


def check_profiler(
    program: Program, library: dict[str, str], module: str, begin: str, end: str
) -> None:
    """Check that the collector makes way for a profiler of XLA, which leaves CUPTI unusable."""
    body = f"def {begin}(where):\n    if not where: raise ValueError\ndef {end}(): pass\n"
    program.write({module.replace(".", "/") + ".py": body})
    program.quietly(
        f"{LOAD}load()\nimport {module} as profiler\n"
        f"try: profiler.{begin}('')\nexcept ValueError: pass\n"
        f"for i in range(2): profiler.{begin}('there'); profiler.{end}()\n",
        **library,
    )
    assert calls(library) == ["pause 1", "pause 0", "pause 1"]
    *_, last = event_names(program.events(), "note")
    assert "is not recorded after" in last
