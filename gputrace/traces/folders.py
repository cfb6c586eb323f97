"""Which traces a folder stands for, told by the content of what is in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from gputrace.errors import InputError
from gputrace.traces.candidate import Candidate
from gputrace.traces.nsys.folder import is_table_folder
from gputrace.traces.readers import reader_of

_TWINS: Final = {
    ".nsys-rep": ".sqlite",
    ".qdrep": ".sqlite",
    ".trace.json.gz": ".xplane.pb",
    ".trace.json": ".xplane.pb",
}
"""What a recorder writes beside a file of the second ending, with less in it or the same."""

_OF_TRACES: Final = (
    *(".nvvp", ".nvprof", ".nsys-rep", ".qdrep", ".xplane.pb", ".xplane.pb.gz"),
    *(".pt.trace.json", ".pt.trace.json.gz"),
)
"""Endings that promise a trace: a file of such a name that is none is broken, and told of."""
_MAY_BE: Final = (*_OF_TRACES, ".sqlite")
"""The same of an empty file."""


def files_of(path: Path) -> list[Path]:
    """The file itself, or the traces in a folder and the logs of nvidia-smi, in order of names.

    What is neither is passed over. Raises InputError for a folder without any.
    """
    if not os.path.isdir(path) or is_table_folder(path):  # noqa: PTH112 - may be out of reach
        return [path]
    try:
        there = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise InputError(path, f"cannot be listed: {error.strerror}") from None
    files = [file for file in there if _is_trace(file)]
    names = {file.name for file in files}
    files = [file for file in files if _twin(file.name) not in names]
    files += [file for file in there if file not in files and is_log(file, surely=True)]
    if all(is_log(file) for file in files):
        raise InputError(path, "is a directory without traces in it; name the files")
    return files


def is_log(path: Path, surely: bool = False) -> bool:
    """Whether a file is a log of nvidia-smi; what cannot be read is its reader's to refuse.

    ``surely`` asks for more than a time in the first column, where nobody named the file.
    """
    from gputrace.traces.smi.join import is_smi

    try:
        return path.is_file() and is_smi(Candidate(path).head, surely)
    except (InputError, OSError, ValueError):
        return False


def _twin(name: str) -> str:
    """The name of the file that stands for one of this name, too; nothing where none does."""
    return next((name.removesuffix(a) + b for a, b in _TWINS.items() if name.endswith(a)), "")


def _is_trace(path: Path) -> bool:
    if path.is_dir():
        return is_table_folder(path)
    if not path.is_file():
        return False
    if path.stat().st_size == 0:
        return path.name.endswith(_MAY_BE)
    return path.name.endswith(_OF_TRACES) or _is_known(path)


def _is_known(path: Path) -> bool:
    """Whether a reader takes it, or it should be one's but cannot be looked at."""
    try:
        candidate = Candidate(path)
        try:
            return reader_of(candidate) is not None
        finally:
            candidate.close()
    except InputError:
        return True
