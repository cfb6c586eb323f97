"""Registry of readers, including plugins, and detection of file formats.

A reader is imported only for a file that no reader before it recognizes: importing all of them
takes as long as reading a small trace. Errors in plugins are attributed to the plugin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Final

from gputrace.errors import InputError, PluginError
from gputrace.model.trace import LeftOut, Trace
from gputrace.plugins import Plugin, call, expect, load, plugins, tell
from gputrace.readers.error_policy import STOP, ErrorPolicy
from gputrace.readers.gzip_io import peek
from gputrace.readers.nsys_export import is_table_folder
from gputrace.store.sqlite import MAGIC, Database, open_input


class Candidate:
    """A file of unknown format, inspected by readers to recognize their own.

    Attributes:
        path: the file, or a folder of tables; it exists and is readable.
        breaks: the error policy for broken content.
        windows: whether only windows of it will be read, so that long text need not be held.
        head: its first 4096 bytes; empty for a folder.
        content: the first 4096 bytes of its uncompressed content.
    """

    def __init__(self, path: Path, breaks: ErrorPolicy = STOP, windows: bool = False) -> None:
        self.path, self.breaks, self.windows = path, breaks, windows
        self.is_folder = is_table_folder(path)
        self.head = b"" if self.is_folder else _head(path)

    @cached_property
    def content(self) -> bytes:
        return peek(self.head, 4096)

    @cached_property
    def database(self) -> Database | None:
        """The file as an SQLite database, opened once for all readers; None for other files."""
        return Database(self.path) if self.head.startswith(MAGIC) else None

    def close(self) -> None:
        """Close the database, if it was opened."""
        if (database := self.__dict__.get("database")) is not None:
            database.close()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the file if the ``with`` block raises."""
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
    """Reader of one file format. Other packages can add readers (`gputrace.plugins`)."""

    files: str
    """Name of such files for users, in the plural."""
    recognises: Callable[[Candidate], bool]
    """Predicate on the content, not on the name."""
    open: Callable[[Candidate], Trace]
    """Function that opens the file; raises InputError if it is broken or cannot be analyzed."""
    decodes: bool = False
    """True if opening decodes the whole file; several such files are decoded in parallel."""


def _is_own(candidate: Candidate) -> bool:
    from gputrace.readers.gputrace import is_own

    return candidate.database is not None and is_own(candidate.database)


def _open_own(candidate: Candidate) -> Trace:
    from gputrace.readers.gputrace import OwnTrace

    assert candidate.database is not None
    return OwnTrace(candidate.path, candidate.database)


def _is_nsys(candidate: Candidate) -> bool:
    from gputrace.readers.nsys import is_nsys

    return candidate.database is not None and is_nsys(candidate.database)


def _open_nsys(candidate: Candidate) -> Trace:
    from gputrace.readers.nsys import NsysTrace

    assert candidate.database is not None
    return NsysTrace(candidate.path, candidate.database)


def _is_report(candidate: Candidate) -> bool:
    from gputrace.readers.nsys_export import is_report

    return is_report(candidate.path)


def _open_report(candidate: Candidate) -> Trace:
    from gputrace.readers.nsys_export import export_report

    return _open_converted(candidate, export_report(candidate.path))


def _open_tables(candidate: Candidate) -> Trace:
    from gputrace.readers.nsys_export import convert_folder

    return _open_converted(candidate, convert_folder(candidate.path))


def _open_converted(candidate: Candidate, database: Path) -> Trace:
    """Open the SQLite file that the input was converted to, in the cache."""
    from gputrace.readers.nsys import NsysTrace

    converted = Candidate(database)
    with converted.closed_on_error():
        if converted.database is None:
            problem = f"what was made of it is broken; delete {converted.path} and try again"
            raise InputError(candidate.path, problem)
        return NsysTrace(candidate.path, converted.database)


def _is_nvprof(candidate: Candidate) -> bool:
    from gputrace.readers.nvprof import is_nvprof

    return candidate.database is not None and is_nvprof(candidate.database)


def _open_nvprof(candidate: Candidate) -> Trace:
    from gputrace.readers.nvprof import NvprofTrace

    assert candidate.database is not None
    return NvprofTrace(candidate.path, candidate.database)


def _is_kineto(candidate: Candidate) -> bool:
    from gputrace.readers.kineto import is_kineto

    return is_kineto(candidate.path, candidate.head)


def _open_kineto(candidate: Candidate) -> Trace:
    from gputrace.readers.kineto import LargeKineto, open_kineto

    opening = LargeKineto if candidate.windows else open_kineto
    return opening(candidate.path, candidate.breaks)


def _is_xspace(candidate: Candidate) -> bool:
    from gputrace.readers.xplane import is_xspace

    return is_xspace(candidate.content)


