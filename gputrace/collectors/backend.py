"""The contract between `gputrace record` and what records the GPUs for it: plans, with limits on
the size of a long recording, and backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.collectors.launch import Launch, run

_SEGMENTS: Final = 10
SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of every process that writes into a recording's folder.

    In a ring, each process starts a new file periodically and removes its oldest one.
    """

    segment_ns: int = 0
    """Nanoseconds after which a new file follows; 0 for a single file."""
    keep: int = 0
    """Number of older files that stay."""
    max_bytes: int = 0
    """Maximum bytes of the folder; 0 for no limit."""

    @property
    def kept_ns(self) -> int:
        """Minimum nanoseconds kept by a ring."""
        return self.segment_ns * self.keep

    @property
    def longest_ns(self) -> int:
        """Maximum nanoseconds of a ring on disk; processes check once a second."""
        return self.segment_ns * (self.keep + 1) + SECOND_NS if self.segment_ns else 0

    def variables(self) -> dict[str, str]:
        """Return the environment variables that pass the limits to the processes of a program."""
        ring = {"GPUTRACE_SEGMENT_NS": str(self.segment_ns), "GPUTRACE_SEGMENTS": str(self.keep)}
        size = {"GPUTRACE_MAX_BYTES": str(self.max_bytes)}
        return (ring if self.segment_ns else {}) | (size if self.max_bytes else {})


NONE: Final = Limits()


def ring(keep_ns: int, max_bytes: int) -> Limits:
    """Return a ring that keeps ``keep_ns`` to a tenth more; else the limit of bytes, 0 for none."""
    if not keep_ns:
        return Limits(max_bytes=max_bytes)
    segment = max(-(-keep_ns // _SEGMENTS), SECOND_NS)
    return Limits(segment, -(-keep_ns // segment), max_bytes)


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it was there a moment ago
            total += path.stat().st_size
    return total


@dataclass(frozen=True, slots=True)
class RepeatedWindow:
    """Repeated windows of a length at a distance, in steps or in nanoseconds."""

    distance: int
    length: int
    in_steps: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a recording: what to record, and when.

    Times are in nanoseconds: the delay from each process's start of CUDA, or from the program's
    start where nsys records, the duration from the end of the delay.
    """

    output: Path
    backend: str = "auto"
    """Name of a backend, or ``auto``: the best one that works on this machine."""
    delay_ns: int = 0
    duration_ns: int = 0
    steps: tuple[int, int] | None = None
    profiler_api: bool = False
    """Record from cudaProfilerStart to cudaProfilerStop."""
    nvml: bool = True
    python: bool | None = False
    """Sample the lines that Python programs are at; None: five times less often, of those that
    import a framework, from their first step on."""
    every: RepeatedWindow | None = None
    limits: Limits = NONE
    api: str = "all"
    """CUDA calls to record: ``all``, ``none``, or ``auto``: where there are too many, of some
    steps."""
    control: bool = False
    """Leave some steps unrecorded, to know what recording costs."""
    hw_trace: bool = False
    """Take the times of kernels from hardware events, where GPU and CUPTI have them."""
    graph_nodes: int = 0
    """Number of steps, now and then, of which to record the nodes of CUDA graphs."""
    sample: float | None = None
    """Part by which recording may lengthen the run; 0 to record all of it, None for all of a run
    that is short, or that recording hardly lengthens."""
    when_slow: float = 0.0
    """Factor over the usual step time from which a slow step gets a trace; 0 for none."""
    hang_ns: int = 0
    """Time without any progress after which a hang is reported; 0 for never."""
    memory: bool = False
    """Write snapshots of PyTorch's allocator at the peak, and when memory runs out."""

    @property
    def look_s(self) -> float:
        """Seconds between checks of the recording; 0 for the default."""
        return 1.0 if self.when_slow or self.hang_ns else 0.0


@dataclass(frozen=True, slots=True)
class Merged:
    """Contents of a trace in numbers."""

    processes: int
    """Processes that left anything."""
    kernels: int
    steps: int
    """Markers of training steps, over all processes."""
    cut: int = 0
    """Processes that were ended before they could write down that they ended."""
    notes: tuple[str, ...] = ()
    """Notes for the user, a line each."""
    unread: bool = False
    """True if the folder has non-empty files that could not be read."""
    of_host: tuple[str, ...] = ()
    """Sorts of host activity in it, for the user."""
    unreached: str = ""
    """Line on what the recording did not reach, if no step was seen and it is known."""


def run_directly(
    launch: Launch, _folder: Path, _log: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Run a command that is the program itself."""
    often = (launch.look_s,) if launch.look_s else ()
    return run(launch.command, launch.environment, meanwhile, *often)


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to record GPU activity.

    Attributes:
        name: as ``--backend`` takes it.
        obstacle: returns why it cannot record here, and what to do about it; None if it can. Takes
            the environment that the program would inherit.
        launch: returns how to start a command so that it leaves its files in a folder. Takes the
            environment, which has the hooks already, and adds what the backend needs.
        merge: makes the trace (second path) of the folder (first path) and its meta.json; raises
            InputError if nothing in it can be read, OSError if it cannot be written.
        run: runs what was launched to its end, and returns the program's exit code. Takes the
            folder, a logger of lines, and a callback for every few seconds. Raises CannotRun if the
            program cannot be run, MissingError if its recorder cannot.
        heeds_long: True if it supports repeated windows, rings and limits.
        shares: True if several recorders of one machine may use one folder at once; else each task
            of a job gets a trace of its own.
    """

    name: str
    obstacle: Callable[[Mapping[str, str]], str | None]
    launch: Callable[[Plan, Path, Sequence[str], Mapping[str, str]], Launch]
    merge: Callable[[Path, Path, Mapping[str, str]], Merged]
    run: Callable[[Launch, Path, Callable[[str], object], Callable[[], None]], int] = run_directly
    shares: bool = False
    heeds_long: bool = False


_OTHER_TOOLS: Final = ("NSYS_PROFILING_SESSION_ID", "QUADD_INJECTION_PROXY")


def has_driver() -> bool:
    """Return whether an NVIDIA kernel driver is there."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def other_recorder(inherited: Mapping[str, str], library: Path | None = None) -> str | None:
    """Return what else would record CUDA in an environment, and what to do about it; or None."""
    if any(variable in inherited for variable in _OTHER_TOOLS):
        return "this shell runs under nsys, and CUDA has room for one recorder; run without nsys"
    other = inherited.get("CUDA_INJECTION64_PATH")
    if other and Path(other) != library:
        return f"CUDA_INJECTION64_PATH names another tool ({other}); unset it to record"
    return None


HOW_TO_BUILD: Final = (
    "install a C compiler, and then gputrace again (pip install --force-reinstall --no-deps "
    "--no-cache-dir gputrace)"
)
"""Without the cache, where pip may keep what it built without a compiler."""
