"""The analysis as one JSON object; its names are those of the result dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from gputrace.analyzers.results import Analysis


def render(analysis: Analysis) -> str:
    """One line of JSON, text as UTF-8."""
    return one_line(plain(analysis))


def one_line(value: object) -> str:
    """A plain value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def plain(value: object) -> object:
    """Dataclasses as dictionaries, all the way down."""
    if is_dataclass(value):
        # A name that is a word of Python's ends in _ there.
        return {f.name.rstrip("_"): plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
