"""Reading TOML files that people write: what is wrong is told in one line with file and key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from gputrace.errors import InputError, UsageError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; raises InputError for what is none."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(path, "is not UTF-8, as TOML is") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(path, f"is not TOML: {error}") from None
    except (RecursionError, ValueError):
        # Python reads no deeper lists, and no longer numbers; neither means anything here.
        told = "is not TOML of settings: nested too deep, or a number too long"
        raise InputError(path, told) from None


def convert(path: Path, table: str, value: object, kind: Any) -> Any:
    """The value as that type; raises UsageError with the file and the key."""
    if get_origin(kind) is Literal and isinstance(value, str) and value not in get_args(kind):
        known = nearest(value, get_args(kind))
        raise UsageError(f"{path}: {table}: {value!r} is no value of it; {known}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        key = where.removesuffix("`").removeprefix("$").removeprefix(".")
        place = " ".join(part for part in (table, key) if part)
        raise UsageError(f"{path}: {place}: {problem[:1].lower()}{problem[1:]}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a line about an unknown word: what was meant, or all that there is."""
    choices = list(known)
    close = get_close_matches(word, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(choices)}"


def check_keys(path: Path, table: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Raises UsageError for the first key that is not known."""
    known = list(known)
    for key in keys:
        if key not in known:
            where = f"in {table}" if table else "at the top"
            raise UsageError(f"{path}: no key {key!r} {where}; {nearest(key, known)}")
