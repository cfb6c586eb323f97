"""Files of object stores and other machines (``s3://``, ``gs://``, ``file://``), through fsspec.

They are fetched into the cache folder first: SQLite needs a file. What has not changed there since
is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gputrace.errors import InputError, MissingError
from gputrace.traces.nsys.report import cache_folder

if TYPE_CHECKING:
    from gputrace.traces.trace import Progress

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)")
"""With one slash, too: paths of Python have no two in a row."""
_BLOCK: Final = 8 << 20


def here_of(paths: Sequence[str], progress: Progress | None = None) -> list[str]:
    """The paths, with a file or folder of this machine in place of each URL.

    Raises InputError where one cannot be fetched, MissingError without what it takes.
    """
    return [_here(path, progress) for path in paths]


def _here(path: str, progress: Progress | None) -> str:
    url = _URL.fullmatch(path)
    if url is None or os.path.lexists(path):
        return path
    scheme, rest = url.groups()
    if scheme == "file":
        return f"/{rest}"
    return str(_fetched(f"{scheme}://{rest}", progress))


def _fetched(url: str, progress: Progress | None) -> Path:
    try:
        from fsspec.core import url_to_fs

        store, there = url_to_fs(url)
    except ImportError as error:
        problem = f"{url} needs fsspec and what it needs for such addresses ({error})"
        raise MissingError(f'{problem}: pip install "gputrace[remote]"') from None
    except ValueError as error:
        raise InputError(url, f"no address that fsspec knows: {error}") from None
    try:
        return _fetch(store, there, url, progress)
    except FileNotFoundError:
        raise InputError(url, "no such file") from None
    except Exception as error:  # Each kind of store has errors of its own.
        raise InputError(url, f"cannot be fetched: {error}") from error


def _fetch(store: Any, there: str, url: str, progress: Progress | None) -> Path:
    is_folder = store.isdir(there)
    found = store.ls(there, detail=True) if is_folder else [store.info(there)]
    files = [one for one in found if one["type"] == "file"]
    keys = sorted((one["name"], store.ukey(one["name"])) for one in files)
    key = hashlib.sha256(repr((url, keys)).encode()).hexdigest()[:16]
    folder = cache_folder() / "fetched" / key
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    total, before = sum(one["size"] for one in files), 0
    for one in files:
        target = folder / one["name"].rpartition("/")[2]
        if not target.exists():
            _copy(store, one["name"], target, before, total, progress)
        before += one["size"]
    return folder if is_folder else folder / there.rpartition("/")[2]


def _copy(
    store: Any, there: str, target: Path, before: int, total: int, progress: Progress | None
) -> None:
    """Copies a file; ``before`` bytes of ``total`` were copied before it."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with store.open(there, "rb") as source, unfinished.open("wb") as file:
            while block := source.read(_BLOCK):
                before += file.write(block)
                if progress is not None:
                    progress(before, total)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
