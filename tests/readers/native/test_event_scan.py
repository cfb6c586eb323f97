"""The scan of a Kineto trace's events gives what decoding them gives, or leaves it to that."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gputrace
from gputrace.errors import InputError
from gputrace.native import library
from gputrace.readers import kineto_events
from gputrace.readers.chrome_json import BadJson
from gputrace.readers.compressed import Content
from gputrace.readers.kineto_events import (
    COLUMNS,
    DecodedEvents,
    Event,
    EventBatch,
    EventScanner,
    Pairs,
    tabulate,
)
from tests.fuzz import native
from tests.helpers.kineto import event, kernel, real, write
from tests.synthetic import Plan, simulate, write_kineto

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

TEXTS = st.sampled_from(["", "gemm", "stream 7", "-3", "\u00e9\U0001f600", "a\\b", "x" * 40, "\n"])
NUMBERS = (
    st.integers(-3, 9)
    | st.integers(-(2**70), 2**70)
    | st.floats(-1e6, 1e6)
    | st.sampled_from([1e300, 1e-9, 0.0005, 0.0015, 12.3456, 10**15 + 0.125])
)
VALUES = TEXTS | NUMBERS | st.none() | st.booleans() | st.just([1, {"a": [True, {}]}])
ARGS = (
    *("device", "stream", "correlation", "bytes", "fromDevice", "toDevice", "dtype", "other"),
    *("Sequence number", "Fwd thread id", "Process Group Name", "Process Group Ranks", "Src Rank"),
)
USUAL = st.fixed_dictionaries(
    {
        "ph": st.sampled_from("XXXMi"),
        "cat": st.sampled_from(["kernel", "cpu_op", "Trace"]),
        "name": TEXTS,
        "ts": st.integers(-(10**15), 9 * 10**15) | st.decimals(0, 10**12, places=3).map(float),
        "dur": st.integers(0, 10**9),
    },
    optional={
        "pid": st.integers(0, 9) | TEXTS,
        "tid": st.integers(0, 9) | TEXTS | st.none(),
        "args": st.dictionaries(st.sampled_from(ARGS[:6]), st.integers(-1, 2**40)),
    },
)
SHORT = {"ph": "X", "cat": "kernel", "name": "", "ts": 0, "dur": 0, "pid": 0, "tid": None}
"""As many values as a short list may have."""
ODD = st.dictionaries(
    st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"]),
    VALUES | st.sampled_from("XBE") | st.dictionaries(st.sampled_from(ARGS), VALUES),
)


def listed(table: EventBatch) -> list[Any]:
    """All that a table says of its rows."""
    texts = [[table.value(name, row) for row in range(len(table))] for name in COLUMNS[:4]]
    kinds = [list(map(type, values)) for values in texts]
    numbers = [table[name].tolist() for name in (*COLUMNS[4:14], "flags")]
    return [texts, kinds, numbers, [table.args(row) for row in range(len(table))]]


def decoded(text: bytes) -> list[Event] | None:
    """The events of a list; None where it is not one of events alone."""
    decoder = DecodedEvents()
    try:
        events = decoder._decode(text)
    except (ValueError, BadJson):
        return None
    return None if decoder.odd else events


def scan_or_leave(text: bytes) -> bool:
    """Compare a scan with what decoding gives; return True if there is one."""
    table = EventScanner().scan(text)
    if table is None:
        return False
    events = decoded(text)
    assert events is not None
    assert {event.ph for event in events}.isdisjoint("BE")
    assert listed(table) == listed(tabulate(Pairs().whole(events)))
    return True


@example([SHORT], None, False)
@given(st.lists(USUAL, max_size=6), st.sampled_from([None, 1]), st.booleans())
def test_usual_events_are_scanned_as_they_are_decoded(
    events: list[Any], indent: int | None, ascii: bool
) -> None:
    text = json.dumps(events, indent=indent, ensure_ascii=ascii)
    assert scan_or_leave(text.encode())


@given(st.lists(USUAL | ODD, max_size=4))
def test_unusual_events_are_scanned_so_or_left(events: list[Any]) -> None:
    scan_or_leave(json.dumps(events).encode("utf-8", "surrogatepass"))


@given(st.lists(USUAL, min_size=1, max_size=3), st.integers(0, 2**32))
def test_broken_text_is_left_to_the_decoder(events: list[Any], seed: int) -> None:
    draw, text = random.Random(seed), bytearray(json.dumps(events).encode())
    for _ in range(draw.randrange(1, 3)):
        at = draw.randrange(len(text))
        other = draw.choice([b"", b'"', b"}", b",", b"\\", b"\xff", b"e"])
        text[at : at + draw.randrange(3)] = other
    scan_or_leave(bytes(text))


@pytest.mark.parametrize(
    "odd",
    ['{"ph":"B"}', '{"ph":"X","ts":1e3}', '{"ph":"X","tid":true}', '{"p\\u0068":"X"}', "7", "{},"],
)
def test_what_is_not_usual_is_left_to_the_decoder(odd: str) -> None:
    usual = json.dumps(kernel(1, 1))
    assert scan_or_leave(f"[{usual}]".encode())
    assert not scan_or_leave(f"[{usual}, {odd}]".encode())


@pytest.mark.parametrize(
    "name",
    [
        "torch2.13-cpu.pt.trace.json.gz",
        "hta-large-integer.pt.trace.json.gz",
        "hta-nccl-allreduce.json.gz",
    ],
)
def test_real_recordings_are_read_alike_with_a_compiler_and_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = real("kineto", name)
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    with gputrace.open(path) as trace:
        scanned = trace.analyze().render("json")
    monkeypatch.setattr(kineto_events, "library", lambda: None)
    with gputrace.open(path) as trace:
        assert trace.analyze().render("json") == scanned


@pytest.mark.parametrize("keep_going", [False, True])
def test_files_are_read_alike_by_any_number_of_threads(tmp_path: Path, keep_going: bool) -> None:
    plan = Plan(steps=4, ranks=3, kernels_per_step=20, allreduces=1)
    paths = write_kineto(simulate(plan), tmp_path)
    if keep_going:
        paths[1].write_bytes(paths[1].read_bytes()[:-2000])
    reports = []
    for number in (3, 2, 1):
        with gputrace.open(tmp_path, keep_going=keep_going, workers=number) as trace:
            reports.append(trace.analyze().render("json"))
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize("number", [1, 3])
def test_the_first_broken_file_is_the_one_that_is_named(tmp_path: Path, number: int) -> None:
    paths = [write(tmp_path / f"rank{n}.json", kernel(1, 1), kernel(2, 1)) for n in range(3)]
    for path in paths[1:]:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="cut off") as refused:
        gputrace.open(*paths, workers=number)
    assert refused.value.path == paths[1]


def test_another_library_for_gzip_loses_nothing_before_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Quick(gzip.GzipFile):
        def read1(self, size: int = -1) -> bytes:
            if self.tell() >= 5000:
                raise RuntimeError("an error of its own")
            return super().read1(5000)

    text = json.dumps([event("kernel", f"gemm {n}", n, 1) for n in range(500)]).encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text)[:-300])
    library = SimpleNamespace(__name__="isal.igzip", GzipFile=Quick)
    monkeypatch.setitem(sys.modules, "isal.igzip", library)
    with Content(path) as content:
        block = content.read()
        assert len(block) > 5000
        assert text.startswith(block)
        with pytest.raises(InputError, match="cut off: its gzip data end after"):
            content.read()


def test_changed_text_is_scanned_within_its_bounds(tmp_path: Path) -> None:
    scanned, left = native.scan_events(tmp_path, 3000)
    assert scanned > 100
    assert left > 100
