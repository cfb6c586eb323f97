"""A file that may be a trace, as readers look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from gputrace.traces.breaks import STOP, Breaks
from gputrace.traces.nsys.folder import is_table_folder
from gputrace.traces.packed import peek
from gputrace.traces.sqlite import MAGIC, Database, open_input


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
