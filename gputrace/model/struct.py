"""Structs, dataclasses with the methods that msgspec has in C, and how tables show their fields.

The standard library compiles eight functions for each dataclass, which takes half a millisecond,
and an analysis has over a hundred. To `dataclasses` (`asdict`, `replace`, …) a struct is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import msgspec

from gputrace.units import format_bytes, format_ns, format_number, format_share

UNKNOWN: Final = "–"
"""Cell of what is not known, or of nothing."""

_Form = str | Callable[[Any], str]
_OF_UNIT: Final[dict[str, _Form]] = {"ns": format_ns, "bytes": format_bytes}
"""Formats by the unit that ends a field's name."""
_OF_TYPE: Final[dict[type, _Form]] = {int: "{:,}", float: format_number}


class Column(NamedTuple):
    """One column of a table, in every format of a report."""

    title: str
    """Empty for the first column, and for one that continues the one before."""
    of: str | Callable[[Any], Any]
    """Name of a field, or a function of the row that returns a number, a text or None."""
    form: _Form | None = None
    """Function or template, such as ``{:.0%}``, that formats a known value; by default, the unit in
    the field's name decides, then the type."""
    unknown: str = UNKNOWN
    """Cell for None and for an empty text."""

    def cell(self, row: Any) -> str:
        """Return the text for a row."""
        value = self.of(row) if callable(self.of) else getattr(row, self.of)
        if value is None or value == "":
            return self.unknown
        unit = "" if callable(self.of) else self.of.rpartition("_")[2]
        form = self.form or _OF_UNIT.get(unit) or _OF_TYPE.get(type(value), "{}")
        return form.format(value) if isinstance(form, str) else form(value)


Columns = Sequence[Column]


def share(part: str, whole: str) -> Callable[[Any], str]:
    """Return a function of a row: its field ``part`` as a share of ``whole``, such as ``40.1%``."""
    return lambda row: format_share(getattr(row, part), getattr(row, whole))


def limited(part: str, limit: str, unit: str, scale: int = 1) -> Callable[[Any], str | None]:
    """Return a function of a row: a field, with its limit where known, such as ``310/700 W``."""

    def show(row: Any) -> str | None:
        value, most = getattr(row, part), getattr(row, limit)
        if value is None:
            return None
        digits = 1 if scale >= 2**30 and value < 100 * scale else 0
        of = "" if most is None else f"/{most / scale:,.0f}"
        return f"{value / scale:,.{digits}f}{of} {unit}"

    return show


@cache
def _dataclass_fields(kind: type[Struct]) -> dict[str, dataclasses.Field[Any]]:
    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        types |= vars(base).get("__annotations__", {})
    fields = [(name, types[name]) for name in kind.__struct_fields__]
    return {each.name: each for each in dataclasses.fields(dataclasses.make_dataclass("_", fields))}


class _DataclassFields:
    """Fields of a struct as `dataclasses` has them, made when it looks for them."""

    def __get__(self, instance: object, kind: type[Struct]) -> dict[str, dataclasses.Field[Any]]:
        return _dataclass_fields(kind)


class Struct(msgspec.Struct, frozen=True):
    """Base of frozen structs: ``class Step(Struct, frozen=True)``.

    ``dict=True`` allows cached properties. Nothing is checked but by mypy.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()
