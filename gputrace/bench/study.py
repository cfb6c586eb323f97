"""A study file: what to run, with which settings, how often.

What is wrong in one is told in one line with the file, the table and the key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from gputrace.bench.database import Recording, Settings
from gputrace.bench.settings import KINDS, MADE, Count, Natural, OnOff
from gputrace.bench.toml import check_keys, convert, read_toml
from gputrace.errors import UsageError
from gputrace.units import format_ns, parse_duration

Cards = Literal["pairs", "each"] | tuple[tuple[int, ...], ...]


_MOST: Final = 2000
"""Combinations of one table."""


class _Cards(msgspec.Struct, forbid_unknown_fields=True):
    """The table [cards]."""

    visible: Literal["pairs", "each"] | tuple[tuple[Natural, ...], ...]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A study file as it is written; settings are looked at one by one."""

    title: str = ""
    question: str = ""
    repeats: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    record: bool | Literal["both"] = True
    timeout: str | None = None
    images: Count = 1024
    options: dict[str, Any] = {}
    matrix: dict[str, list[Any]] = {}
    include: list[dict[str, Any]] = []
    exclude: list[dict[str, Any]] = []
    cards: _Cards | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """What a study file asks for.

    Attributes:
        combinations: of the matrix and what is included, without what is excluded.
        cards: which GPUs a run may see, one configuration for each; None: the first ones.
        images: how many are made where ``data`` asks for that.
        timeout_ns: of one run; None for none.
    """

    path: Path
    title: str
    question: str
    repeats: int
    recording: Recording
    timeout_ns: int | None
    images: int
    combinations: tuple[Settings, ...]
    cards: Cards | None


def read_study(path: Path) -> Study:
    """Raises InputError for a file that cannot be read, UsageError for what makes no sense."""
    tables = read_toml(path)
    check_keys(path, "", tables, _File.__struct_fields__)
    if isinstance(tables.get("cards"), dict):
        check_keys(path, "[cards]", tables["cards"], _Cards.__struct_fields__)
    file = convert(path, "", tables, _File)
    study = Study(
        path,
        file.title or path.stem,
        file.question,
        file.repeats,
        "both" if file.record == "both" else "recorded" if file.record else "bare",
        _timeout(path, file.timeout),
        file.images,
        tuple(_combinations(path, file)),
        file.cards.visible if file.cards else None,
    )
    _check_whole(study)
    return study


def _timeout(path: Path, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        timeout = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{path}: timeout: {error}") from None
    if timeout <= 0:
        raise UsageError(f"{path}: timeout: a run cannot end within {format_ns(timeout)}")
    return timeout


def _combinations(path: Path, file: _File) -> Iterator[Settings]:
    """Each combination once, in the order of the file."""
    options = _read(path, "[options]", file.options)
    left_out = [_lists(path, "[[exclude]]", table) for table in file.exclude]
    tables = [_lists(path, "[[include]]", table) for table in file.include]
    if file.matrix or not tables:
        tables.insert(0, _lists(path, "[matrix]", file.matrix))
    known = []
    for table in tables:
        if (count := prod(map(len, table.values()))) > _MOST:
            told = f"a table asks for {count:,} combinations, of which it may for {_MOST:,}"
            raise UsageError(f"{path}: {told}")
        for values in product(*table.values()):
            settings = options | dict(zip(table, values, strict=True))
            if settings not in known and not any(_matches(settings, each) for each in left_out):
                known.append(settings)
                yield settings


def _matches(settings: Settings, table: Mapping[str, list[Any]]) -> bool:
    return all(settings.get(key) in values for key, values in table.items())


def _lists(path: Path, name: str, table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each key of a table; one that stands alone is a list of one."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in table.items()}
    for key, values in lists.items():
        if not values:
            raise UsageError(f"{path}: {name} {key} is empty; give it values, or leave it out")
    columns = {
        key: [_read(path, name, {key: value})[key] for value in values]
        for key, values in lists.items()
    }
    if not columns and name != "[matrix]":
        raise UsageError(f"{path}: a table {name} is empty; name settings in it")
    return columns


def _read(path: Path, name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a table, of their types."""
    check_keys(path, name, table, KINDS)
    read = {key: convert(path, f"{name} {key}", value, KINDS[key]) for key, value in table.items()}
    for key, value in read.items():
        if KINDS[key] is OnOff and isinstance(value, bool):
            read[key] = "on" if value else "off"
    if "data" in read:
        read["data"] = _data(path, name, read["data"])
    return read


def _data(path: Path, name: str, word: str) -> str:
    """A folder is meant as seen from the study file."""
    if word in ("synthetic", "learnable", *MADE):
        return word
    folder = path.parent / word
    if not os.path.isdir(folder):  # noqa: PTH112 - what cannot be looked at is none either
        known = f"synthetic, learnable, {', '.join(MADE)}"
        raise UsageError(f"{path}: {name} data: {word!r} is no folder, and none of {known}")
    return str(folder.resolve())


def _check_whole(study: Study) -> None:
    """Raises UsageError where nothing is to be run, or it is not said with what."""
    if not study.combinations:
        raise UsageError(f"{study.path}: nothing is left to run; [[exclude]] drops everything")
    for settings in study.combinations:
        if "framework" not in settings:
            raise UsageError(f"{study.path}: no framework is named; write it into [matrix]")
        if study.cards is not None and "gpus" in settings:
            raise UsageError(f"{study.path}: [cards] says how many GPUs; take gpus out")
    if isinstance(study.cards, tuple):
        for cards in study.cards or ((),):
            if not cards or len(set(cards)) < len(cards):
                told = list(cards)
                raise UsageError(f"{study.path}: [cards] visible: {told} are no different GPUs")
