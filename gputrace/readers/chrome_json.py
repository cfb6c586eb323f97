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
from gputrace.readers.compressed import Content, peek, read_content

T = TypeVar("T")

_BETWEEN: Final = re.compile(rb"\}(\s*,\s*)(?=\{)")
_CUT_RANGE: Final = 1 << 16
"""Bytes at the end of a block in which to try `_CUTS_TRIED` cuts."""
_CUTS_TRIED: Final = 3
LONGEST: Final = 16 << 20
"""Bytes of text of one event, or around the list: no profiler writes more."""
_CUT_WORD: Final = 16
"""Bytes at the end of a text in which a number or a word may be cut off, and look broken."""
_MOST_LOST: Final = 0.5
"""Largest part of the list that may be left out since it is not JSON."""


class BadJson(Exception):
    """Text that is not JSON from a ``byte`` on, counted from 0; None if it is cut off."""

    def __init__(self, problem: str, byte: int | None) -> None:
        super().__init__(problem)
        self.byte = byte


_NO_NUMBER: Final = re.compile(
    rb"([:\[,]\s*)(-?(?:inf(?:inity)?|nan)|N/A)(?=\s*[,}\]])", re.IGNORECASE
)
"""Not-a-number as C++ prints it, and as scripts do: JSON has no word for it."""
_ESCAPE: Final = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4}|)')
_CONTROLS: Final = bytes(max(byte, ord(" ")) for byte in range(256))
"""Translation of control characters, which a JSON text may not hold, into spaces."""


