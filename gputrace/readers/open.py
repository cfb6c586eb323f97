"""Opening of files, folders and URLs as the trace of one run, optionally without unreadable files.

Remote files (``s3://``, ``gs://``, ``file://``…) are downloaded through fsspec into the cache
folder first, since SQLite needs a local file. Unchanged files are not downloaded again.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gputrace.errors import KEEP_GOING, GputraceError, InputError, MissingError, UsageError
from gputrace.model.results import LeftOut
from gputrace.model.trace import Trace
from gputrace.readers.compressed import text_size
from gputrace.readers.nsys_export import is_table_folder
from gputrace.readers.registry import Candidate, reader_of, try_open
from gputrace.store.cache import cache_folder
from gputrace.store.sqlite_page_scan import count_cores
from gputrace.store.sqlite_reader import LARGE
from gputrace.store.sqlite_security import is_database

if TYPE_CHECKING:
    from gputrace.model.trace import Progress

Opened = Trace | GputraceError
Opening = Callable[..., Iterator[Opened]]
"""Signature of `open_each`."""


def open_traces(
    paths: Sequence[Path | str],
    keep_going: bool = False,
    workers: int | None = None,
    windows: bool = False,
    opening: Opening | None = None,
) -> Trace:
    """Open the traces of one run as one; a folder stands for the traces in it.

    Logs of nvidia-smi among the files are joined as NVML data; alone, they are the trace. Raises
    InputError if a file cannot be read, or if they are not of one run; with ``keep_going`` only if
    no file can be read.

    Args:
        paths: files and folders.
        keep_going: continue without files that cannot be read or belong to another run than most;
            they are listed in the trace's ``quality.left_out``.
        workers: number of threads that decode files; chosen by the file sizes if not given.
        windows: only windows will be read: long text is then not held, unless there are logs,
            which are aligned in time by the whole run.
        opening: function that opens files, such as on a cluster; this machine if not given.
    """
    errors: list[GputraceError] = []
    files: list[Path] = []
    for path in paths:
        try:
            files += trace_files_in(Path(path))
        except InputError as error:
            if not keep_going:
                raise
            errors.append(error)
    logs = [file for file in files if is_log(file)]
    files = [file for file in files if file not in logs]
    if logs and not files and not errors:
        from gputrace.readers.nvidia_smi import read_logs

        return read_logs(logs)
    if windows:
        readable = [file for file in files if file.is_file() and os.access(file, os.R_OK)]
        windows = not logs and text_size(readable) > LARGE
    if opening is None:
        opening = open_each
        _allow_open_files(len(files))
    opened = opening(_distinct(files, keep_going), keep_going, workers, windows)
    errors_allowed = keep_going and (errors or len(files) > 1)
    with ExitStack() as stack:
        traces: list[Trace] = []
        for result in opened:
            if isinstance(result, Trace):
                stack.callback(result.close)
                traces.append(result)
            elif errors_allowed:
                errors.append(result)
            elif len(files) > 1 and isinstance(result, InputError):
                problem = result.problem.removesuffix(KEEP_GOING)
                raise InputError(result.path, f"{problem}, or leave it out with --keep-going")
            else:
                raise result
        run = _one_run(traces, [_left_out(error) for error in errors], keep_going)
        if logs:
            _join(run, logs, keep_going)
        stack.pop_all()
    return run


_FEW_FILES, _OTHER_FILES = 200, 100
"""Files of a run that any limit allows, and open ones that are none of a run."""


def _allow_open_files(count: int) -> None:
    """Raise the limit of open files, 1024 on many systems, as far as the system allows."""
    if count < _FEW_FILES or sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft < needed <= hard or hard == resource.RLIM_INFINITY > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    elif soft < needed:
        problem = f"{count:,} files are {needed:,} open ones, and this system allows {hard:,}"
        raise UsageError(f"{problem}; raise `ulimit -Hn`, or analyze on a cluster (--scheduler)")


_WORTH_A_THREAD: Final = 8 << 20
"""Bytes of text worth a second thread."""
_MOST_THREADS: Final = 8
"""Maximum number of threads, each of which holds the columns of a file."""


def open_each(
    files: Sequence[Path],
    keep_going: bool = False,
    workers: int | None = None,
    windows: bool = False,
) -> Iterator[Opened]:
    """Yield the trace of each file, or the error, in order; stop at an error unless ``keep_going``.

    ``workers`` threads read the files that must be decoded completely; how many depends on their
    sizes by default. The results do not depend on it.
    """
    decoded = {file for file in files if _is_decoded(file)} if len(files) > 1 else set()
    if workers is None:
        workers = min(count_cores(), _MOST_THREADS) if text_size(decoded) >= _WORTH_A_THREAD else 1
    if len(decoded) < 2 or workers < 2:
        decoded.clear()
    with ExitStack() as stack:
        if decoded:
            from concurrent.futures import ThreadPoolExecutor

            pool = ThreadPoolExecutor(workers)
            stack.callback(pool.shutdown, cancel_futures=True)
            opening = {
                file: pool.submit(try_open, file, keep_going, windows)
                for file in files
                if file in decoded
            }
        for file in files:
            is_opening = file in decoded
            opened = (
                opening.pop(file).result() if is_opening else try_open(file, keep_going, windows)
            )
            yield opened
            if not keep_going and not isinstance(opened, Trace):
                return


def _is_decoded(file: Path) -> bool:
    if is_database(file):
        return False
    try:
        with closing(Candidate(file)) as candidate:
            reader = reader_of(candidate)
    except InputError:
        return False
    return reader is not None and reader.decodes


def _join(trace: Trace, logs: Sequence[Path], keep_going: bool) -> None:
    from gputrace.readers.nvidia_smi import join_logs

    try:
        join_logs(trace, logs)
    except InputError as error:
        if not keep_going:
            raise
        trace.quality.left_out.append(_left_out(error))


def leave_out(trace: Trace, error: InputError) -> Trace:
    """Turn the run into one without the files of an error; raise it if none would remain."""
    from gputrace.store.merge import MergedTrace

    if not isinstance(trace, MergedTrace):
        raise error
    of_parts = [file for part in trace.traces for file in part.quality.left_out]
    left_out = [file for file in trace.quality.left_out if file not in of_parts]
    traces, more = _without(trace.traces, error)
    run = _one_run(traces, left_out + more, True)
    run.logged = trace.logged
    return run


def _distinct(files: Sequence[Path], keep_going: bool) -> list[Path]:
    """Return the files without duplicates under other names, which are errors by default."""
    seen: dict[object, Path] = {}
    for file in files:
        try:
            status = file.stat()
        except (OSError, ValueError):
            seen[file] = file  # Its reader reports the problem.
            continue
        key = status.st_dev, status.st_ino
        if key in seen and not keep_going:
            also = "" if seen[key] == file else f" (it is {seen[key]} too)"
            raise InputError(file, f"given twice{also}; name each file once")
        seen.setdefault(key, file)
    return list(seen.values())


def _one_run(traces: list[Trace], left_out: list[LeftOut], keep_going: bool) -> Trace:
    if len(traces) > 1:
        from gputrace.readers.in_memory import join_windows

        traces = join_windows(traces)
    while True:
        if not traces:
            first, *others = left_out
            more = f" (and {len(others)} more cannot be read)" if others else ""
            raise InputError(first.path, first.problem + more)
        try:
            run = traces[0]
            if len(traces) > 1:
                from gputrace.store.merge import merge

                run = merge(traces)
        except InputError as error:
            if not keep_going:
                raise
            traces, lost = _without(traces, error)
            left_out = left_out + lost
            continue
        run.quality.left_out[:0] = left_out
        if left_out and len(traces) == 1:
            from gputrace.store.merge import missing_ranks

            run.quality.notes += filter(None, [missing_ranks(traces)])
        return run


def _without(traces: Sequence[Trace], error: InputError) -> tuple[list[Trace], list[LeftOut]]:
    """Return the traces unaffected by an error; close the others and return them as left out."""
    from gputrace.store.merge import NotOneRun

    if isinstance(error, NotOneRun):
        lost = {path for run in error.runs[1:] for path in run}
        problem = f"of another run than {error.runs[0][0]}"
        more = [LeftOut(str(path), problem) for path in sorted(lost)]
    else:
        lost, more = {error.path}, [_left_out(error)]
    kept = [trace for trace in traces if trace.path not in lost]
    if not kept or len(kept) == len(traces):
        raise error
    for trace in traces:
        if trace.path in lost:
            trace.close()
    return kept, more


def _left_out(error: GputraceError) -> LeftOut:
    if isinstance(error, InputError):
        return LeftOut(str(error.path), error.problem)
    path, _, problem = str(error).partition(": ")
    return LeftOut(path, problem)


_PACKED: Final = ("", ".gz", ".xz", ".zst")
_TWINS: Final = {
    ".nsys-rep": ".sqlite",
    ".qdrep": ".sqlite",
    **{f".trace.json{packed}": ".xplane.pb" for packed in _PACKED},
}
"""Suffixes of files that duplicate a sibling with the second suffix, in whole or in part."""

_COPY_OF_JAX: Final = "perfetto_trace.json"
"""Beginning of the name of the copy that JAX writes for Perfetto (``create_perfetto_trace``)."""
_OF_JAX: Final = (".xplane.pb", *(f".trace.json{packed}" for packed in _PACKED))

_OF_TRACES: Final = (
    *(".nvvp", ".nvprof", ".nsys-rep", ".qdrep"),
    *(f"{end}{packed}" for end in (".xplane.pb", ".pt.trace.json") for packed in _PACKED),
)
"""Suffixes of traces: a file with one that is not a trace is reported as broken."""
_MAY_BE: Final = (*_OF_TRACES, ".sqlite")
"""Suffixes for which an empty file is reported as a broken trace."""


def trace_files_in(path: Path) -> list[Path]:
    """Return the file itself, or the traces and nvidia-smi logs in a folder, sorted by name."""
    if not os.path.isdir(path) or is_table_folder(path):  # noqa: PTH112 - may be out of reach
        return [path]
    try:
        entries = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise InputError(path, f"cannot be listed: {error.strerror}") from None
    files = [file for file in entries if _is_trace(file)]
    names = {file.name for file in files}
    of_jax = any(name.endswith(_OF_JAX) and not name.startswith(_COPY_OF_JAX) for name in names)
    for file in list(files):
        twins = (file.name.removesuffix(a) + b for a, b in _TWINS.items() if file.name.endswith(a))
        if next(twins, None) in names or (of_jax and file.name.startswith(_COPY_OF_JAX)):
            files.remove(file)
    files += [file for file in entries if file not in files and is_log(file, surely=True)]
    if all(is_log(file) for file in files):
        if path.suffix == ".spool":
            problem = "a recording without its trace; make that"
            raise InputError(path, f"{problem}: gputrace recover {path}")
        if any(file.suffix == ".sketch" for file in entries):
            problem = "has sketches of `gputrace watch` and no traces"
            raise InputError(path, f"{problem}; write: gputrace analyze {path}")
        raise InputError(path, "is a directory without traces in it; name the files")
    return files


def is_log(path: Path, surely: bool = False) -> bool:
    """Return True for a log of nvidia-smi, as `is_smi` does; a reader reports unreadable files."""
    try:
        head = Candidate(path).content if path.is_file() else b"\0"
        if b"\0" in head:
            return False
        from gputrace.readers.nvidia_smi import is_smi

        return is_smi(head, surely)
    except (InputError, OSError, ValueError):
        return False


def _is_trace(path: Path) -> bool:
    if path.is_dir():
        return is_table_folder(path)
    if not path.is_file():
        return False
    if path.stat().st_size == 0:
        return path.name.endswith(_MAY_BE)
    if path.name.endswith(_OF_TRACES):
        return True
    try:
        with closing(Candidate(path)) as candidate:
            return reader_of(candidate) is not None
    except InputError:
        return True  # Its reader reports the problem.


_URL: Final = r"([a-z][a-z0-9+.-]+):/+(.*)"
"""Matches a single slash, too, since pathlib collapses repeated ones."""
_BYTES_COPIED: Final = 8 << 20
"""Bytes copied at a time."""


def fetch_urls(paths: Sequence[str], progress: Progress | None = None) -> list[str]:
    """Replace each URL by a local file or folder, downloaded unless cached."""
    here = []
    for path in paths:
        url = re.fullmatch(_URL, path)
        if url is None or os.path.lexists(path):
            here.append(path)
        elif url[1] == "file":
            here.append(f"/{url[2]}")
        else:
            here.append(str(_fetched(f"{url[1]}://{url[2]}", progress)))
    return here


def _fetched(url: str, progress: Progress | None) -> Path:
    try:
        from fsspec.core import url_to_fs

        store, there = url_to_fs(url)
    except ImportError as error:
        problem = f"{url} needs fsspec and what it needs for such addresses ({error})"
        raise MissingError(f'{problem}: pip install "gputrace[remote]"') from None
    except ValueError as error:
        raise InputError(url, f"not an address that fsspec knows: {error}") from None
    try:
        return _fetch(store, there, url, progress)
    except FileNotFoundError:
        raise InputError(url, "no such file") from None
    except Exception as error:  # Each type of store raises its own exceptions.
        raise InputError(url, f"cannot be fetched: {error}") from error


def _fetch(store: Any, there: str, url: str, progress: Progress | None) -> Path:
    import hashlib

    is_folder = store.isdir(there)
    entries = store.ls(there, detail=True) if is_folder else [store.info(there)]
    files = [entry for entry in entries if entry["type"] == "file"]
    keys = sorted((file["name"], store.ukey(file["name"])) for file in files)
    key = hashlib.sha256(repr((url, keys)).encode()).hexdigest()[:16]
    folder = cache_folder() / "fetched" / key
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    total, before = sum(file["size"] for file in files), 0
    for file in files:
        target = folder / file["name"].rpartition("/")[2]
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        if target.exists():
            before += file["size"]
            continue
        try:
            with store.open(file["name"], "rb") as source, unfinished.open("wb") as local:
                while block := source.read(_BYTES_COPIED):
                    before += local.write(block)
                    if progress is not None:
                        progress(before, total)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    return folder if is_folder else folder / there.rpartition("/")[2]
