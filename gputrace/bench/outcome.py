"""What came of a run: the object that its script printed last, or one line that says why not."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from gputrace.bench.database import Settings
from gputrace.errors import ExitCode

_TAIL: Final = 1 << 20
"""Bytes at the end of a log in which its last lines are looked for."""
_MOST: Final = 200
"""Letters of a line of another program that are told."""

_ERROR: Final = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b(: .*)?")
_WARNING: Final = re.compile(
    r"^\S+:\d+: \w*Warning: .*\n"
    r"(?:(?:(?!Traceback |\S+:\d+: \w*Warning: )\S.*\n){0,20}[ \t]+\S.*(?:\n|\Z))?",
    re.MULTILINE,
)
"""A warning of Python, down to the line of source that ends it, which is set in."""
_OURS: Final = "gputrace: "

_SAME: Final = ("model", "batch", "gpus", "update", "layout")
"""Settings that a result repeats; it must be that of what was asked for."""


class Failed(Exception):
    """A run has no result; the text is one line that says why."""


class _Result(msgspec.Struct):
    """What a result must have; what else it has is kept too."""

    framework: str
    model: str
    gpus: int
    batch: int
    steps: int
    samples_per_second: float


def read_result(out: Path, settings: Settings) -> dict[str, Any]:
    """The result at the end of what a script printed; raises Failed where that is none.

    Threads of a framework may have a last word after it.
    """
    lines = list(_lines(out))
    line = next((line for line in lines if line.startswith("{")), next(iter(lines), ""))
    if not line:
        raise Failed("printed no result")
    try:
        # A loss that is no number is no JSON either; it is told as unknown.
        found = json.loads(line, parse_constant=lambda _: None)
        msgspec.convert(found, _Result)
    except json.JSONDecodeError:
        raise Failed(f"its last line is no result: {_short(line)}") from None
    except msgspec.ValidationError as error:
        raise Failed(f"its result lacks something: {str(error).replace('`', '')}") from None
    _check_same(found, settings)
    result: dict[str, Any] = found
    return result


def _check_same(found: Mapping[str, Any], settings: Settings) -> None:
    for name in _SAME:
        said, asked = found.get(name), settings.get(name)
        if None not in (said, asked) and said != asked:
            raise Failed(f"its result is of {name} {said}, asked for was {asked}")


def why_failed(code: int, out: Path, err: Path) -> str:
    """``exit code 1: ValueError: no such model``."""
    said = _last(err, _OURS) if code == ExitCode.RECORDING_FAILED else _told(err) or _told(out)
    if said.startswith("{"):
        said = "after it had printed its result"
    return f"{_ending(code)}: {said}" if said else _ending(code)


def _ending(code: int) -> str:
    if code > 128:
        try:
            return f"ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"exit code {code}"


def _told(path: Path) -> str:
    """The line that says most: the last that names an error, else the last one.

    Launchers write boxes below the error of the program; `gputrace record` tells what it recorded.
    """
    said = _WARNING.sub("", _end(path))
    lines = [line for line in _from_last(said) if not line.startswith(_OURS)]
    errors = (line for line in lines if _ERROR.fullmatch(line))
    return _short(next(errors, "") or next(iter(lines), ""))


def _last(path: Path, start: str) -> str:
    """The last line that begins so."""
    return _short(next((line for line in _lines(path) if line.startswith(start)), ""))


def _lines(path: Path) -> Iterator[str]:
    """Lines at the end of a file that hold anything, the last one first."""
    return _from_last(_end(path))


def _end(path: Path) -> str:
    """The text at the end of a file."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL))
        return file.read().decode("utf-8", "replace")


def _from_last(text: str) -> Iterator[str]:
    return (line.strip() for line in reversed(text.splitlines()) if line.strip())


def _short(line: str) -> str:
    plain = "".join(letter for letter in line if letter.isprintable())
    return plain if len(plain) <= _MOST else f"{plain[: _MOST - 1]}…"