def _open_xspace(candidate: Candidate) -> Trace:
    from gputrace.readers.xla import XlaTrace
    from gputrace.readers.xplane import read_xspace

    return XlaTrace(candidate.path, read_xspace(candidate.path, candidate.breaks))


def _is_trace_viewer(candidate: Candidate) -> bool:
    from gputrace.readers.xla import is_trace_viewer

    return is_trace_viewer(candidate.content)


def _open_trace_viewer(candidate: Candidate) -> Trace:
    from gputrace.readers.xla import XlaTrace, read_trace_viewer

    return XlaTrace(candidate.path, read_trace_viewer(candidate.path, candidate.breaks))


def _is_mxnet(candidate: Candidate) -> bool:
    from gputrace.readers.mxnet import is_mxnet

    return is_mxnet(candidate.content)


def _open_mxnet(candidate: Candidate) -> Trace:
    from gputrace.readers.mxnet import MxnetTrace

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
    """Return the first reader that recognizes a file, or None."""
    return next((reader for reader in _readers() if reader.recognises(candidate)), None)


def open_trace(path: Path | str, keep_going: bool = False, windows: bool = False) -> Trace:
    """Open a trace with the reader that recognizes it; raise InputError if none does.

    With ``keep_going``, a broken file is read up to the damage, if that part has GPU activity, and
    ``quality.left_out`` says so. With ``windows``, long text files are scanned but not held, and
    scanned again for each window.
    """
    candidate = Candidate(Path(path), ErrorPolicy(keep_going), windows)
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
    # Plugins are loaded only for files that no built-in reader recognizes.

    yield from plugged_readers()


def _unknown(candidate: Candidate) -> str:
    readable = ", ".join(str(reader.files) for reader in _readers())
    if candidate.database is None:
        if explanation := explain_unsupported(candidate.content):
            return explanation
        return f"not a trace that gputrace knows; it reads {readable}"
    tables = list(candidate.database.tables)
    if candidate.database.is_dlprof:
        return "a DLProf database, not a timeline; analyze the nsys export that it was made from"
    shown = ", ".join(tables[:3]) + (", …" if len(tables) > 3 else "") if tables else "none"
    return f"an SQLite file, but not a trace (tables: {shown}); gputrace reads {readable}"


def plugged_readers() -> Iterator[Reader]:
    """Yield the plugin readers that can be loaded."""
    yield from filter(None, map(_of_plugin, plugins("readers")))


@cache
def _of_plugin(plugin: Plugin) -> Reader | None:
    """Load a plugin's reader, wrapped to attribute errors to it; None if it cannot be loaded."""
    try:
        reader: Reader = load(plugin, Reader)
    except PluginError as error:
        tell(error)
        return None
    return replace(
        reader,
        recognises=partial(_recognises, plugin, reader),
        open=partial(_open_by_plugin, plugin, reader),
    )


def _recognises(plugin: Plugin, reader: Reader, candidate: Candidate) -> bool:
    try:
        return bool(call(plugin, reader.recognises, candidate))
    except PluginError as error:
        tell(error)
        return False


def _open_by_plugin(plugin: Plugin, reader: Reader, candidate: Candidate) -> Trace:
    try:
        opened: Trace = expect(plugin, call(plugin, reader.open, candidate), Trace)
    except PluginError as error:
        raise InputError(candidate.path, str(error)) from error
    return opened


_RECORD: Final = "record the program with `gputrace record -- python train.py`"
_KNOWN: Final = (
    (
        re.compile(rb'^\s*\{\s*"call_history"\s*:'),
        "a TimerHook of Chainer: how long each call took, but not when, so there is no timeline; "
        + _RECORD,
    ),
    (
        re.compile(rb'^\s*\[\s*\{.{0,200}"start_time_since_epoch_in_micros"', re.DOTALL),
        "a timeline of Horovod: when tensors were negotiated and reduced, but not what a GPU ran; "
        + _RECORD,
    ),
    (
        re.compile(
            rb'"traceEvents".*"(Allocators|/[^"]{0,200}[/:]device:[^"]{1,40} (Compute|Tensors))"',
            re.DOTALL,
        ),
        "a timeline of one session.run of TensorFlow (RunMetadata): operations, but not what a GPU "
        "ran in a whole training; use TensorFlow's profiler (.xplane.pb), or " + _RECORD,
    ),
)


def explain_unsupported(content: bytes) -> str:
    """Explain what an unsupported file is and what to do instead; empty if it is not known.

    ``content`` is the beginning of the uncompressed file.
    """
    return next((explanation for pattern, explanation in _KNOWN if pattern.search(content)), "")
