"""Dumps of PyTorch's flight recorder (NCCL's or gloo's collectives of one rank), and the reports of
hangs of ``gputrace record --hang``.

A dump is a pickle of plain values or JSON, one a rank, as ``TORCH_NCCL_TRACE_BUFFER_SIZE`` and a
timeout leave it (torch/csrc/distributed/c10d/FlightRecorder.hpp; versions 2.x). The pickle is not
unpickled: its opcodes are interpreted here, and those that import or call anything are refused.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gputrace.errors import InputError
from gputrace.model.struct import Struct

_LARGEST: Final = 1 << 28
_MOST_OPCODES: Final = 50_000_000
_MOST_RANKS: Final = 1 << 20
_MALFORMED: Final = (
    *(ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, RecursionError),
)


class Collective(Struct, frozen=True):
    """One collective that a rank has entered.

    Attributes:
        group: of processes, the same name on every rank.
        members: ranks of the group.
        number: of the collective within the group, from 1.
        step: steps that the rank had ended; None where unknown.
        line: of the program that called it, ``file:line function``; empty where unknown.
        size: shapes of the input, as text.
        is_done: whether it is known to be over; None where that is unknown.
    """

    group: str
    members: tuple[int, ...]
    operation: str
    number: int
    step: int | None
    line: str
    start_ns: int
    is_done: bool | None
    size: str = ""


class RankState(Struct, frozen=True):
    """One rank at the time of a hang.

    Attributes:
        pid: of the process; None where unknown.
        is_alive: None where unknown.
        stack: lines of the main thread, the innermost first.
        collectives: the last ones, in the order of entering.
    """

    rank: int
    host: str
    pid: int | None
    is_alive: bool | None
    steps: int | None
    stack: tuple[str, ...]
    collectives: tuple[Collective, ...]


def read_ranks(paths: Iterable[Path]) -> list[RankState]:
    """Read dumps and reports; raises InputError where one is neither."""
    ranks: list[RankState] = []
    for number, path in enumerate(paths):
        try:
            with path.open("rb") as file:
                data = file.read(_LARGEST + 1)
        except OSError as error:
            raise InputError(path, f"cannot be read ({error.strerror})") from error
        if len(data) > _LARGEST:
            raise InputError(path, "is larger than any flight recorder dump")
        try:
            content = plain_pickle(data) if data[:1] == b"\x80" else json.loads(data)
            if not isinstance(content, dict):
                raise TypeError
            if "gputrace_hang" in content:
                ranks += [_of_report(row, content) for row in content["ranks"]]
            else:
                ranks.append(_of_dump(content, _rank_of(path.name, number)))
        except _MALFORMED as error:
            reason = str(error) if isinstance(error, Refused) else "is not a flight recorder dump"
            raise InputError(path, reason) from error
    return sorted(ranks, key=lambda state: state.rank)


def _rank_of(name: str, otherwise: int) -> int:
    numbers = re.findall(r"\d+", name.removesuffix(".json"))
    return int(numbers[-1]) if numbers else otherwise


def _of_report(row: dict[str, Any], report: dict[str, Any]) -> RankState:
    entries = [
        Collective(
            str(entry["group"]),
            _members(str(entry["members"])),
            str(entry["operation"]),
            int(entry["number"]),
            int(entry["step"]),
            str(entry["line"]),
            int(entry["start_ns"]),
            entry["end_ns"] is not None,
        )
        for entry in row["collectives"]
    ]
    threads = row["threads"]
    stack = tuple(map(str, threads[0])) if threads else ()
    host = str(report.get("host", ""))
    # After the program's end all are gone; the first drew the others with it.
    alive: bool | None = bool(row["alive"])
    if report.get("is_over"):
        alive = False if row["ended_first"] else None
    values = int(row["pid"]), alive, int(row["steps"])
    return RankState(int(row["rank"]), host, *values, stack, tuple(entries))


def _members(text: str) -> tuple[int, ...]:
    """Parse ``0-3``, ``0-12/4`` (each fourth) or ``0,2,4``."""
    members: list[int] = []
    for part in filter(None, text.split(",")):
        ends, _, stride = part.partition("/")
        first, _, last = ends.partition("-")
        group = range(int(first), int(last or first) + 1, int(stride or 1))
        if len(members) + len(group) > _MOST_RANKS:
            raise ValueError("too many ranks")
        members += group
    return tuple(members)


def _of_dump(content: dict[str, Any], rank: int) -> RankState:
    groups = content.get("pg_config", {})
    entries = []
    for entry in content["entries"]:
        name, description = (*map(_text, entry.get("process_group", ("0", ""))[:2]), "")[:2]
        members = _listed(groups.get(_text(entry.get("pg_id", name)), groups.get(name, {})))
        point_to_point = bool(entry.get("is_p2p"))
        number = entry["p2p_seq_id" if point_to_point else "collective_seq_id"]
        called = _text(entry["profiling_name"])
        operation = called.partition(":")[2] or called
        state, retired = entry.get("state"), entry.get("retired")
        entries.append(
            Collective(
                f"{description or name}{' (point to point)' if point_to_point else ''}",
                members,
                operation.split(" ")[0],
                int(number),
                None,
                _line(entry.get("frames", ())),
                int(entry.get("time_created_ns", 0)),
                state == "completed" or bool(retired),
                _text(entry.get("input_sizes", "")),
            )
        )
    return RankState(rank, "", None, None, None, (), tuple(entries))


def _text(value: Any) -> str:
    """Return a text, or a short form of what is none: lists may hold one another many times."""
    return value if isinstance(value, str) else reprlib.repr(value)


def _listed(group: Any) -> tuple[int, ...]:
    ranks = group.get("ranks", ()) if isinstance(group, dict) else ()
    return tuple(map(int, json.loads(ranks) if isinstance(ranks, str) and ranks else ranks or ()))


_PARTS: Final = ("filename", "line", "name")
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")
_NOT_THE_PROGRAM: Final = (*_LIBRARIES, "/_gputrace_hooks/")


def _line(frames: Sequence[dict[str, Any]]) -> str:
    lines = ["{}:{} {}".format(*(_text(frame[k]) for k in _PARTS)) for frame in frames]
    return next((line for line in lines if is_of_program(line)), lines[0] if lines else "")


def is_of_program(line: str) -> bool:
    """Return whether a line is the program's, and no library's."""
    return not any(part in line for part in _NOT_THE_PROGRAM) and not line.startswith("??")


class Refused(ValueError):
    """A pickle holds more than plain values."""


_MARK: Final = object()
_NEW: Final[dict[str, Callable[[], Any]]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_VALUES: Final = r"INT|BININT[12]?|LONG[14]?|(BIN)?FLOAT|(SHORT_)?BIN(UNICODE8?|STRING|BYTES8?)"
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED: Final = ("PROTO", "FRAME", "STOP")


def plain_pickle(data: bytes) -> Any:
    """Return the dicts, lists, tuples, texts and numbers that a pickle holds.

    Raises Refused for one that holds more, ValueError for what is no pickle.
    """
    import warnings

    with warnings.catch_warnings():
        # Of texts with a backslash before what it does not escape.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _unpickle(data)


def _unpickle(data: bytes) -> Any:
    import pickletools

    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if number > _MOST_OPCODES:
            raise Refused("holds more than any flight recorder dump")
        if re.fullmatch(_VALUES, name):
            stack.append(argument)
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name.endswith("GET"):
            stack.append(memo[argument])
        elif name == "MEMOIZE" or name.endswith("PUT"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name not in _IGNORED:
            _collect(name, stack)
    return stack.pop()


def _collect(name: str, stack: list[Any]) -> None:
    """Make a tuple, or put items into the list or the dict below them."""
    if name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif name in ("APPEND", "APPENDS"):
        items = [stack.pop()] if name == "APPEND" else _since_mark(stack)
        _checked(stack[-1], list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else _since_mark(stack)
        if not all(type(key) in (str, int) for key in items[::2]):
            raise ValueError("no dict by text or number")  # A nested key may take for ever to hash.
        _checked(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
    else:
        raise Refused(f"is a pickle with more than plain values ({name}): it is not read")


def _since_mark(stack: list[Any]) -> list[Any]:
    at = max(n for n, item in enumerate(stack) if item is _MARK)
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"no {kind.__name__}")
    return value


def is_hang_report(path: Path) -> bool:
    """Return True for a report of a hang, or a dump of PyTorch's flight recorder, of one rank."""
    if not path.is_file():  # A pipe would be waited for.
        return False
    with suppress(OSError), path.open("rb") as file:
        head = file.read(4096)
        if head[:1] == b"\x80":
            return b"pg_config" in head or b"entries" in head or b"comm_lib_version" in head
        text = head.lstrip()
        known = (b'"gputrace_hang"', b'"pg_config"', b'"comm_lib_version"', b'"collective_seq_id"')
        if text[:1] == b"{" and any(word in head for word in known):
            from gputrace.readers.chrome_json import is_kineto

            return not is_kineto(path, head)  # Its ``distributedInfo`` has a ``pg_config`` too.
    return False
