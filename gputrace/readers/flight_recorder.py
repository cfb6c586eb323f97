"""Dumps of PyTorch's flight recorder (NCCL's or gloo's collectives of one rank), and the reports of
hangs of ``gputrace record --hang``.

A dump is a pickle of plain values or JSON, one a rank, as ``TORCH_NCCL_TRACE_BUFFER_SIZE`` and a
timeout leave it (torch/csrc/distributed/c10d/FlightRecorder.hpp; versions 2.x).

A few bytes of a pickle can refer to a list or text once more, and a few characters of a report can
name a million ranks. What is made of a file is therefore counted (`Allowance`).
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any, Final

from gputrace.errors import InputError
from gputrace.model.struct import Struct
from gputrace.readers.plain_pickle import MALFORMED, Allowance, content_of, plain_pickle, problem

_OF_EACH: Final = 256
_OF_FRAME: Final = 64
_OF_RANK: Final = 8
"""Bytes that a collective, a line of a stack and a rank of a group count, beside their text."""
_DUMP: Final = "flight recorder dump"


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
        data = content_of(path, _DUMP)
        allowance = Allowance(len(data))
        try:
            content = plain_pickle(data) if data[:1] == b"\x80" else json.loads(data)
            if not isinstance(content, dict):
                raise TypeError
            if "gputrace_hang" in content:
                ranks += _of_report(content, allowance)
            else:
                numbers = re.findall(r"\d+", path.name.removesuffix(".json"))
                ranks.append(_of_dump(content, int(numbers[-1]) if numbers else number, allowance))
        except MALFORMED as error:
            raise InputError(path, problem(error, _DUMP)) from error
    return sorted(ranks, key=lambda state: state.rank)


def _of_report(report: dict[str, Any], allowance: Allowance) -> list[RankState]:
    host, is_over = str(report.get("host", "")), bool(report.get("is_over"))
    groups: dict[str, tuple[int, ...]] = {}
    states = []
    for row in report["ranks"]:
        entries = []
        for entry in row["collectives"]:
            members = str(entry["members"])
            if members not in groups:
                groups[members] = _members(members, allowance)
            entries.append(
                Collective(
                    str(entry["group"]),
                    groups[members],
                    str(entry["operation"]),
                    int(entry["number"]),
                    int(entry["step"]),
                    str(entry["line"]),
                    int(entry["start_ns"]),
                    entry["end_ns"] is not None,
                )
            )
        threads = row["threads"]
        stack = tuple(map(str, threads[0])) if threads else ()
        # After the program's end all are gone; the first drew the others with it.
        alive: bool | None = bool(row["alive"])
        if is_over:
            alive = False if row["ended_first"] else None
        values = int(row["pid"]), alive, int(row["steps"])
        states.append(RankState(int(row["rank"]), host, *values, stack, tuple(entries)))
    return states


def _members(text: str, allowance: Allowance) -> tuple[int, ...]:
    """Parse ``0-3``, ``0-12/4`` (each fourth) or ``0,2,4``."""
    members: list[int] = []
    for part in filter(None, text.split(",")):
        ends, _, stride = part.partition("/")
        first, _, last = ends.partition("-")
        group = range(int(first), int(last or first) + 1, int(stride or 1))
        allowance.spend(_OF_RANK * len(group))
        members += group
    return tuple(members)


def _of_dump(content: dict[str, Any], rank: int, allowance: Allowance) -> RankState:
    groups: dict[str, tuple[int, ...]] = {}
    for name, configured in content.get("pg_config", {}).items():
        ranks = (configured.get("ranks") if isinstance(configured, dict) else None) or ()
        allowance.spend(_OF_RANK * len(ranks))
        # Not `int`, which would make a number of each reference to a text.
        listed = json.loads(ranks) if isinstance(ranks, str) else ranks
        groups[name] = tuple(map(index, listed))
    entries = []
    for entry in content["entries"]:
        name, description = (*map(_text, entry.get("process_group", ("0", ""))[:2]), "")[:2]
        members = groups.get(_text(entry.get("pg_id", name)), groups.get(name, ()))
        point_to_point = bool(entry.get("is_p2p"))
        number = entry["p2p_seq_id" if point_to_point else "collective_seq_id"]
        called, size = _text(entry["profiling_name"]), _text(entry.get("input_sizes", ""))
        group = f"{description or name}{' (point to point)' if point_to_point else ''}"
        allowance.spend(_OF_EACH + len(called) + len(size) + len(group))
        operation = called.partition(":")[2] or called
        state, retired = entry.get("state"), entry.get("retired")
        entries.append(
            Collective(
                group,
                members,
                operation.split(" ")[0],
                int(number),
                None,
                _line(entry.get("frames", ()), allowance),
                int(entry.get("time_created_ns", 0)),
                state == "completed" or bool(retired),
                size,
            )
        )
    return RankState(rank, "", None, None, None, (), tuple(entries))


class _Short(reprlib.Repr):
    """Short form of shapes: lists may hold one another many times, and anything else be long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2  # A list of tensors, each of which is a list of sizes.

    def repr_dict(self, x: Any, level: int) -> str:
        """Return a dict's place only: to sort its keys takes as long as it is."""
        return "{...}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        """Return the beginning."""
        return repr(x[: self.maxstring])


_SHORT: Final = _Short()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _SHORT.repr(value)


_PARTS: Final = ("filename", "line", "name")
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")
_NOT_THE_PROGRAM: Final = (*_LIBRARIES, "/_gputrace_hooks/", "/torchinductor_")


def _line(frames: Sequence[dict[str, Any]], allowance: Allowance) -> str:
    """Return the innermost line of the program, else the innermost of all."""
    innermost = ""
    for frame in frames:
        line = "{}:{} {}".format(*(_text(frame[part]) for part in _PARTS))
        allowance.spend(_OF_FRAME + len(line))
        if is_of_program(line):
            return line
        innermost = innermost or line
    return innermost


def is_of_program(line: str) -> bool:
    """Return whether a line is the program's, and no library's."""
    return not any(part in line for part in _NOT_THE_PROGRAM) and not line.startswith("??")


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
