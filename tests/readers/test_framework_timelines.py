"""Profiles of MXNet's own profiler: operators of GPUs are read, each once."""

from __future__ import annotations

import gzip
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import gputrace
from gputrace.errors import InputError
from gputrace.model.events import COPY_KINDS, Kind
from gputrace.readers.registry import open_trace
from tests.helpers import command
from tests.helpers.recordings import DATA

BEGAN = 1_795_222_316_158_570
"""Microseconds since 1970, as the profiler writes them."""
THREAD = 7_793_063_346_014_600_743
"""Past 2^53, as hashes of thread ids are: its neighbours are other threads."""
OPERATORS_PID = 3_060_606_181_218_273_969


def operator(name: str, start: int, end: int, pid: int = 4, tid: int = THREAD) -> list[Any]:
    """Microseconds from `BEGAN`; twice, as the profiler writes each."""
    event = {"name": name, "cat": "operator"}
    both: list[Any] = [
        event | {"ph": phase, "ts": BEGAN + time, "pid": pid, "tid": tid}
        for phase, time in (("B", start), ("E", end))
    ]
    both += [
        event | {"ph": phase, "ts": BEGAN + time, "pid": OPERATORS_PID, "tid": tid, "id": tid}
        for phase, time in (("b", start), ("e", end))
    ]
    return both


def write(path: Path, *operators: list[Any]) -> Path:
    names = {0: "cpu/0", 4: "gpu/0", 5: "gpu/1", OPERATORS_PID: "operator"}
    labels = [
        {"ph": "M", "args": {"name": name}, "pid": pid, "name": "process_name"}
        for pid, name in names.items()
    ]
    events = labels + [event for operator in operators for event in operator]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return write(
        tmp_path / "profile.json",
        operator("CopyCPU2GPU", 0, 40, tid=THREAD + 1),
        operator("Convolution", 50, 90),
        operator("Convolution", 95, 100),
        operator("Convolution", 60, 80, pid=5),
        operator("DeleteVariable", 100, 900),
        operator("Convolution", 0, 900, pid=0),
    )


def test_operators_on_gpus_count_once_and_those_on_cpus_do_not(profile: Path) -> None:
    with gputrace.open(profile) as trace:
        report = trace.analyze()
    assert report.source == "mxnet"
    found = [(g.device, g.kernels, g.copies, g.compute_ns, g.h2d_ns) for g in report.gpus]
    assert found == [(0, 2, 1, 45_000, 40_000), (1, 1, 0, 20_000, 0)]
    assert any("times operators, not kernels" in warning for warning in report.warnings)


def test_times_count_from_the_first_operator(profile: Path) -> None:
    with open_trace(profile) as trace:
        assert trace.session.epoch_ns == BEGAN * 1000
        assert sorted(trace.events([Kind.KERNEL], ["start"]).start.tolist()) == [
            50_000,
            60_000,
            95_000,
        ]


def test_threads_with_neighbouring_ids_past_2_to_53_are_told_apart(profile: Path) -> None:
    with open_trace(profile) as trace:
        copy = trace.events(COPY_KINDS, ["stream"]).stream.tolist()
        assert copy not in trace.events([Kind.KERNEL], ["stream"]).stream.tolist()


def test_a_half_without_the_other_is_left_out(tmp_path: Path) -> None:
    halves = operator("Convolution", 10, 20)
    path = write(tmp_path / "profile.json", halves[1:], operator("relu", 30, 40), halves[:1])
    with open_trace(path) as trace:
        assert trace.events([Kind.KERNEL], ["start"]).start.tolist() == [0]


def test_a_run_on_cpus_is_refused_and_what_to_do_is_told(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "mxnet_profile_all.json.gz", tmp_path))
    words = ("MXNet", "no operator in it ran on a GPU", "gputrace record")
    command.assert_unreadable(path, *words)


@pytest.mark.parametrize("value", [None, "x", [], {}, 1e300, -5, True, 10**30])
@pytest.mark.parametrize("field", ["ph", "ts", "pid", "tid", "name", "args"])
def test_values_of_any_type_are_read_or_refused(field: str, value: object, profile: Path) -> None:
    document = json.loads(profile.read_text())
    for event in document["traceEvents"]:
        event[field] = value
        profile.write_text(json.dumps(document))
        with suppress(InputError), open_trace(profile) as trace:
            trace.events([Kind.KERNEL], ["start", "name"])


def test_a_file_cut_short_is_refused(profile: Path, tmp_path: Path) -> None:
    content = profile.read_bytes()
    for length in range(1, content.rindex(b"]"), 11):
        cut = tmp_path / "cut.json"
        cut.write_bytes(content[:length])
        with pytest.raises(InputError):
            open_trace(cut)
    cut.write_bytes(gzip.compress(content)[:-20])
    command.assert_unreadable(cut, "cut off: its gzip data end after")
