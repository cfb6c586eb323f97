"""The list of readers, and how a file finds its own.

A reader is imported when a file is looked at that none before it knows: all of them, and what they
import, take as long as to read a small trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.errors import InputError
from gputrace.traces.breaks import Breaks
from gputrace.traces.candidate import Candidate
from gputrace.traces.quality import LeftOut
from gputrace.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Reader:
    """One kind of file. Other packages add theirs (`gputrace.plugins`)."""

    files: str
    """What a person calls such files, in the plural."""
    recognises: Callable[[Candidate], bool]
    """Looks at the content, not at the name."""
    open: Callable[[Candidate], Trace]
    """Raises InputError where the file is broken, or holds nothing that can be analyzed."""
    decodes: bool = False
    """Whether opening reads the whole file, which several processes do sooner for several."""


def _is_own(candidate: Candidate) -> bool:
    from gputrace.traces.gputrace import is_own

    return candidate.database is not None and is_own(candidate.database)


def _open_own(candidate: Candidate) -> Trace:
    from gputrace.traces.gputrace import OwnTrace

    assert candidate.database is not None
    return OwnTrace(candidate.path, candidate.database)


def _is_nsys(candidate: Candidate) -> bool:
    from gputrace.traces.nsys.reader import is_nsys

    return candidate.database is not None and is_nsys(candidate.database)


def _open_nsys(candidate: Candidate) -> Trace:
    from gputrace.traces.nsys.reader import NsysTrace

    assert candidate.database is not None
    return NsysTrace(candidate.path, candidate.database)


def _is_report(candidate: Candidate) -> bool:
    from gputrace.traces.nsys.report import is_report

    return is_report(candidate.path)


def _open_report(candidate: Candidate) -> Trace:
    from gputrace.traces.nsys.report import export_report

    return _open_made(candidate, export_report(candidate.path))


def _open_tables(candidate: Candidate) -> Trace:
    from gputrace.traces.nsys.folder import convert_folder

    return _open_made(candidate, convert_folder(candidate.path))


def _open_made(candidate: Candidate, database: Path) -> Trace:
    """What was made of the input, and is kept in the cache."""
    from gputrace.traces.nsys.reader import NsysTrace

    made = Candidate(database)
    with made.closed_on_error():
        if made.database is None:
            problem = f"what was made of it is broken; delete {made.path} and try again"
            raise InputError(candidate.path, problem)
        return NsysTrace(candidate.path, made.database)


def _is_nvprof(candidate: Candidate) -> bool:
    from gputrace.traces.nvprof.reader import is_nvprof

    return candidate.database is not None and is_nvprof(candidate.database)


def _open_nvprof(candidate: Candidate) -> Trace:
    from gputrace.traces.nvprof.reader import NvprofTrace

    assert candidate.database is not None
    return NvprofTrace(candidate.path, candidate.database)


def _is_kineto(candidate: Candidate) -> bool:
    from gputrace.traces.kineto.reader import is_kineto

    return is_kineto(candidate.path, candidate.head)


def _open_kineto(candidate: Candidate) -> Trace:
    from gputrace.traces.kineto.large import LargeKineto
    from gputrace.traces.kineto.reader import open_kineto

    opening = LargeKineto if candidate.windows else open_kineto
    return opening(candidate.path, candidate.breaks)


def _is_xspace(candidate: Candidate) -> bool:
    from gputrace.traces.xla.xspace import is_xspace

    return is_xspace(candidate.content)


def _open_xspace(candidate: Candidate) -> Trace:
    from gputrace.traces.xla.reader import XlaTrace
    from gputrace.traces.xla.xspace import read_xspace

    return XlaTrace(candidate.path, read_xspace(candidate.path, candidate.breaks))


def _is_trace_viewer(candidate: Candidate) -> bool:
    from gputrace.traces.xla.chrome import is_trace_viewer

    return is_trace_viewer(candidate.content)


def _open_trace_viewer(candidate: Candidate) -> Trace:
    from gputrace.traces.xla.chrome import read_trace_viewer
    from gputrace.traces.xla.reader import XlaTrace

    return XlaTrace(candidate.path, read_trace_viewer(candidate.path, candidate.breaks))


def _is_mxnet(candidate: Candidate) -> bool:
    from gputrace.traces.mxnet import is_mxnet

    return is_mxnet(candidate.content)


def _open_mxnet(candidate: Candidate) -> Trace:
    from gputrace.traces.mxnet import MxnetTrace

    return MxnetTrace(candidate.path, candidate.breaks)


READERS: Final = (
    Reader("gputrace's traces", _is_own, _open_own),
    Reader("nsys SQLite exports", _is_nsys, _open_nsys),
    Reader("nvprof files", _is_nvprof, _open_nvprof),
    Reader("nsys reports", _is_report, _open_report),
    Reader("folders of tables that nsys exports", lambda c: c.is_folder, _open_tables),
    Reader(
        "traces of PyTorch's profiler (.pt.trace.json, .json.gz)",
        _is_kineto,
        _open_kineto,
        decodes=True,
    ),
    Reader("TensorFlow's and JAX's .xplane.pb", _is_xspace, _open_xspace, decodes=True),
    Reader("their .trace.json.gz", _is_trace_viewer, _open_trace_viewer, decodes=True),
    Reader("MXNet's profiles", _is_mxnet, _open_mxnet, decodes=True),
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
    # Asked for only where no reader of ours knows the file.
    from gputrace.traces.plugged import plugged_readers

    yield from plugged_readers()


def _unknown(candidate: Candidate) -> str:
    readable = ", ".join(str(reader.files) for reader in _readers())
    if candidate.database is None:
        from gputrace.traces.refused import explain

        if told := explain(candidate.content):
            return told
        return f"not a trace that gputrace knows; it reads {readable}"
    tables = list(candidate.database.tables)
    if candidate.database.is_dlprof:
        return "a DLProf database, not a timeline; analyze the nsys export that it was made from"
    shown = ", ".join(tables[:3]) + (", …" if len(tables) > 3 else "") if tables else "none"
    return f"an SQLite file, but not a trace (tables: {shown}); gputrace reads {readable}"
