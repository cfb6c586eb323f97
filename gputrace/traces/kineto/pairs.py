"""Events written as a beginning and an end, made one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation

from msgspec import Raw

from gputrace.traces.kineto.decode import Event, Value


class Pairs:
    """Pairs beginnings with ends, which nest within a thread; goes on from part to part."""

    def __init__(self) -> None:
        self._open: dict[tuple[Value, Value], list[Event]] = {}
        self._unbegun = 0

    @property
    def odd(self) -> int:
        """How many have no partner so far."""
        return self._unbegun + sum(map(len, self._open.values()))

    def whole(self, events: Sequence[Event]) -> list[Event]:
        """The events with a duration (``ph`` X), and those made of a pair (B and E)."""
        if {event.ph for event in events}.isdisjoint("BE"):
            return [event for event in events if event.ph == "X"]
        return list(self._paired(events))

    def _paired(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if event.ph == "X":
                yield event
            elif event.ph == "B":
                self._open.setdefault((event.pid, event.tid), []).append(event.copied())
            elif event.ph == "E" and (pair := self._close(event)) is not None:
                yield pair

    def _close(self, end: Event) -> Event | None:
        begun = self._open.get((end.pid, end.tid))
        if not begun:
            self._unbegun += 1
            return None
        event = begun.pop()
        event.dur = _between(event.ts, end.ts)
        return event


def _between(first: Raw, last: Raw) -> Raw:
    try:
        return Raw(str(Decimal(bytes(last).decode()) - Decimal(bytes(first).decode())))
    except (InvalidOperation, UnicodeDecodeError):
        return Raw(b"")
