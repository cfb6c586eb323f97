"""Registry of readers, including plugins, and detection of file formats.

A reader is imported only for a file that no reader before it recognizes: importing all of them
takes as long as reading a small trace. Errors in plugins are attributed to the plugin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from gputrace.errors import STOP, ErrorPolicy, GputraceError, InputError, PluginError
from gputrace.model.results import LeftOut
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace
from gputrace.plugins import Plugin, call, expect, load, plugins, warn
from gputrace.readers.compressed import can_unpack, compression, peek, unpack_database
from gputrace.readers.nsys_export import is_report, is_table_folder
from gputrace.store.sqlite_reader import Database, open_input
from gputrace.store.sqlite_security import MAGIC

_ZSTD_BLOCK: Final = 128 << 10
"""Maximum bytes of a block, of which nothing can be read before its end."""


class Candidate:
    """A file of unknown format, inspected by readers to recognize their own."""

    def __init__(self, path: Path, breaks: ErrorPolicy = STOP, windows: bool = False) -> None:
        """Inspect a file or a folder of tables, which must exist and be readable.

        ``breaks`` is the error policy for broken content. With ``windows``, only windows of it
        will be read, so that long text need not be held.
        """
        self.path, self.breaks, self.windows = path, breaks, windows
        self.is_folder = os.path.isdir(path) and is_table_folder(path)  # noqa: PTH112
        self.head = b""
        """The first 4096 bytes, more where zstd has a block there; empty for a folder."""
        if not self.is_folder:
            with open_input(path) as file:
                self.head = file.read(4096)
                if compression(self.head) == "zstd":
                    self.head += file.read(_ZSTD_BLOCK)

    @cached_property
    def content(self) -> bytes:
        """The first 4096 bytes of the uncompressed content."""
        return peek(self.head, 4096)

    @cached_property
    def database(self) -> Database | None:
        """The file as an SQLite database, opened once for all readers; None for other files.

        A compressed one is unpacked into the cache.
        """
        form = compression(self.head)
        if not self.content.startswith(MAGIC) or (form and not can_unpack(form)):
            return None
        return Database(unpack_database(self.path) if form else self.path)

    def close(self) -> None:
        """Close the database, if it was opened."""
        if (database := self.__dict__.get("database")) is not None:
            database.close()


class Reader(Struct, frozen=True):
    """Reader of one file format. Other packages can add readers (`gputrace.plugins`)."""

    files: str
    """Name of such files for users, in the plural."""
    recognises: Callable[[Candidate], bool]
    """Predicate on the content, not on the name."""
    open: Callable[[Candidate], Trace]
    """Function that opens the file; raises InputError if it is broken or cannot be analyzed."""
    decodes: bool = False
    """True if opening decodes the whole file; several such files are decoded in parallel."""


def _call(module: str, function: str, *arguments: Any) -> Any:
    """Import the module of a reader, and call its function."""
    return getattr(import_module(f"gputrace.readers.{module}"), function)(*arguments)


def _built_in(files: str, module: str, recognises: str, opens: str, text: bool = False) -> Reader:
    """Return a built-in reader, given its functions on databases, or on the content of text."""
    is_known, opened = partial(_call, module, recognises), partial(_call, module, opens)
    if text:
        return Reader(
            files,
            lambda file: is_known(file.content),
            lambda file: opened(file.path, file.breaks),
            decodes=True,
        )
    return Reader(
        files,
        lambda file: file.database is not None and is_known(file.database),
        lambda file: opened(file.path, file.database),
    )


def _converted(files: str, recognises: Callable[[Candidate], bool], converts: str) -> Reader:
    """Return a reader of files that a function of `nsys_export` converts to SQLite in the cache."""

    def opens(file: Candidate) -> Trace:
        converted = Candidate(_call("nsys_export", converts, file.path))
        try:
            if converted.database is None:
                problem = f"its converted copy is broken; delete {converted.path} and try again"
                raise InputError(file.path, problem)
            trace: Trace = _call("nsys", "NsysTrace", file.path, converted.database)
        except BaseException:
            converted.close()
            raise
        return trace

    return Reader(files, recognises, opens)


_TIMELINES: Final = "framework_timelines"

READERS: Final = (
    _built_in("gputrace's traces", "gputrace", "is_own", "OwnTrace"),
    _built_in("nsys SQLite exports", "nsys", "is_nsys", "NsysTrace"),
    _built_in("nvprof files", "nvprof", "is_nvprof", "NvprofTrace"),
    _built_in("databases of AMD's rocprofv3", "rocprof", "is_rocpd", "open_rocpd"),
    _converted("nsys reports", lambda file: is_report(file.path), "export_report"),
    _converted(
        "folders of tables that nsys exports", lambda file: file.is_folder, "convert_folder"
    ),
    Reader(
        "traces of PyTorch's profiler (.pt.trace.json, .json.gz)",
        lambda file: _call("chrome_json", "is_kineto", file.path, file.head),
        lambda file: _call(
            "kineto", "LargeKineto" if file.windows else "open_kineto", file.path, file.breaks
        ),
        decodes=True,
    ),
    _built_in("TensorFlow's and JAX's .xplane.pb", "xplane", "is_xspace", "open_xspace", text=True),
    _built_in("their .trace.json.gz", "xplane", "is_trace_viewer", "open_trace_viewer", text=True),
    _built_in("their JSON", "rocprof", "is_rocprof_json", "open_rocprof_json", text=True),
    _built_in("MXNet's profiles", _TIMELINES, "is_mxnet", "MxnetTrace", text=True),
    _built_in("Horovod's timelines", _TIMELINES, "is_horovod", "HorovodTrace", text=True),
)


def reader_of(candidate: Candidate) -> Reader | None:
    """Return the first reader that recognizes a file, or None."""
    return next((reader for reader in all_readers() if reader.recognises(candidate)), None)


def open_trace(path: Path | str, keep_going: bool = False, windows: bool = False) -> Trace:
    """Open a trace with the reader that recognizes it; raise InputError if none does.

    With ``keep_going``, a broken file is read up to the damage, if that part has GPU activity, and
    ``quality.left_out`` says so. With ``windows``, long text files are scanned but not held, and
    scanned again for each window.
    """
    breaks = ErrorPolicy(keep_going)
    candidate = Candidate(Path(path), breaks, windows)
    if not candidate.head and not candidate.is_folder:
        raise InputError(path, "the file is empty; the recording or the copy failed")
    try:
        reader = reader_of(candidate)
        if reader is None:
            raise InputError(path, _unknown(candidate))
        trace = reader.open(candidate)
    except BaseException as error:
        candidate.close()
        if isinstance(error, InputError):
            raise breaks.errors[0] if breaks.errors else error from None
        raise
    if breaks.errors:
        if trace.no_gpu is not None:
            trace.close()
            raise breaks.errors[0]
        problem = f"{breaks.errors[0].problem}; read up to there"
        trace.quality.left_out.append(LeftOut(str(candidate.path), problem))
    return trace


def try_open(path: Path, keep_going: bool = False, windows: bool = False) -> Trace | GputraceError:
    """Call `open_trace`, but return its error instead of raising it."""
    try:
        return open_trace(path, keep_going, windows)
    except GputraceError as error:
        return error


def _unknown(candidate: Candidate) -> str:
    path = candidate.path
    if path.suffix in _PROGRAMS or candidate.content.startswith((b"#!", b"\x7fELF")):
        from shlex import quote

        command = f"{_PROGRAMS.get(path.suffix, '')}{quote(str(path))}"
        return f"a program, not a trace; record it first: gputrace record -- {command}"
    if _call("memory_snapshot", "is_memory_snapshot", path):
        return "a snapshot of PyTorch's memory: `gputrace analyze` shows it, given snapshots alone"
    readable = ", ".join(str(reader.files) for reader in all_readers())
    if candidate.database is None:
        form = compression(candidate.head)
        if form and not can_unpack(form):
            return "compressed with zstd; to read it: pip install zstandard, or Python 3.14"
        unknown = f"not a trace that gputrace knows; it reads {readable}"
        return next((why for known, why in _KNOWN if re.search(known, candidate.content)), unknown)
    if candidate.database.is_dlprof:
        return "a DLProf database, not a timeline; analyze the nsys export that it was made from"
    if candidate.database.has("rocpd_op") and candidate.database.has("rocpd_api"):
        return f"a database of AMD's rocmProfileData (.rpd), which gputrace does not read; {_ROCPD}"
    tables = list(candidate.database.tables)
    more = ["…"] if len(tables) > 3 else []
    shown = ", ".join([*tables[:3], *more]) or "none"
    return f"an SQLite file, but not a trace (tables: {shown}); gputrace reads {readable}"


def all_readers() -> Iterator[Reader]:
    """Yield the readers; plugins are loaded only after the built-in ones, and if they work."""
    yield from READERS
    yield from filter(None, map(_of_plugin, plugins("readers")))


@cache
def _of_plugin(plugin: Plugin) -> Reader | None:
    """Load a plugin's reader, wrapped to attribute errors to it; None if it cannot be loaded."""
    try:
        reader: Reader = load(plugin, Reader)
    except PluginError as error:
        warn(error)
        return None

    def recognises(candidate: Candidate) -> bool:
        try:
            return bool(call(plugin, reader.recognises, candidate))
        except PluginError as error:
            warn(error)
            return False

    def opens(candidate: Candidate) -> Trace:
        try:
            opened: Trace = expect(plugin, call(plugin, reader.open, candidate), Trace)
        except PluginError as error:
            raise InputError(candidate.path, str(error)) from error
        return opened

    return replace(reader, recognises=recognises, open=opens)


_PROGRAMS: Final = {".py": "python ", ".sh": "sh "}
"""Suffixes of programs, with the interpreters that run them."""
_RECORD: Final = "record the program with `gputrace record -- python train.py`"
_ROCPD: Final = (
    "record the program with `rocprofv3 --runtime-trace --output-format rocpd -- python train.py`"
)
_KNOWN: Final = (
    (
        rb'^\s*\{\s*"call_history"\s*:',
        "a TimerHook of Chainer: how long each call took, but not when, so there is no timeline; "
        + _RECORD,
    ),
    (
        rb'(?s)"traceEvents".*"(Allocators|/[^"]{0,200}[/:]device:[^"]{1,40} (Compute|Tensors))"',
        "a timeline of one session.run of TensorFlow (RunMetadata): operations, but not what a GPU "
        "ran in a whole training; use TensorFlow's profiler (.xplane.pb), or " + _RECORD,
    ),
)
"""Beginnings of the content of unsupported files, what these are and what to do instead."""