def repair(text: bytes) -> bytes:
    """Replace what profilers write and JSON forbids, keeping the length.

    Not-a-numbers become 0, backslashes of Windows' paths slashes, control characters spaces, and
    bytes that are not UTF-8 question marks.
    """
    text = text.decode("utf-8", "surrogateescape").encode("utf-8", "replace").translate(_CONTROLS)
    if b"\\" in text:
        text = _ESCAPE.sub(lambda match: match[0] if match[1] else b"/", text)
    return _NO_NUMBER.sub(lambda match: match[1] + b"0".ljust(len(match[2])), text)


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
        self.skipped = 0
        """Number of events left out so far since they are not JSON."""
        self._first_break: InputError | None = None
        self._lost = 0
        """Bytes of the events left out."""
        self._text, self._decode, self._breaks = text, decode, breaks
        self._rest = b""
        self._offset = 0
        """Bytes of the file before the rest."""
        self._unfinished = 0
        """Bytes of the rest in which no event ends, as walked."""
        self._ended = False
        self._before = self._listed = 0

    def parts(self) -> Iterator[T]:
        """Yield the events, part by part, without those that are not JSON.

        Raises InputError, which names the byte, if the list is cut off or most of it is not JSON.
        If breaks are allowed, and there is a list, the events that can be decoded are yielded
        instead.
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
            with suppress(InputError):
                yield from self._last()
            self.around = self.beginning
        if self._first_break is not None and self._lost > _MOST_LOST * self._offset:
            self._breaks.meet(self._first_break)

    @property
    def beginning(self) -> bytes:
        """Return the text before the list, closed."""
        text = self.around[: self._before]
        return text + (b"]}" if text.lstrip().startswith(b"{") else b"]")

    def broken_around(self, error: BadJson) -> str:
        """Describe an error in `around` with its place in the file."""
        byte = error.byte or 0
        self._offset, self._rest = (0 if byte < self._before else self._listed), self.around
        return self._broken(BadJson(str(error), error.byte and byte + 1)).problem

    def _find_list(self) -> None:
        text, searched, start = b"", 0, None
        while start is None:
            block = self._text.read()
            text += block
            self._check_length(text)
            # A beginning without a list is searched again only when it has doubled.
            if not block or len(text) > 2 * searched:
                searched, start = len(text), list_at(text)
            if start is None and not block and (match := _LIST.search(text)):
                start = match.end()  # A property before it is broken.
            elif start is None and not block:
                problem = f"no list of events in its {len(text):,} bytes of text"
                raise InputError(self._text.path, f"{problem}: cut off, or not a trace")
        self.around, self._rest = text[:start], text[start:]
        self._offset = self._before = start

    def _whole(self) -> Iterator[T]:
        """Yield the events of which the rest holds all."""
        first = max(0, len(self._rest) - _CUT_RANGE)
        cuts = [match.span(1) for match in _BETWEEN.finditer(self._rest, first)]
        for end, next in cuts[: -_CUTS_TRIED - 1 : -1]:
            try:
                part = self._decode(b"[%b]" % self._rest[:end])
            except BadJson as error:
                if error.byte is not None and error.byte < first:
                    break  # It is not the cut.
                continue
            self._move(next)
            yield part
            return
        # Where none ends, they are walked again only when the rest has doubled.
        if len(self._rest) > min(2 * self._unfinished, LONGEST):
            yield from self._walked()
            if not self._ended:
                self._unfinished = len(self._rest)
                self._check_length(self._rest)

    def _walked(self, is_last: bool = False) -> Iterator[T]:
        """Yield the events of the rest, decoded one by one; stop at one that has no end."""
        size = _CUT_RANGE
        while self._rest and not self._ended:
            text = repair(self._rest[:size])
            walk = walk_events(text, is_last and size >= len(self._rest))
            if walk.skipped and self._first_break is None:
                self._first_break = self._broken(BadJson(*walk.problem))
            self.skipped += walk.skipped
            self._lost += walk.lost
            yield from self._decoded([text[begin:end] for begin, end in walk.events])
            self._move(walk.end)
            if walk.closed:
                tail = self._rest
                while block := self._text.read():
                    tail += block
                    self._check_length(tail)
                self._listed = self._offset - len(self.around)
                self.around += tail
                self._rest, self._ended = b"", True
            elif walk.end:
                size = _CUT_RANGE
            elif size >= len(self._rest):
                return
            else:
                size *= 4

    def _decoded(self, events: list[bytes]) -> Iterator[T]:
        """Yield the events in one part, if all can be decoded; else in one part each."""
        if not events:
            return
        try:
            yield self._decode(b"[%b]" % b",".join(events))
        except BadJson:
            for event in events:
                try:
                    yield self._decode(b"[%b]" % event)
                except BadJson:
                    self.skipped += 1

    def _last(self) -> Iterator[T]:
        """Yield the events at the end of a file whose list may lack its end."""
        yield from self._walked(is_last=True)
        if self._ended:
            return
        if self._rest.strip(b" \t\r\n,"):
            try:
                self._decode(b"[" + self._rest)
            except BadJson as error:
                # Past the beginning of an event, which may be cut off.
                if error.byte is not None and error.byte + _CUT_WORD < len(self._rest):
                    raise self._broken(error) from error
            self._check_length(self._rest)
            raise self._broken(BadJson("", None))
        self.closed = False
        self.around = self.beginning

    def _move(self, to: int) -> None:
        self._unfinished = 0
        self._rest = self._rest[to:]
        self._offset += to

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


_JSON: Final = json.JSONDecoder(strict=False)
_GAP: Final = re.compile(r"[\s,]*")
_AFTER: Final = re.compile(r"\s*(?:[,\]]|$)")
_NEXT: Final = re.compile(r"\}\s*,\s*(?=\{)")
_END: Final = re.compile(r"\}\s*(?=\])")


class Walk(NamedTuple):
    """Events at the beginning of a piece of the list."""

    events: list[tuple[int, int]]
    """Where each begins and ends."""
    end: int
    """Position of the first character that was not walked."""
    closed: bool
    """True if the list ends there."""
    skipped: int
    """Number of events that are not JSON."""
    lost: int
    """Characters of these."""
    problem: tuple[str, int]
    """Reason why the first of them is not JSON, and the position after it, from 1."""


def walk_events(text: bytes, is_last: bool) -> Walk:
    """Find the events of a piece of the list, and resume after one that is not JSON.

    The piece may end within an event, unless it is the last one: there, the list may end right
    after an event that is not JSON.
    """
    characters = text.decode("latin-1")
    events, end, skipped, lost, problem = [], 0, 0, 0, ("", 0)
    while True:
        begin = _GAP.match(characters, end).end()  # type: ignore[union-attr] # matches anything
        closed = characters.startswith("]", begin)
        end = begin
        if closed or begin == len(text):
            break
        try:
            end = _JSON.raw_decode(characters, begin)[1]
            if _AFTER.match(characters, end) is None:
                raise json.JSONDecodeError("expected ','", characters, end)
        except (ValueError, RecursionError) as error:
            end, at = begin, getattr(error, "pos", begin)
            reason = getattr(error, "msg", "nested too deep")
            next = _NEXT.search(characters, begin)
            next = next or (_END.search(characters, begin) if is_last else None)
            cut_off = at + _CUT_WORD >= len(text) or reason.startswith("Unterminated")
            if cut_off or next is None:
                break
            problem = problem if skipped else (reason.lower(), at + 1)
            end, skipped, lost = next.end(), skipped + 1, lost + next.end() - begin
        else:
            events.append((begin, end))
    return Walk(events, end, closed, skipped, lost, problem)


MOST_BYTES: Final = 1 << 30
_LATEST: Final = 4e15
"""Microseconds past any clock, of which two together are still nanoseconds of 64 bits."""

Key = int | str | None
"""A pid or a tid."""

ChromeEvent = Mapping[str, Any]
"""One event as it stands in the file: any value may be missing, or of any type."""


def read_events(path: Path, breaks: ErrorPolicy = STOP) -> tuple[list[ChromeEvent], int]:
    """Read the events of a file, or those before a break if the policy allows it.

    Returns the number of events left out since they are not JSON, too.
    """
    skipped = 0
    try:
        document = json.loads(read_content(path, MOST_BYTES))
    except MemoryError:
        raise InputError(path, "not enough memory to decode it") from None
    except (InputError, ValueError, RecursionError):
        with Content(path) as content:
            parts = Document(content, _decoded, breaks)
            document = list(chain.from_iterable(parts.parts()))
        skipped = parts.skipped
        if not parts.closed:
            breaks.meet(InputError(path, "cut off: its list of events has no end; copy it again"))
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(path, "JSON without a list of traceEvents; record it again")
    return [event for event in events if isinstance(event, dict)], skipped


NOT_JSON: Final = "an event that is not JSON"


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
    """Return the sum of times given in microseconds; None if one is not a time."""
    total: int | float = 0
    for time in microseconds:
        if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) < _LATEST:
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
    """Return a pid or tid; None if it is not an id."""
    id = event.get(name)
    return id if isinstance(id, int | str) else None


_KINETO: Final = re.compile(
    rb'"(?:schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds)"\s*:'
    rb'|"cat"\s*:\s*"(?:kernel|Kernel|gpu_mem\w+|cuda_runtime|cpu_op|Operator|python_function)"'
    rb'|"pid"\s*:\s*"(?:CPU|CUDA) functions"'
)
"""Keys, categories and processes that only PyTorch's profiler writes."""

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
