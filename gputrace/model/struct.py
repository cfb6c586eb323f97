"""Structs: dataclasses with the methods that msgspec has in C.

The standard library compiles eight functions for each dataclass, which takes half a millisecond,
and an analysis has over a hundred. To `dataclasses` (`asdict`, `replace`, …) a struct is one.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec


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
