"""Snapshots of PyTorch's allocator: what is read of them, and what is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, Final

import pytest

from gputrace.analyzers.memory_holders import report_memory
from gputrace.errors import InputError
from gputrace.readers import plain_pickle as plain
from gputrace.readers.flight_recorder import read_ranks
from gputrace.readers.memory_snapshot import is_memory_snapshot, read_snapshot
from tests.analyzers.test_hang_causes import dump
from tests.helpers import command, memory_snapshots
from tests.helpers.memory_snapshots import MIB, Allocator
from tests.readers.test_flight_recorder import peak_of


def training() -> dict[str, Any]:
    allocator = Allocator()
    memory_snapshots.train(allocator)
    return allocator.content()


def written(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


class Planted:
    """Runs a function where it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("place", ["top", "segments", "device_traces", "frames"])
def test_planted_code_never_runs(place: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = Planted(os.mkdir, str(mark))
    content: Any = training()
    if place == "frames":
        content["device_traces"][0][3]["frames"] = [code]
    elif place == "top":
        content["more"] = code
    else:
        content[place] = code
    path = written(tmp_path / "s.pickle", content, protocol)
    with pytest.raises(InputError, match=r"more than plain values \((STACK_)?GLOBAL\)"):
        read_snapshot(path)
    ran = command.gputrace("analyze", path)
    assert (ran.code, ran.out, mark.exists()) == (command.UNREADABLE, "", False)
    pickle.loads(path.read_bytes())
    assert mark.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read_alike(protocol: int, tmp_path: Path) -> None:
    """PyTorch's own pickler, which is in C++, writes protocol 2."""
    path = written(tmp_path / "s.pickle", training(), protocol)
    assert is_memory_snapshot(path)
    assert read_snapshot(path) == read_snapshot(written(tmp_path / "t.pickle", training(), 4))


def test_each_gpu_is_read(tmp_path: Path) -> None:
    content = training()
    content["device_traces"] = [[], [], *content["device_traces"], []]
    for segment in content["segments"]:
        segment["device"] = 2
    (device,) = read_snapshot(written(tmp_path / "s.pickle", content))
    assert device.device == 2
    assert len(device.events) == len(content["device_traces"][2])


def test_the_first_snapshots_are_lists_of_segments(tmp_path: Path) -> None:
    frames = [memory_snapshots.PROGRAM]
    history = [{"addr": 7, "real_size": MIB - 100, "frames": frames}]
    block = {"size": MIB, "state": "active_allocated", "history": history}
    segment = {"device": 0, "address": 512, "total_size": 2 * MIB, "blocks": [block]}
    (device,) = read_snapshot(written(tmp_path / "s.pickle", {"segments": [segment]}))
    (only,) = device.blocks
    assert only[:3] == (512, MIB, MIB - 100)
    assert only[3].line == "/home/me/train.py:9 main"


def test_paths_of_windows_are_lines_of_the_program(tmp_path: Path) -> None:
    content = training()
    names = ("D:\\me\\envs\\x\\Lib\\site-packages\\torch\\functional.py", "D:\\me\\model.py")
    frames = [{"filename": name, "line": 7, "name": "f"} for name in names]
    content["device_traces"][0][1]["frames"] = frames
    (device,) = read_snapshot(written(tmp_path / "s.pickle", content))
    assert device.events[1].stack.line == "D:/me/model.py:7 f"


@pytest.mark.parametrize("value", [-1, 1 << 62, "4", 1.5, None, [], 10**400])
@pytest.mark.parametrize("name", ["addr", "size", "time_us"])
def test_amounts_that_no_memory_has_are_refused(value: Any, name: str, tmp_path: Path) -> None:
    content = training()
    content["device_traces"][0][3][name] = value
    with pytest.raises(InputError, match="is not a memory snapshot of PyTorch"):
        read_snapshot(written(tmp_path / "s.pickle", content))


@pytest.mark.parametrize("name", ["filename", "name"])
def test_texts_that_are_none_are_refused_however_deep_they_are(name: str, tmp_path: Path) -> None:
    """As a text, 200 lists of the one before twice have more characters than there are atoms."""
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested, nested]
    content = training()
    frame = {"filename": "a.py", "line": 1, "name": "f"} | {name: nested}
    content["device_traces"][0][3]["frames"] = [frame]
    with pytest.raises(InputError, match="is not a memory snapshot of PyTorch"):
        read_snapshot(written(tmp_path / "s.pickle", content, 2))


def test_a_snapshot_of_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "s.pickle", {"segments": [], "device_traces": [[]]})
    ran = command.gputrace("analyze", path)
    assert (ran.code, ran.out) == (command.UNREADABLE, "")
    assert (
        ran.err
        == f"gputrace: {path}: a memory snapshot without an allocation: no GPU held memory\n"
    )


def test_other_commands_name_the_one_that_reads_it(tmp_path: Path) -> None:
    ran = command.gputrace("report", written(tmp_path / "s.pickle", training()))
    assert "a snapshot of PyTorch's memory: `gputrace analyze`" in ran.err


def test_dumps_and_snapshots_are_told_apart(tmp_path: Path) -> None:
    snapshot = written(tmp_path / "snapshot", training())
    recorded = written(tmp_path / "nccl_trace_rank_0", dump(2))
    assert [is_memory_snapshot(path) for path in (snapshot, recorded)] == [True, False]
    with pytest.raises(InputError, match="is not a flight recorder dump"):
        read_ranks([snapshot])


MOST_PEAK: Final = 96 << 20


def unfolding(kind: str) -> bytes:
    if kind == "events":
        content = training()
        content["device_traces"] = [content["device_traces"][0] * 250]
        return pickle.dumps(content)
    if kind == "frames":
        frame = {"filename": "<" + "x" * 9000, "line": 1, "name": "f" * 9000}
        content = training()
        content["device_traces"][0][1]["frames"] = [dict(frame) for _ in range(5_000)]
        return pickle.dumps(content)
    if kind == "containers":
        return b"\x80\x04" + b"}" * 62_500 + b"."
    return b"\x80\x04N" + b"\x94" * 62_500 + b"."


@pytest.mark.parametrize("kind", ["events", "frames", "containers", "remembered"])
def test_what_unfolds_without_bound_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the containers that are allowed takes that part of the memory."""
    monkeypatch.setattr(plain, "FREE_CONTAINERS", plain.FREE_CONTAINERS // 32)
    path = tmp_path / "s.pickle"
    path.write_bytes(unfolding(kind))

    def refused() -> None:
        with pytest.raises(InputError, match=r"unfolds to over|more containers than"):
            read_snapshot(path)

    assert peak_of(refused) < 3 * MOST_PEAK // 32


def test_the_time_does_not_depend_on_how_passes_alternate(tmp_path: Path) -> None:
    """Each event of 20,000 is in a pass of its own."""
    allocator = Allocator()
    stacks = (memory_snapshots.forward(0), memory_snapshots.backward())
    allocator.events = [
        {"action": "alloc", "addr": 512 * n, "size": 512, "time_us": n, "frames": stacks[n % 2]}
        for n in range(1, 20_001)
    ]
    path = written(tmp_path / "s.pickle", allocator.content())
    (device,) = report_memory([("s", read_snapshot(path))]).devices
    assert device.moments[0].allocated_bytes == 512 * 20_000


def test_plain_pickles_are_bounded_by_their_opcodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "FREE_CONTAINERS", plain.FREE_CONTAINERS // 32)
    with pytest.raises(plain.Refused, match="more containers"):
        plain.plain_pickle(unfolding("containers"))
