"""JSON of trace viewers: a long list of events, decoded whole or in a bounded window of text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from gputrace.errors import STOP, ErrorPolicy, InputError
from gputrace.readers.gzip_io import Content, peek, read_content

T = TypeVar("T")

_BETWEEN: Final = re.compile(rb"\}(\s*,\s*)(?=\{)")
_TRIED: Final = 1 << 16
"""Bytes at the end of a block in which to try `_TRIES` cuts."""
_TRIES: Final = 3
LONGEST: Final = 16 << 20
"""Bytes of text of one event, or around the list: no profiler writes more."""
_WORD: Final = 16
"""Bytes at the end of a text in which a number or a word may be cut off, and look broken."""


class BadJson(Exception):
    """Text that is not JSON from a ``byte`` on, counted from 0; None if it is cut off."""

    def __init__(self, problem: str, byte: int | None) -> None:
        super().__init__(problem)
        self.byte = byte


class Document(Generic[T]):
    """One file, read once by `parts`."""

    def __init__(
        self, text: Content, decode: Callable[[bytes], T], breaks: ErrorPolicy = STOP
    ) -> None:
        """``decode`` takes a JSON list of events, and raises BadJson."""
        self.around = b""
        """After `parts`: the text without the items of the list, which is JSON, too."""
        self.closed = True
        """False if the list has no end."""
        self._text, self._decode, self._breaks = text, decode, breaks
        self._rest = b""
        self._offset = 0
        """Bytes of the file before the rest."""
        self._unfinished = 0
        """Bytes of the rest in which no event ends, as counted."""
        self._ended = False
        self._before = self._listed = 0

    def parts(self) -> Iterator[T]:
        """Yield the events, part by part; raise InputError, which names the byte, for broken JSON.

        If breaks are allowed, and there is a list, the events before the break are yielded instead.
        """
        try:
            self._find_list()
            while not self._ended and (block := self._text.read()):
                self._rest += block
                yield from self._whole()
            if not self._ended:
                yield from self._last()
        except InputError as error:
            if not self._before:
                raise
            self._breaks.meet(error)
            yield from self._before_break()

    @property
    def beginning(self) -> bytes:
        """Return the text before the list, closed."""
        text = self.around[: self._before]
        return text + (b"]}" if text.lstrip().startswith(b"{") else b"]")

    def broken_around(self, error: BadJson) -> InputError:
        """Return an error in `around` with its place in the file."""
        byte = error.byte or 0
        self._offset, self._rest = (0 if byte < self._before else self._listed), self.around
        return self._broken(BadJson(str(error), None if error.byte is None else byte + 1))

    def _find_list(self) -> None:
        text, searched, start = b"", 0, None
        while start is None:
            block = self._text.read()
            text += block
            self._check_length(text)
            # A beginning without a list is searched again only when it has doubled.
            if not block or len(text) > 2 * searched:
                searched, start = len(text), list_at(text)
            if start is None and not block:
                problem = f"no list of events in its {len(text):,} bytes of text"
                raise InputError(self._text.path, f"{problem}: cut off, or no trace")
        self.around, self._rest = text[:start], text[start:]
        self._offset = self._before = start

    def _whole(self) -> Iterator[T]:
        """Yield the events of which the rest holds all."""
        first = max(0, len(self._rest) - _TRIED)
        cuts = [match.span(1) for match in _BETWEEN.finditer(self._rest, first)]
        for end, next in cuts[: -_TRIES - 1 : -1]:
            try:
                part = self._decode(b"[%b]" % self._rest[:end])
            except BadJson:
                continue
            self._move(next)
            yield part
            return
        # Where none ends, they are counted again only when the rest has doubled.
        if len(self._rest) > min(2 * self._unfinished, LONGEST):
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
            self._unfinished = len(self._rest)
            self._check_unfinished()
        if cut.closed:
            self._take_tail()

    def _last(self) -> Iterator[T]:
        """Yield the events at the end of a file whose list may lack its end."""
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
        """Yield the whole events of the rest, which is broken or incomplete."""
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
        self._unfinished = 0
        self._rest = self._rest[to:]
        self._offset += to

    def _check_unfinished(self) -> None:
        """Raise InputError if the rest is not the beginning of an event."""
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
        """Return the error with its place in the file."""
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
    """End of the last whole event of a piece of the list, or 0, and start of the next one."""

    end: int
    next: int
    closed: bool
    """True if the list ends there."""


def list_at(text: bytes) -> int | None:
    """Return the position of the list's first event; None if no list begins in the text."""
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
            if match := _LIST.match(text, token.start()):
                return match.end()
        elif what == b'"':
            return None
    return None


def count(text: bytes) -> Cut:
    """Cut a piece of the list by counting brackets outside strings."""
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
    """Read the events of a file, or those before a break if the policy allows it."""
    try:
        document = json.loads(read_content(path, MOST_BYTES))
    except RecursionError:
        raise InputError(path, "broken JSON (too deep); record it again") from None
    except MemoryError:
        raise InputError(path, "not enough memory to decode it") from None
    except (InputError, ValueError) as error:
        if not isinstance(error, InputError):
            reason = str(error).partition("\n")[0]
            error = InputError(path, f"broken JSON ({reason}); copy it or record it again")
        breaks.meet(error)
        with Content(path) as content:
            parts = Document(content, _decoded, ErrorPolicy(True)).parts()
            document = list(chain.from_iterable(parts))
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(path, "JSON without a list of traceEvents; record it again")
    return [event for event in events if isinstance(event, dict)]


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
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def nanoseconds(*microseconds: object) -> int | None:
    """Return the sum of times given in microseconds; None if one is no time."""
    total: int | float = 0
    for time in microseconds:
        if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) < _BEYOND:
            return None
        total += time
    return round(total * 1000)


_Names = tuple[dict[Key, str], dict[tuple[Key, Key], str]]


def read_names(events: Sequence[ChromeEvent]) -> _Names:
    """Return names of processes by pid, and of threads by pid and tid, by events of phase M."""
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
    return processes, threads


def key(event: ChromeEvent, name: str) -> Key:
    """Return a pid or tid; None if it is no id."""
    id = event.get(name)
    return id if isinstance(id, int | str) else None


_KINETO: Final = re.compile(
    rb'"(?:schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds)"\s*:'
    rb'|"cat"\s*:\s*"(?:kernel|Kernel|gpu_mem\w+|cuda_runtime|cpu_op|Operator|python_function)"'
)
"""Keys and categories that only PyTorch's profiler writes."""

_LOOKED_AT: Final = 1 << 20
"""Bytes of text at the beginning; others' properties may come first."""


def is_kineto(path: Path, head: bytes) -> bool:
    """Return True if a file with these first bytes is a trace of PyTorch's profiler."""
    text = peek(head)
    if text.lstrip()[:1] not in (b"{", b"["):
        return False
    if _KINETO.search(text) is None:
        try:
            with Content(path) as content:
                text = content.read()[:_LOOKED_AT]
        except InputError:
            return False
    return _KINETO.search(text) is not None
