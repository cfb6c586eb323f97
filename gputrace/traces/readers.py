"""The list of readers, and how a file finds its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from gputrace.errors import InputError
from gputrace.traces.gputrace import OwnTrace, is_own
from gputrace.traces.kineto.reader import is_kineto, open_kineto
from gputrace.traces.merged import merge
from gputrace.traces.mxnet import MxnetTrace, is_mxnet
from gputrace.traces.nsys.reader import NsysTrace, is_nsys
from gputrace.traces.nsys.report import export_report, is_report
from gputrace.traces.nvprof.reader import NvprofTrace, is_nvprof
from gputrace.traces.packed import peek
from gputrace.traces.refused import explain
from gputrace.traces.runs import check_paths
from gputrace.traces.smi.join import is_smi, join_logs
from gputrace.traces.sqlite import MAGIC, Database, open_input
from gputrace.traces.trace import Trace
from gputrace.traces.xla.chrome import is_trace_viewer, read_trace_viewer
from gputrace.traces.xla.reader import XlaTrace
from gputrace.traces.xla.xspace import is_xspace, read_xspace


class Candidate:
    """A file that readers look at to tell whether it is theirs.

    Attributes:
        path: the file, which exists and can be read.
        head: its first 4096 bytes.
        content: the same, unpacked where the file is compressed with gzip.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_input(path) as file:
            self.head: bytes = file.read(4096)

    @cached_property
    def content(self) -> bytes:
        return peek(self.head)

    @cached_property
    def database(self) -> Database | None:
        """The file as SQLite, opened once for all readers; None where it is something else."""
        return Database(self.path) if self.head.startswith(MAGIC) else None

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Gives the file back where no reader takes it."""
        try:
            yield
        except BaseException:
            if (database := self.__dict__.get("database")) is not None:
                database.close()
            raise


@dataclass(frozen=True, slots=True)
class Reader:
    """One kind of file. Other packages add theirs as entry points of ``gputrace.readers``."""

    files: str
    """What a person calls such files, in the plural."""
    recognises: Callable[[Candidate], bool]
    """Looks at the content, not at the name."""
    open: Callable[[Candidate], Trace]
    """Raises InputError where the file is broken, or holds nothing that can be analyzed."""


def _open_nsys(candidate: Candidate) -> Trace:
    assert candidate.database is not None
    return NsysTrace(candidate.path, candidate.database)


def _open_report(candidate: Candidate) -> Trace:
    exported = Candidate(export_report(candidate.path))
    with exported.closed_on_error():
        if exported.database is None:
            problem = f"its export is broken; delete {exported.path} and try again"
            raise InputError(candidate.path, problem)
        return NsysTrace(candidate.path, exported.database)


def _open_own(candidate: Candidate) -> Trace:
    assert candidate.database is not None
    return OwnTrace(candidate.path, candidate.database)


def _open_nvprof(candidate: Candidate) -> Trace:
    assert candidate.database is not None
    return NvprofTrace(candidate.path, candidate.database)


def _open_xspace(candidate: Candidate) -> Trace:
    return XlaTrace(candidate.path, read_xspace(candidate.path))


def _open_trace_viewer(candidate: Candidate) -> Trace:
    return XlaTrace(candidate.path, read_trace_viewer(candidate.path))


def _open_mxnet(candidate: Candidate) -> Trace:
    return MxnetTrace(candidate.path)


READERS: Final = (
    Reader("gputrace's traces", lambda c: bool(c.database and is_own(c.database)), _open_own),
    Reader("nsys SQLite exports", lambda c: bool(c.database and is_nsys(c.database)), _open_nsys),
    Reader("nvprof files", lambda c: bool(c.database and is_nvprof(c.database)), _open_nvprof),
    Reader("nsys reports", lambda c: is_report(c.path), _open_report),
    Reader(
        "traces of PyTorch's profiler (.pt.trace.json, .json.gz)",
        lambda c: is_kineto(c.path, c.head),
        lambda c: open_kineto(c.path),
    ),
    Reader("TensorFlow's and JAX's .xplane.pb", lambda c: is_xspace(c.content), _open_xspace),
    Reader("their .trace.json.gz", lambda c: is_trace_viewer(c.content), _open_trace_viewer),
    Reader("MXNet's profiles", lambda c: is_mxnet(c.content), _open_mxnet),
)


_IN_FOLDERS: Final = (
    *("*.sqlite", "*.nvvp", "*.nvprof"),
    *("*.pt.trace.json", "*.pt.trace.json.gz", "*.xplane.pb"),
)
"""What the traces are called that a folder stands for; those that are named may have any name."""
_LOGS: Final = ("*.csv", "*.log", "*.txt")
"""What logs of nvidia-smi may be called; which of these are some is told by their content."""


def open_trace(path: Path | str) -> Trace:
    """Opens a trace with the reader that recognises it; raises InputError where none does."""
    candidate = Candidate(Path(path))
    if not candidate.head:
        raise InputError(path, "the file is empty; the recording or the copy failed")
    with candidate.closed_on_error():
        for reader in _readers():
            if reader.recognises(candidate):
                return reader.open(candidate)
        raise InputError(path, _unknown(candidate))


def open_traces(paths: Sequence[Path | str]) -> Trace:
    """Opens the traces of one run as one; a folder stands for the traces in it.

    Logs of nvidia-smi among them say what the GPUs did meanwhile. Raises InputError where one
    cannot be read, or where they are not of one run.
    """
    files = [file for path in paths for file in _files(Path(path))]
    logs = [file for file in files if _is_log(file)] if len(files) > 1 else []
    trace = _open_all([file for file in files if file not in logs], files[0])
    if logs:
        with ExitStack() as opened:
            opened.callback(trace.close)
            join_logs(trace, logs)
            opened.pop_all()
    return trace


def _open_all(files: Sequence[Path], first: Path) -> Trace:
    if not files:
        problem = "a log of nvidia-smi tells nothing alone; name the trace that it belongs to, too"
        raise InputError(first, problem)
    if len(files) == 1:
        return open_trace(files[0])
    check_paths(files)
    with ExitStack() as opened:
        traces = []
        for file in files:
            traces.append(open_trace(file))
            opened.callback(traces[-1].close)
        merged = merge(traces)
        opened.pop_all()
    return merged


def _files(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # noqa: PTH112 - what cannot be looked at is its reader's to refuse
        return [path]
    files = _in_folder(path, _IN_FOLDERS)
    if not files:
        patterns = ", ".join(_IN_FOLDERS)
        raise InputError(path, f"is a directory without traces in it ({patterns}); name the files")
    return files + [file for file in _in_folder(path, _LOGS) if _is_log(file, surely=True)]


def _in_folder(path: Path, patterns: Sequence[str]) -> list[Path]:
    found = {file for pattern in patterns for file in path.glob(pattern)}
    return sorted(file for file in found if not file.name.startswith("."))


def _is_log(path: Path, surely: bool = False) -> bool:
    """Whether a file is a log of nvidia-smi; what cannot be read is its reader's to refuse."""
    try:
        return is_smi(Candidate(path).head, surely)
    except InputError:
        return False


def _readers() -> Iterator[Reader]:
    yield from READERS
    # Asked for only where no reader of ours knows the file: looking them up takes a while.
    from importlib.metadata import entry_points

    for entry in entry_points(group="gputrace.readers"):
        yield entry.load()


def _unknown(candidate: Candidate) -> str:
    readable = ", ".join(reader.files for reader in READERS)
    if candidate.database is None:
        if told := explain(candidate.content):
            return told
        return f"not a trace that gputrace knows; it reads {readable}"
    tables = list(candidate.database.tables)
    if candidate.database.is_dlprof:
        return "a DLProf database, not a timeline; analyze the nsys export that it was made from"
    shown = ", ".join(tables[:3]) + (", …" if len(tables) > 3 else "") if tables else "none"
    return f"an SQLite file, but not a trace (tables: {shown}); gputrace reads {readable}"
