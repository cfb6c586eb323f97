"""The folder of a study's results: what lies where, and who may write into it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gputrace.bench.database import FILE
from gputrace.errors import InputError, UsageError

_LOCK: Final = "lock"
PARTS: Final = "parts"
"""A folder of results for each job of an array of Slurm."""


class Folder:
    """Finished files are in ``traces`` and ``logs``, those of the run under way in ``underway``.

    Attributes:
        path: absolute, without links.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.traces = self.path / "traces"
        self.logs = self.path / "logs"
        self.images = self.path / "images"
        self.underway = self.path / "underway"

    def make(self) -> None:
        """Raises UsageError for a folder of something else, InputError where it cannot be made."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path}: is no folder; name another with -o")
        if self.path.is_dir() and any(self.path.iterdir()) and not self._is_ours():
            raise UsageError(f"{self.path}: holds other files; name another folder with -o")
        try:
            for folder in (self.traces, self.logs, self.images, self.underway):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(self.path, f"cannot be made ({error.strerror})") from None

    def _is_ours(self) -> bool:
        return any((self.path / name).exists() for name in (FILE, _LOCK, "underway", PARTS))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps others out meanwhile; raises UsageError where another one is in."""
        with (self.path / _LOCK).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UsageError(
                    f"{self.path}: another gputrace bench (process {file.read().strip()}) "
                    "runs there; wait for it, or name another folder with -o"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def clean(self) -> None:
        """Removes what a run left that did not come to its end."""
        for path in self.underway.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
