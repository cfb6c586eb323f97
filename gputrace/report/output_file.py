"""Output files: never overwrite without consent, and appear only when complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EIO
from pathlib import Path

from gputrace.errors import UsageError


def check_target(target: Path, inputs: Sequence[Path], force: bool) -> Path:
    """Return the target; raise UsageError where it cannot be written.

    ``force`` permits replacing a file, but never an input or anything else than a file or folder.
    """
    if any(target.resolve() == path.resolve() for path in inputs):
        raise UsageError(f"{target}: is the trace itself; name another file with -o")
    if target.exists() and not target.is_file() and not target.is_dir():
        raise UsageError(f"{target}: is no regular file, and is not replaced; name another with -o")
    if target.exists() and not force:
        raise UsageError(f"{target}: exists; name another with -o, or give --force")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target}: its folder does not exist; make it, or name another with -o")
    return target


@contextmanager
def unfinished_file(target: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces the target on success; readable by its owner only."""
    if target.is_dir():
        raise UsageError(f"{target}: is a folder; name a file with -o")
    path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with _named(target):
            path.unlink(missing_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            yield path
            path.replace(target)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def _named(target: Path) -> Iterator[None]:
    """Name the target in an error of what is written, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        names = [name for name in (error.filename, error.filename2) if name]
        if names and not any(Path(name).is_relative_to(target.parent) for name in names):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = f"cannot be written ({reason}); name another with -o"
        raise OSError(error.errno or EIO, hint, str(target)) from None


@contextmanager
def unfinished_folder(target: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary folder for files of these names; it replaces the target on success.

    An existing folder is replaced only if it holds no other files.
    """
    if target.exists():
        others = {path.name for path in target.iterdir()} - set(names) if target.is_dir() else {""}
        if others:
            raise UsageError(f"{target}: holds other files, and is not replaced; name another")
    path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(path, ignore_errors=True)
    try:
        with _named(target):
            path.mkdir(mode=0o700)
            yield path
            if target.exists():
                shutil.rmtree(target)
            path.replace(target)
    finally:
        shutil.rmtree(path, ignore_errors=True)
