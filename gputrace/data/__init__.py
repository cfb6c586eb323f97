"""Bundled data files."""

from __future__ import annotations

import lzma
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path


@contextmanager
def unpacked(name: str) -> Iterator[Path]:
    """Yield a bundled file in its own temporary folder; ``.xz`` files decompressed, without .xz."""
    with tempfile.TemporaryDirectory(prefix="gputrace-") as folder:
        path = Path(folder) / name.removesuffix(".xz")
        try:
            with (
                files(__name__).joinpath(name).open("rb") as packed,
                lzma.open(packed) if name.endswith(".xz") else packed as data,
                path.open("wb") as file,
            ):
                shutil.copyfileobj(data, file)
        except OSError as error:
            hint = f"cannot be written ({error.strerror}); TMPDIR names another folder"
            raise OSError(error.errno, hint, folder) from None
        yield path
