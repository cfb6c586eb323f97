"""Dumps of flight recorders and reports of hangs that unfold to far more than their size."""

from __future__ import annotations

import io
import json
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import pytest

from gputrace.analyzers.hang_causes import find_cause
from gputrace.errors import InputError
from gputrace.readers import plain_pickle as plain
from gputrace.readers.flight_recorder import read_ranks
from gputrace.readers.plain_pickle import plain_pickle
from tests.analyzers.test_hang_causes import dump
from tests.helpers import command

if TYPE_CHECKING:
    from _typeshed import TraceFunction

MOST_PEAK: Final = 96 << 20
"""Bytes of memory that any of these files may take; each took hundreds of MiB, or minutes."""
LONG: Final = "x" * 3000
UNFOLDS: Final = "unfolds to over 100 times its size; have it written again, or leave it out"


def of_entries(count: int, **changed: Any) -> bytes:
    """A pickle in which one entry is repeated, with some values changed."""
    content = dump(1)
    return pickle.dumps(content | {"entries": [content["entries"][0] | changed] * count})


def of_frames() -> bytes:
    """Entries whose one stack repeats one frame of long texts, which is no line of the program."""
    frame = {"filename": f"<frozen {LONG}>", "line": LONG, "name": LONG}
    return of_entries(3000, frames=[frame] * 3000)


def of_small_frames() -> bytes:
    frame = {"filename": "<frozen", "line": "", "name": ""}
    return of_entries(3000, frames=[frame] * 3000)


def of_groups() -> bytes:
    """Groups that share a text of many ranks."""
    group = {"ranks": json.dumps([0] * 3000)}
    return pickle.dumps(dump(1) | {"pg_config": {str(name): group for name in range(3000)}})


def report(groups: int, members: str) -> bytes:
    """A report of one rank that has entered a collective of each of so many groups."""
    entry = {"group": "g", "operation": "x", "number": 1, "step": 0, "line": ""}
    entry |= {"start_ns": 1, "end_ns": None}
    entries = [entry | {"members": members.format(group)} for group in range(groups)]
    row = {"rank": 0, "pid": 1, "steps": 1, "alive": True, "threads": [], "collectives": entries}
    return json.dumps({"gputrace_hang": 1, "ranks": [row]}).encode()


def of_members() -> bytes:
    return report(60, "{}-1000000")


def peak_of(read: Callable[[], object]) -> int:
    """The largest amount of memory, in bytes, that is allocated meanwhile."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("made", [of_frames, of_small_frames, of_groups, of_members])
def test_what_unfolds_without_bound_is_refused(
    made: Callable[[], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the texts that are allowed takes a quarter of the memory."""
    monkeypatch.setattr(plain, "FREE_BYTES", plain.FREE_BYTES // 4)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(made())
    assert path.stat().st_size < 100_000

    def refused() -> None:
        with pytest.raises(InputError, match=UNFOLDS):
            read_ranks([path])

    assert peak_of(refused) < MOST_PEAK // 4


def test_shapes_are_shortened_however_deep_they_are(tmp_path: Path) -> None:
    """Six lists of six lists of six, and so on, of one text."""
    nested: Any = LONG
    for _ in range(7):
        nested = [nested] * 6
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(of_entries(1000, input_sizes=nested))
    assert peak_of(partial(read_ranks, [path])) < MOST_PEAK
    assert len(read_ranks([path])[0].collectives[0].size) < 1000


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.hang1.json"
    path.write_bytes(of_members())
    ran = command.gputrace("analyze", path)
    assert (ran.code, ran.out) == (command.UNREADABLE, "")
    assert ran.err == f"gputrace: {path}: is not a flight recorder dump: its content {UNFOLDS}\n"


def test_a_large_group_that_is_named_often_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "t.hang1.json"
    path.write_bytes(report(500, "0-99999"))
    assert peak_of(lambda: find_cause(read_ranks([path]))) < MOST_PEAK
    (state,) = read_ranks([path])
    assert len({id(entry.members) for entry in state.collectives}) == 1


def test_texts_are_no_ranks(tmp_path: Path) -> None:
    """Each would be made a number of its own, however often the one text is referred to."""
    path = tmp_path / "nccl_trace_rank_0"
    groups = {"0": {"ranks": ["9" * 4000] * 800}}
    path.write_bytes(pickle.dumps(dump(1) | {"pg_config": groups}))
    with pytest.raises(InputError, match="is not a flight recorder dump"):
        read_ranks([path])


@pytest.mark.parametrize("number", [1 << 1024, -(1 << 2000)])
def test_a_number_that_takes_long_to_write_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=r"number of over 1,024 bits \(at byte \d+\)"):
        plain_pickle(pickle.dumps([number]))


def test_keys_that_all_hash_to_the_same_are_refused() -> None:
    keys = {sys.hash_info.modulus * number: None for number in range(1, 9)}
    with pytest.raises(ValueError, match="no dict by text or number"):
        plain_pickle(pickle.dumps(keys))
    assert plain_pickle(pickle.dumps({7: 1, -(1 << 40): 2})) == {7: 1, -(1 << 40): 2}


def test_a_pickle_of_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MOST_OPCODES", 100)
    assert plain_pickle(pickle.dumps([1] * 90))
    with pytest.raises(ValueError, match=r"holds over 100 values \(at byte \d+\)"):
        plain_pickle(pickle.dumps([1] * 100))


def at_once(content: dict[str, Any]) -> bytes:
    """A pickle as PyTorch writes it: all the items of a list between two opcodes."""
    target = io.BytesIO()
    with mock.patch.object(pickle._Pickler, "_BATCHSIZE", 1 << 30):
        pickle._Pickler(target, 2).dump(content)
    return target.getvalue()


def steps_of(read: Callable[[], object]) -> int:
    """The number of instructions of Python that the reader takes."""
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal steps
        if frame.f_code.co_filename != plain.__file__:
            return None
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        read()
    finally:
        sys.settrace(before)
    return steps


def test_the_time_of_a_dump_grows_as_its_entries_do(tmp_path: Path) -> None:
    counted = {}
    for entries in (250, 1000):
        path = tmp_path / f"nccl_trace_rank_{entries}"
        path.write_bytes(at_once(dump(entries)))
        counted[entries] = steps_of(partial(read_ranks, [path]))
    assert 3.9 * counted[250] < counted[1000] < 4.1 * counted[250]


def test_ten_thousand_entries_are_read(tmp_path: Path) -> None:
    path, content = tmp_path / "nccl_trace_rank_3", dump(10_000)
    library = [{"filename": f"/lib/python/{n}.py", "line": n, "name": "call"} for n in range(3)]
    for entry in content["entries"]:
        entry["frames"] = library + entry["frames"]
    path.write_bytes(at_once(content))
    (state,) = read_ranks([path])
    assert [entry.number for entry in state.collectives] == list(range(1, 10_001))
    assert {entry.line for entry in state.collectives} == {"train.py:20 step"}
    assert state.collectives[0].members == (0, 1)
