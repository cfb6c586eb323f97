"""The text of a Kineto trace: read in parts, and refused in one line where it is broken."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gputrace.errors import InputError
from gputrace.model.events import Kind
from gputrace.readers import chrome_json as documents
from gputrace.readers import compressed
from gputrace.readers.chrome_json import Document
from gputrace.readers.compressed import Content
from gputrace.readers.kineto import BEFORE
from gputrace.readers.kineto_events import DecodedEvents, tabulate
from gputrace.readers.registry import open_trace
from tests.helpers import command
from tests.helpers.kineto import kernel, write

NASTY = st.text(st.sampled_from('"\\{}[],: \n\té\U0001f600a'), max_size=12)
VALUES = st.recursive(
    NASTY | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NASTY, inner, max_size=3),
    max_leaves=6,
)
ARGS = st.dictionaries(NASTY, VALUES)
EVENTS = st.lists(st.fixed_dictionaries({"ph": st.just("X"), "name": NASTY, "args": ARGS}))


def read(path: Path) -> tuple[list[Any], Any]:
    """Names of all events, and what stands around them."""
    with Content(path) as text:
        document = Document(text, DecodedEvents().decode)
        tables = (tabulate(p) if isinstance(p, list) else p for p in document.parts())
        names = [t.value("name", row) for t in tables for row in range(len(t))]
    return names, json.loads(document.around)


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end anywhere in an event, as large ones do now and then."""
    monkeypatch.setattr(compressed, "_BLOCK", 40)
    monkeypatch.setattr(documents, "_CUT_RANGE", 64)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=EVENTS,
    around=st.dictionaries(NASTY, VALUES, max_size=3),
    indent=st.sampled_from([None, 1]),
)
def test_events_are_those_of_the_whole_document_wherever_blocks_end(
    tiny_blocks: None, tmp_path: Path, events: list[Any], around: dict[str, Any], indent: int | None
) -> None:
    path = tmp_path / "trace"
    whole = {"schemaVersion": 1} | around | {"traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(whole, indent=indent))
    assert read(path) == ([event["name"] for event in events], whole | {"traceEvents": []})


def test_a_list_without_anything_around_is_read(tiny_blocks: None, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps([kernel(1, 1, "a"), kernel(2, 1, "b")]))
    assert read(path) == (["a", "b"], [])


@pytest.mark.parametrize("end", ["", ",", ",\n  "])
def test_a_list_without_its_end_is_read_and_the_loss_told(tmp_path: Path, end: str) -> None:
    whole = write(tmp_path / "trace", kernel(1, 1), kernel(3, 1)).read_text()
    (tmp_path / "trace").write_text(whole.removesuffix("]}") + end)
    with open_trace(tmp_path / "trace") as trace:
        assert len(trace.events([Kind.KERNEL], ["start"])) == 2
        assert trace.quality.warnings == [
            "the file ends without an end of its list: it was cut off"
        ]


def test_what_c_prints_for_no_number_is_read(tmp_path: Path) -> None:
    text = write(tmp_path / "trace", kernel(1, 1, rate=7)).read_text()
    for word in ("inf", "-nan", "NaN", "Infinity", "N/A"):
        (tmp_path / "trace").write_text(text.replace('"rate": 7', f'"rate": {word}'))
        with open_trace(tmp_path / "trace") as trace:
            assert len(trace.events([Kind.KERNEL], ["start"])) == 1


def test_a_name_that_is_not_utf_8_is_read(tmp_path: Path) -> None:
    text = write(tmp_path / "trace", kernel(1, 1, "gemm")).read_bytes()
    (tmp_path / "trace").write_bytes(text.replace(b"gemm", b"g\xffmm"))
    with open_trace(tmp_path / "trace") as trace:
        assert trace.names([0])[0] == "g?mm"


def test_what_is_no_event_is_left_out_and_counted(tmp_path: Path) -> None:
    odd = [7, "x", [], {"ph": 3}, {"ph": "X", "cat": ["kernel"]}]
    with open_trace(write(tmp_path / "trace", *odd, kernel(1, 1))) as trace:
        assert len(trace.events([Kind.KERNEL], ["start"])) == 1
        assert trace.quality.dropped == {"not an event of the profiler": len(odd)}


class TestAnEventThatIsNotJson:
    """50 kernels, one of which something was done to."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path / "run.pt.trace.json", *(kernel(at, 1) for at in range(50)))

    @pytest.mark.parametrize("number", [0, 1, 25, 48, 49])
    @pytest.mark.parametrize("junk", [b"@@", b'"', b"}", b'"a "b" c": 1, ', b"{", b"\0]"])
    def test_is_left_out_and_counted(self, path: Path, number: int, junk: bytes) -> None:
        pieces = path.read_bytes().split(b'"pid"')
        pieces[number] += junk
        path.write_bytes(b'"pid"'.join(pieces))
        with open_trace(path) as trace:
            starts = (trace.events([Kind.KERNEL], ["start"]).start - BEFORE).tolist()
            assert trace.quality.dropped == {"an event that is not JSON": 1}
        left = [1000 * at for at in range(50) if at != number]
        assert starts == [at - left[0] for at in left]

    def test_is_left_out_wherever_blocks_end(self, path: Path, tiny_blocks: None) -> None:
        text = path.read_bytes()
        at = text.index(b'"pid"', len(text) // 2)
        path.write_bytes(text[:at] + b'""' + text[at:])
        with open_trace(path) as trace:
            assert len(trace.events([Kind.KERNEL], ["start"])) == 49

    def test_is_left_out_of_many(self, path: Path) -> None:
        write(path, *(kernel(at, 1, "gemm", of=f"'{at % 7}'") for at in range(20_000)))
        path.write_text(path.read_text().replace("'3'", '"3"'))
        with open_trace(path) as trace:
            assert len(trace.events([Kind.KERNEL], ["start"])) == 17_143
            assert trace.quality.dropped == {"an event that is not JSON": 2_857}

    def test_is_the_end_of_a_file_of_nothing_else(self, path: Path) -> None:
        path.write_bytes(path.read_bytes().replace(b'"pid"', b'"pid'))
        command.assert_unreadable(path, "broken JSON at byte 92 of its text", "record it again")

    @pytest.mark.parametrize("text", [R"C:\Users\new\torch.py", R"C:\x\u12", "a\tb\x01\x1b"])
    def test_is_none_for_backslashes_and_control_characters(self, path: Path, text: str) -> None:
        path.write_text(path.read_text().replace("gemm", text))
        with open_trace(path) as trace:
            assert len(trace.events([Kind.KERNEL], ["start"])) == 50
            assert not trace.quality.dropped


@pytest.mark.parametrize("broken", ['"say "hi"', "1.2.3", '"a\\"', "}"])
@pytest.mark.parametrize("after", [False, True])
def test_a_property_that_is_not_json_costs_no_other(
    tmp_path: Path, broken: str, after: bool
) -> None:
    path = write(tmp_path / "run.json", kernel(1, 1), distributedInfo={"rank": 3}, host_name="a")
    key = '"schemaVersion": 1' if not after else "}}]"
    text = path.read_text()
    extra = f'"traceName": {broken}'
    path.write_text(text.replace(key, f"{key}, {extra}"))
    with open_trace(path) as trace:
        assert len(trace.events([Kind.KERNEL], ["start"])) == 1
        assert trace.session.ranks == {3}
        assert trace.quality.warnings[0].startswith("properties left out: ")


class TestBroken:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path / "run.pt.trace.json", *(kernel(at, 1) for at in range(50)))

    def test_a_file_cut_off_within_an_event_says_where_and_what_reads_the_rest(
        self, path: Path
    ) -> None:
        text = path.read_bytes()
        for length in (len(text) // 2, len(text) - 6):
            path.write_bytes(text[:length])
            words = f"cut off: its text ends at byte {length:,}", "--keep-going"
            command.assert_unreadable(path, *words)

    def test_a_file_cut_off_before_its_events_says_so(self, path: Path) -> None:
        path.write_bytes(path.read_bytes()[:25])
        command.assert_unreadable(path, "no list of events in its 25 bytes of text")

    def test_nesting_without_end_is_refused(self, path: Path) -> None:
        path.write_bytes(b'{"schemaVersion": 1, "traceEvents": ' + b"[" * 100_000)
        command.assert_unreadable(path, "nested too deep")

    @pytest.mark.parametrize(("form", "compress"), [("gzip", gzip.compress), ("xz", lzma.compress)])
    def test_packed_text_cut_off_says_after_how_much(
        self, form: str, compress: Callable[[bytes], bytes], path: Path
    ) -> None:
        packed = compress(path.read_bytes())
        path.write_bytes(packed[: len(packed) // 2])
        command.assert_unreadable(path, f"cut off: its {form} data end after", "--keep-going")

    def test_broken_xz_is_refused(self, path: Path) -> None:
        names = (hashlib.sha256(bytes(at)).hexdigest() for at in range(5000))
        write(path, *(kernel(at, 1, name) for at, name in enumerate(names)))
        packed = bytearray(lzma.compress(path.read_bytes()))
        packed[-3000:-2900] = bytes(100)
        path.write_bytes(packed)
        command.assert_unreadable(path, "broken xz data after", "copy it again")

    def test_gzip_with_a_wrong_sum_is_refused(self, path: Path) -> None:
        packed = bytearray(gzip.compress(path.read_bytes()))
        packed[-6] ^= 1
        path.write_bytes(packed)
        command.assert_unreadable(path, "broken gzip data", "copy it again")

    def test_an_event_longer_than_any_is_refused(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(documents, "LONGEST", 1 << 12)
        monkeypatch.setattr(compressed, "_BLOCK", 1 << 10)
        write(path, kernel(1, 1, "a" * (1 << 14)))
        with pytest.raises(InputError, match="without an end of an event"):
            open_trace(path)

    def test_a_file_that_unpacks_to_far_more_than_a_trace_does_is_not_read_on(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compressed, "FREE_BYTES", 1 << 20)
        monkeypatch.setattr(compressed, "_BLOCK", 1 << 16)
        write(path, *([kernel(1, 1)] * 40_000))
        path.write_bytes(gzip.compress(path.read_bytes()))
        monkeypatch.setattr(compressed, "MOST_RATIO", 20)
        with pytest.raises(InputError, match="no trace compresses that well"):
            open_trace(path)


def test_json_of_others_is_not_taken_for_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"results": [1, 2, 3]}')
    command.assert_unreadable(path, "not a trace that gputrace knows", "PyTorch's profiler")
