"""JSON of trace viewers: a long list of events, decoded whole or in a bounded window of text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from gputrace.errors import InputError
from gputrace.readers.error_policy import STOP, ErrorPolicy
from gputrace.readers.gzip_io import Content, read_content

T = TypeVar("T")

_BETWEEN: Final = re.compile(rb"\}(\s*,\s*)(?=\{)")
_TRIED: Final = 1 << 16
"""Bytes at the end of a block in which places to cut are tried."""

_TRIES: Final = 3
LONGEST: Final = 64 << 20
"""Bytes of text of one event, or around the list: no profiler writes more."""

_WORD: Final = 16
"""Bytes at the end of a text in which a number or a word may be cut off, and look broken."""


class BadJson(Exception):
    """Text that is not JSON.

    Attributes:
        byte: where it goes wrong, from 0; None where it is cut off.
    """

    def __init__(self, problem: str, byte: int | None) -> None:
        super().__init__(problem)
        self.byte = byte


class Document(Generic[T]):
    """One file, read once by `parts`.

    Attributes:
        around: all that is not in the list: JSON too, with an empty list. Whole after `parts`.
        closed: whether the list had its end.
    """

    def __init__(
        self, text: Content, decode: Callable[[bytes], T], breaks: ErrorPolicy = STOP
    ) -> None:
        """``decode`` takes a JSON list of events, and raises BadJson."""
        self.around = b""
        self.closed = True
        self._text, self._decode, self._breaks = text, decode, breaks
        self._rest = b""
        self._offset = 0
        """Bytes of the file before the rest."""
        self._ended = False
        self._before = self._listed = 0

    def parts(self) -> Iterator[T]:
        """The events, part by part; raises InputError, which names the byte, for broken JSON.

        Where breaks are allowed, the events before the break come instead, if there is a list.
        """
        try:
            yield from self._parts()
        except InputError as error:
            if not self._before:
                raise
            self._breaks.meet(error)
            yield from self._before_break()

    def _parts(self) -> Iterator[T]:
        self._find_list()
        while block := self._text.read():
            self._rest += block
            yield from self._whole()
            if self._ended:
                return
        yield from self._last()

    @property
    def beginning(self) -> bytes:
        """Return what is before the list, closed."""
        text = self.around[: self._before]
        return text + (b"]}" if text.lstrip().startswith(b"{") else b"]")

    def broken_around(self, error: BadJson) -> InputError:
        """The error in `around` with its place in the file."""
        byte = error.byte or 0
        self._offset, self._rest = (0 if byte < self._before else self._listed), self.around
        return self._broken(BadJson(str(error), None if error.byte is None else byte + 1))

    def _find_list(self) -> None:
        text, looked_at, found = b"", 0, None
        while found is None:
            block = self._text.read()
            text += block
            self._check_length(text)
            # A beginning without a list is gone through again only when it has doubled.
            if not block or len(text) > 2 * looked_at:
                looked_at, found = len(text), list_at(text)
            if found is None and not block:
                problem = (
                    f"no list of events in its {len(text):,} bytes of text: cut off, or no trace"
                )
                raise InputError(self._text.path, problem)
        self.around, self._rest = text[:found], text[found:]
        self._offset = self._before = found

    def _whole(self) -> Iterator[T]:
        """The events that the rest holds whole."""
        first = max(0, len(self._rest) - _TRIED)
        places = [found.span(1) for found in _BETWEEN.finditer(self._rest, first)]
        for end, next in places[: -_TRIES - 1 : -1]:
            try:
                part = self._decode(b"[%b]" % self._rest[:end])
            except BadJson:
                continue
            self._move(next)
            yield part
            return
        yield from self._counted()

    def _counted(self) -> Iterator[T]:
        cut = count(self._rest)
        if cut.end or cut.closed:
            try:
                part = self._decode(b"[%b]" % self._rest[: cut.end])
            except BadJson as error:
                raise self._broken(error) from error
            yield part
            self._move(cut.next)
        else:
            self._check_unfinished()
        if cut.closed:
            self._take_tail()

    def _last(self) -> Iterator[T]:
        """The events at the end of a file whose list may lack its end."""
        yield from self._counted()
        if self._ended:
            return
        left = self._rest.strip().rstrip(b",")
        if left:
            try:
                part = self._decode(b"[%b]" % left)
            except BadJson as error:
                self._check_unfinished()
                raise self._broken(BadJson(str(error), None)) from error
            yield part
        self.closed = False
        self.around = self.beginning

    def _before_break(self) -> Iterator[T]:
        """The whole events of the rest, which is broken, or not whole."""
        text = self._rest
        try:
            self._decode(b"[" + text)
        except BadJson as error:
            text = text if error.byte is None else text[: max(error.byte - 1, 0)]
        with suppress(BadJson):
            yield self._decode(b"[%b]" % text[: count(text).end])
        self.around = self.beginning

    def _take_tail(self) -> None:
        tail = self._rest
        while block := self._text.read():
            tail += block
            self._check_length(tail)
        self._listed = self._offset - len(self.around)
        self.around += tail
        self._rest, self._ended = b"", True

    def _move(self, to: int) -> None:
        self._rest = self._rest[to:]
        self._offset += to

    def _check_unfinished(self) -> None:
        """Raises where the rest is not the beginning of an event."""
        try:
            self._decode(b"[" + self._rest)
        except BadJson as error:
            if error.byte is not None and error.byte + _WORD < len(self._rest):
                raise self._broken(error) from error
        self._check_length(self._rest)

    def _check_length(self, text: bytes) -> None:
        if len(text) > LONGEST:
            where = f"byte {self._offset:,} is followed by {len(text) >> 20} MiB"
            raise InputError(self._text.path, f"{where} without an end of an event: not a trace")

    def _broken(self, error: BadJson) -> InputError:
        """The error with its place in the file."""
        if error.byte is None:
            at = self._offset + len(self._rest)
            problem = f"cut off: its text ends at byte {at:,} within an event; copy it again"
        else:
            at = self._offset + max(error.byte - 1, 0)
            problem = f"broken JSON at byte {at:,} of its text ({error}); copy or record it again"
        return InputError(self._text.path, problem)


_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]|"', re.DOTALL)
_LIST: Final = re.compile(rb'"traceEvents"\s*:\s*\[')


class Cut(NamedTuple):
    """Result of counting the brackets of a piece of the list."""

    end: int
    """End of its last whole event; 0 if there is none."""
    next: int
    """Start of the next one."""
    closed: bool
    """The list ends there."""


def list_at(text: bytes) -> int | None:
    """Return the position of the list's first event; None if the list does not begin in
    the text.
    """
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


MOST_BYTES: Final = 1 << 30
_BEYOND: Final = 4e15
"""Microseconds past any clock, of which two together are still nanoseconds of 64 bits."""

Key = int | str | None
"""A pid or a tid."""

ChromeEvent = Mapping[str, Any]
"""One event as it stands in the file: any value may be missing, or of any type."""


def read_events(path: Path, breaks: ErrorPolicy = STOP) -> list[ChromeEvent]:
    """The events of a file; raises InputError where it is cut short or broken.

    Where breaks are allowed, the events before the break.
    """
    try:
        document = json.loads(read_content(path, MOST_BYTES))
    except InputError as error:
        breaks.meet(error)
        document = _before_break(path)
    except RecursionError:
        raise InputError(path, "broken JSON (too deep); record it again") from None
    except MemoryError:
        raise InputError(path, "not enough memory to decode it") from None
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        breaks.meet(InputError(path, f"broken JSON ({reason}); copy it or record it again"))
        document = _before_break(path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(path, "JSON without a list of traceEvents; record it again")
    return [event for event in events if isinstance(event, dict)]


def _before_break(path: Path) -> list[Any]:
    """The events of a broken file that are whole."""
    with Content(path) as content:
        return list(chain.from_iterable(Document(content, _decoded, ErrorPolicy(True)).parts()))


def _decoded(text: bytes) -> list[Any]:
    try:
        events: list[Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadJson(error.msg, error.pos) from error
    except (ValueError, RecursionError) as error:
        raise BadJson(str(error), 0) from error
    return events


def arguments(event: ChromeEvent) -> Mapping[str, Any]:
    """Return the further arguments of an event."""
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def nanoseconds(*microseconds: object) -> int | None:
    """The sum of times as events tell them; None where one is no time."""
    total: int | float = 0
    for time in microseconds:
        if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) < _BEYOND:
            return None
        total += time
    return round(total * 1000)


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of processes by pid, and of threads by pid and tid."""

    processes: Mapping[Key, str]
    threads: Mapping[tuple[Key, Key], str]


def read_labels(events: Sequence[ChromeEvent]) -> Labels:
    """Return the names that events of phase M give."""
    processes: dict[Key, str] = {}
    threads: dict[tuple[Key, Key], str] = {}
    for event in events:
        name = arguments(event).get("name")
        if event.get("ph") != "M" or not isinstance(name, str):
            continue
        pid, tid = key(event, "pid"), key(event, "tid")
        if event.get("name") == "process_name":
            processes[pid] = name
        elif event.get("name") == "thread_name":
            threads[pid, tid] = name
    return Labels(processes, threads)


def key(event: ChromeEvent, name: str) -> Key:
    """A pid or tid; None for what is no id."""
    found = event.get(name)
    return found if isinstance(found, int | str) else None
