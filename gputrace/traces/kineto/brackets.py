"""Brackets and commas of JSON text, outside its strings."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]|"', re.DOTALL)
_LIST: Final = re.compile(rb'"traceEvents"\s*:\s*\[')


class Cut(NamedTuple):
    """What counting the brackets of a piece of the list tells."""

    end: int
    """Where its last whole event ends; 0 where there is none."""
    next: int
    """Where the next one begins."""
    closed: bool
    """The list ends there."""


def list_at(text: bytes) -> int | None:
    """Where the list's first event would be; None where the list does not begin in the text."""
    if (start := text.lstrip()[:1]) == b"[":
        return text.index(b"[") + 1
    depth = 0
    for token in _TOKEN.finditer(text) if start == b"{" else ():
        what = token[0]
        if what in b"{[":
            depth += 1
        elif what in b"}]":
            depth -= 1
        elif depth == 1 and what == b'"traceEvents"':
            if found := _LIST.match(text, token.start()):
                return found.end()
        elif what == b'"':
            return None
    return None


def count(text: bytes) -> Cut:
    """Cuts a piece of the list by counting brackets outside strings."""
    depth = end = next = 0
    for token in _TOKEN.finditer(text):
        what = token[0]
        if what in b"{[":
            depth += 1
        elif what in b"}]":
            depth -= 1
            if depth < 0:
                return Cut(token.start(), token.start(), True)
        elif what == b"," and depth == 0:
            end, next = token.start(), token.end()
        elif what == b'"':
            break
    return Cut(end, next, False)
