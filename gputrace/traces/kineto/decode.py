"""Events and properties of the run, as JSON decodes them: what is not asked for is skipped."""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec import DecodeError, Raw, Struct, ValidationError, field, structs
from msgspec.json import Decoder

from gputrace.traces.events import UNKNOWN
from gputrace.traces.kineto.document import BadJson

Value = int | float | str | None
"""Of a field that should be an integer."""

_BYTE: Final = re.compile(r" \(byte (\d+)\)")
_NO_NUMBER: Final = re.compile(rb"([:\[,]\s*)(-?(?:inf(?:inity)?|nan))(?=\s*[,}\]])", re.IGNORECASE)
"""What C++ prints for a quotient of nothing, and JSON has no word for."""


class Args(Struct, gc=False):
    """What an event says more; of its many arguments these."""

    device: Value = UNKNOWN
    stream: Value = UNKNOWN
    correlation: Value = UNKNOWN
    bytes: Value = UNKNOWN
    source: Value = field(default=UNKNOWN, name="fromDevice")
    destination: Value = field(default=UNKNOWN, name="toDevice")
    taken: Value = field(default=UNKNOWN, name="In msg nelems")
    given: Value = field(default=UNKNOWN, name="Out msg nelems")
    element: Value = field(default="", name="dtype")


NO_ARGS: Final = Args()


class Event(Struct, gc=False):
    """One event."""

    ph: str = ""
    cat: str | None = None
    name: Value = ""
    pid: Value = None
    tid: Value = None
    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"")
    args: Args | None = None

    def copied(self) -> Event:
        """The same, without a hold on the text it was decoded from."""
        return structs.replace(self, ts=self.ts.copy(), dur=self.dur.copy())


class Card(Struct):
    """A GPU that the process could see."""

    id: Value = UNKNOWN
    name: Value = ""


class Distributed(Struct):
    """The process in its distributed run."""

    rank: Value = None
    world_size: Value = None


class Properties(Struct):
    """What stands around the list of events."""

    cards: list[Card] = field(default_factory=list, name="deviceProperties")
    distributed: Distributed | None = field(default=None, name="distributedInfo")
    base: Value = field(default=None, name="baseTimeNanoseconds")
    host: Value = field(default="", name="host_name")


_EVENTS: Final = Decoder(list[Event])
_EACH: Final = Decoder(list[Raw])
_EVENT: Final = Decoder(Event)
_PROPERTIES: Final = Decoder(Properties)


class Events:
    """Decodes lists of events, and counts what is no event.

    Attributes:
        odd: how many were not.
    """

    def __init__(self) -> None:
        self.odd = 0

    def decode(self, text: bytes) -> list[Event]:
        """The events of a JSON list; raises BadJson."""
        try:
            return self._decode(text)
        except (DecodeError, UnicodeDecodeError, RecursionError):
            pass
        try:
            return self._decode(_repair(text))
        except (DecodeError, RecursionError) as error:
            raise _bad(error) from error

    def _decode(self, text: bytes) -> list[Event]:
        try:
            return _EVENTS.decode(text)
        except ValidationError:
            return list(filter(None, map(self._one, _EACH.decode(text))))

    def _one(self, text: Raw) -> Event | None:
        try:
            return _EVENT.decode(text)
        except ValidationError:
            self.odd += 1
            return None


def properties(text: bytes) -> Properties:
    """Of a document without its events; those of an unknown form are left out."""
    try:
        return _PROPERTIES.decode(_repair(text))
    except ValidationError:
        return Properties()
    except (DecodeError, RecursionError) as error:
        raise _bad(error) from error


def _repair(text: bytes) -> bytes:
    """With 0 for numbers that are none, and without bytes that are not UTF-8; of equal length."""
    text = text.decode("utf-8", "surrogateescape").encode("utf-8", "replace")
    return _NO_NUMBER.sub(lambda found: found[1] + b"0".ljust(len(found[2])), text)


def _bad(error: DecodeError | RecursionError) -> BadJson:
    if isinstance(error, RecursionError):
        return BadJson("nested too deep", 0)
    found = _BYTE.search(str(error))
    problem = _BYTE.sub("", str(error)).removeprefix("JSON is malformed: ")
    return BadJson(problem, int(found[1]) if found else None)


def integer(value: Any) -> int:
    """An integer of 64 bits, as a number or as digits in a text (``stream 7``), or `UNKNOWN`."""
    if isinstance(value, str):
        found = re.search(r"-?\d{1,19}(?!\d)", value)
        value = int(found[0]) if found else UNKNOWN
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        return UNKNOWN
    return value
