"""The list of readers, and how a file finds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from gputrace.errors import InputError
from gputrace.traces.breaks import STOP, Breaks
from gputrace.traces.gputrace import OwnTrace, is_own
from gputrace.traces.kineto.large import LargeKineto
from gputrace.traces.kineto.reader import is_kineto, open_kineto
from gputrace.traces.mxnet import MxnetTrace, is_mxnet
from gputrace.traces.nsys.folder import convert_folder, is_table_folder
from gputrace.traces.nsys.reader import NsysTrace, is_nsys
from gputrace.traces.nsys.report import export_report, is_report
from gputrace.traces.nvprof.reader import NvprofTrace, is_nvprof
from gputrace.traces.packed import peek
from gputrace.traces.quality import LeftOut
from gputrace.traces.refused import explain
from gputrace.traces.sqlite import MAGIC, Database, open_input
from gputrace.traces.trace import Trace
from gputrace.traces.xla.chrome import is_trace_viewer, read_trace_viewer
from gputrace.traces.xla.reader import XlaTrace
from gputrace.traces.xla.xspace import is_xspace, read_xspace


class Candidate:
    """A file that readers look at to tell whether it is theirs.

    Attributes:
        path: the file, or the folder of tables, which exists and can be read.
        breaks: what to do where the content is broken.
        windows: whether only windows of it will be read, so that long text is not to be held.
        head: its first 4096 bytes; none of a folder.
        content: the same, unpacked where the file is compressed with gzip.
    """

    def __init__(self, path: Path, breaks: Breaks = STOP, windows: bool = False) -> None:
        self.path, self.breaks, self.windows = path, breaks, windows
        self.is_folder = is_table_folder(path)
        self.head = b"" if self.is_folder else _head(path)

    @cached_property
    def content(self) -> bytes:
        return peek(self.head, 4096)

    @cached_property
    def database(self) -> Database | None:
        """The file as SQLite, opened once for all readers; None where it is something else."""
        return Database(self.path) if self.head.startswith(MAGIC) else None

    def close(self) -> None:
        """Gives the file back."""
        if (database := self.__dict__.get("database")) is not None:
            database.close()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Gives the file back where no reader takes it."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _head(path: Path) -> bytes:
    with open_input(path) as file:
        head: bytes = file.read(4096)
    return head


@dataclass(frozen=True, slots=True)
class Reader:
    """One kind of file. Other packages add theirs as entry points of ``gputrace.readers``."""

    files: str
    """What a person calls such files, in the plural."""
    recognises: Callable[[Candidate], bool]
    """Looks at the content, not at the name."""
    open: Callable[[Candidate], Trace]
    """Raises InputError where the file is broken, or holds nothing that can be analyzed."""
    decodes: bool = False
    """Whether opening reads the whole file, which several processes do sooner for several."""


def _open_nsys(candidate: Candidate) -> Trace:
    assert candidate.database is not None
    return NsysTrace(candidate.path, candidate.database)


def _open_report(candidate: Candidate) -> Trace:
    return _open_made(candidate, export_report(candidate.path))


def _open_tables(candidate: Candidate) -> Trace:
    return _open_made(candidate, convert_folder(candidate.path))


def _open_made(candidate: Candidate, database: Path) -> Trace:
    """What was made of the input, and is kept in the cache."""
    made = Candidate(database)
    with made.closed_on_error():
        if made.database is None:
            problem = f"what was made of it is broken; delete {made.path} and try again"
            raise InputError(candidate.path, problem)
        return NsysTrace(candidate.path, made.database)


def _open_own(candidate: Candidate) -> Trace:
    assert candidate.database is not None
    return OwnTrace(candidate.path, candidate.database)


def _open_nvprof(candidate: Candidate) -> Trace:
    assert candidate.database is not None
    return NvprofTrace(candidate.path, candidate.database)


def _open_kineto(candidate: Candidate) -> Trace:
    opening = LargeKineto if candidate.windows else open_kineto
    return opening(candidate.path, candidate.breaks)


def _open_xspace(candidate: Candidate) -> Trace:
    return XlaTrace(candidate.path, read_xspace(candidate.path, candidate.breaks))


def _open_trace_viewer(candidate: Candidate) -> Trace:
    return XlaTrace(candidate.path, read_trace_viewer(candidate.path, candidate.breaks))


def _open_mxnet(candidate: Candidate) -> Trace:
    return MxnetTrace(candidate.path, candidate.breaks)


READERS: Final = (
    Reader("gputrace's traces", lambda c: bool(c.database and is_own(c.database)), _open_own),
    Reader("nsys SQLite exports", lambda c: bool(c.database and is_nsys(c.database)), _open_nsys),
    Reader("nvprof files", lambda c: bool(c.database and is_nvprof(c.database)), _open_nvprof),
    Reader("nsys reports", lambda c: is_report(c.path), _open_report),
    Reader("folders of tables that nsys exports", lambda c: c.is_folder, _open_tables),
    Reader(
        "traces of PyTorch's profiler (.pt.trace.json, .json.gz)",
        lambda c: is_kineto(c.path, c.head),
        _open_kineto,
        decodes=True,
    ),
    Reader(
        "TensorFlow's and JAX's .xplane.pb",
        lambda c: is_xspace(c.content),
        _open_xspace,
        decodes=True,
    ),
    Reader(
        "their .trace.json.gz",
        lambda c: is_trace_viewer(c.content),
        _open_trace_viewer,
        decodes=True,
    ),
    Reader("MXNet's profiles", lambda c: is_mxnet(c.content), _open_mxnet, decodes=True),
)

EMPTY: Final = "the file is empty; the recording or the copy failed"


def reader_of(candidate: Candidate) -> Reader | None:
    """The first reader that recognises a file."""
    return next((reader for reader in _readers() if reader.recognises(candidate)), None)


def open_trace(path: Path | str, keep_going: bool = False, windows: bool = False) -> Trace:
    """Opens a trace with the reader that recognises it; raises InputError where none does.

    With ``keep_going`` a broken file is read as far as it is whole, if that is any of a GPU's work,
    and its ``quality.left_out`` says so. With ``windows`` long text is gone through but not held,
    and again for each window.
    """
    candidate = Candidate(Path(path), Breaks(keep_going), windows)
    if not candidate.head and not candidate.is_folder:
        raise InputError(path, EMPTY)
    with candidate.closed_on_error():
        reader = reader_of(candidate)
        if reader is None:
            raise InputError(path, _unknown(candidate))
        return _opened(reader, candidate)


def _opened(reader: Reader, candidate: Candidate) -> Trace:
    breaks = candidate.breaks
    try:
        trace = reader.open(candidate)
    except InputError as error:
        raise breaks.errors[0] if breaks.errors else error from None
    if breaks.errors:
        if trace.no_gpu is not None:
            trace.close()
            raise breaks.errors[0]
        problem = f"{breaks.errors[0].problem}; read as far as it is whole"
        trace.quality.left_out.append(LeftOut(str(candidate.path), problem))
    return trace


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
