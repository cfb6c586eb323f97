"""Analysis as one JSON object; its names are those of the result dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final

from gputrace.model.results import Analysis
from gputrace.sanitize import json_text

_PLAIN: Final = frozenset((bool, int, float, str))


def render(analysis: Analysis) -> str:
    """Render an analysis as one line of JSON, text as UTF-8."""
    return one_line(plain(analysis))


def one_line(value: object) -> str:
    """Serialize a plain value as one line of JSON."""
    return json_text(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) + "\n"


def plain(value: object) -> object:
    """Convert dataclasses to dictionaries, recursively."""
    if value is None or type(value) in _PLAIN:
        return value
    if is_dataclass(value):
        return {key: plain(getattr(value, name)) for name, key in _keys(value.__class__)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@cache
def _keys(kind: Any) -> list[tuple[str, str]]:
    """Return field names with their JSON keys: fields named like Python keywords end in ``_``."""
    return [(field.name, field.name.rstrip("_")) for field in fields(kind)]
