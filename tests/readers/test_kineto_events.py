"""Events of PyTorch's profiler, and what each becomes."""

from __future__ import annotations

import gzip
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.model.events import UNKNOWN, Events, Kind, Memory
from gputrace.model.trace import Device, Session, Trace
from gputrace.readers.kineto import Copy, copy_of
from gputrace.readers.kineto_events import nanoseconds
from gputrace.readers.registry import open_trace
from tests.helpers.kineto import PID, event, kernel, write
from tests.helpers.memory_traces import rows

FIRST = 1_711_234_567_890_123
"""Microseconds of a wall clock, more than a double holds to the nanosecond."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pt.trace.json"


def events(trace: Trace, kind: Kind, *columns: str) -> list[tuple[Any, ...]]:
    found: Events = trace.events([kind], columns)
    return rows(found)


def since(trace: Trace, kind: Kind) -> list[tuple[int, int]]:
    """Start and end of rows of a kind, in nanoseconds after the first row of all."""
    return [(a - trace.origin, b - trace.origin) for a, b in events(trace, kind, "start", "end")]


class TestTimes:
    def test_are_those_of_the_text_to_the_nanosecond(self, path: Path) -> None:
        path.write_text(
            '{"schemaVersion": 1, "traceEvents": ['
            f'{{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":{FIRST}.001,"dur":0.001}},'
            f'{{"ph":"X","cat":"kernel","name":"b","pid":0,"tid":7,"ts":{FIRST}.456,"dur":2}}]}}'
        )
        with open_trace(path) as trace:
            assert since(trace, Kind.KERNEL) == [(0, 1), (455, 2455)]
            epoch = trace.session.epoch_ns
            assert epoch is not None
            assert epoch + trace.origin == FIRST * 1000 + 1

    def test_count_from_the_base_that_the_file_names(self, path: Path) -> None:
        write(path, kernel(5, 1), baseTimeNanoseconds=1_711_964_646_000_000_000)
        with open_trace(path) as trace:
            epoch = trace.session.epoch_ns
            assert epoch is not None
            assert epoch + trace.origin == 1_711_964_646_000_005_000

    def test_that_are_no_wall_clock_tell_no_epoch(self, path: Path) -> None:
        with open_trace(write(path, kernel(5, 1))) as trace:
            assert trace.session.epoch_ns is None

    def test_that_could_not_be_taken_are_left_out_and_counted(self, path: Path) -> None:
        write(path, kernel(FIRST, 1), kernel(0, 1), kernel(FIRST, -1), kernel("x", 1))  # type: ignore[arg-type]
        with open_trace(path) as trace:
            assert since(trace, Kind.KERNEL) == [(0, 1000)]
            assert sum(trace.quality.dropped.values()) == 3

    @given(st.lists(st.decimals(0, 9_000_000_000_000_000, places=3), min_size=1))
    def test_with_three_decimals_are_exact(self, numbers: list[Decimal]) -> None:
        texts = [format(number, "f").encode() for number in numbers]
        assert nanoseconds(texts).tolist() == [int(number * 1000) for number in numbers]

    @given(st.lists(st.decimals(-(10**15), 10**15, allow_nan=False), min_size=1))
    def test_of_any_form_are_rounded_to_the_nanosecond(self, numbers: list[Decimal]) -> None:
        texts = [str(number).encode() for number in numbers]
        exact = [int((n * 1000).quantize(Decimal(1), ROUND_HALF_EVEN)) for n in numbers]
        assert nanoseconds(texts).tolist() == exact

    @pytest.mark.parametrize("text", [b"", b"null", b'"x"', b"1e400", b"9223372036854776", b"{}"])
    def test_that_are_no_number_of_64_bits_are_unknown(self, text: bytes) -> None:
        assert nanoseconds([b"1", text]).tolist() == [1000, UNKNOWN]


class TestOnAGpu:
    @pytest.mark.parametrize(
        ("cat", "kind"),
        [
            ("kernel", Kind.KERNEL),
            ("Kernel", Kind.KERNEL),
            ("gpu_memset", Kind.MEMSET),
            ("Memset", Kind.MEMSET),
        ],
    )
    def test_old_and_new_categories_are_known(self, path: Path, cat: str, kind: Kind) -> None:
        args = {"device": 3, "stream": 9, "correlation": 17, "bytes": 64}
        write(path, event(cat, "one", 10, 1, args=args))
        with open_trace(path) as trace:
            found = events(trace, kind, "device", "stream", "correlation", "bytes")
        assert found == [(3, 9, 17, 64)]

    def test_device_and_stream_are_told_by_process_and_thread_where_nothing_else_does(
        self, path: Path
    ) -> None:
        write(path, event("Kernel", "one", 10, 1, pid=2, tid="stream 20"))
        with open_trace(path) as trace:
            assert events(trace, Kind.KERNEL, "device", "stream") == [(2, 20)]

    def test_annotations_repeated_there_are_no_operations(self, path: Path) -> None:
        write(path, kernel(1, 1), event("gpu_user_annotation", "ProfilerStep#1", 0, 9))
        with open_trace(path) as trace:
            assert trace.kinds == {Kind.KERNEL}

    def test_integers_past_64_bits_do_no_harm(self, path: Path) -> None:
        write(path, kernel(1, 1, correlation=10159970886766084423, stream=1 << 40))
        with open_trace(path) as trace:
            assert events(trace, Kind.KERNEL, "correlation", "stream") == [(UNKNOWN, UNKNOWN)]

    @pytest.mark.parametrize(
        ("name", "copy"),
        [
            (
                "Memcpy HtoD (Pinned -> Device)",
                Copy(Kind.COPY_H2D, Memory.PINNED, Memory.DEVICE),
            ),
            (
                "Memcpy DtoH (Device -> Pageable)",
                Copy(Kind.COPY_D2H, Memory.DEVICE, Memory.PAGEABLE),
            ),
            ("Memcpy DtoD (Device -> Device)", Copy(Kind.COPY_D2D, Memory.DEVICE, Memory.DEVICE)),
            ("Memcpy PtoP (Device -> Device)", Copy(Kind.COPY_PEER, Memory.DEVICE, Memory.DEVICE)),
            ("Memcpy HtoA (Pinned -> Array)", Copy(Kind.COPY_H2D, Memory.PINNED, Memory.ARRAY)),
            ("Memcpy HtoH (Pinned -> Pinned)", Copy(Kind.COPY_OTHER, Memory.PINNED, Memory.PINNED)),
            ("CopyHostToDevice", Copy(Kind.COPY_H2D, Memory.UNKNOWN, Memory.UNKNOWN)),
            ("CopyDeviceToHost", Copy(Kind.COPY_D2H, Memory.UNKNOWN, Memory.UNKNOWN)),
            ("Memcpy", Copy(Kind.COPY_OTHER, Memory.UNKNOWN, Memory.UNKNOWN)),
        ],
    )
    def test_a_copy_s_name_tells_direction_and_memory(self, name: str, copy: Copy) -> None:
        assert copy_of(name) == copy

    def test_a_peer_copy_has_both_ends(self, path: Path) -> None:
        args = {"device": 1, "stream": 7, "fromDevice": 1, "inDevice": 1, "toDevice": 2, "bytes": 8}
        name = "Memcpy PtoP (Device -> Device)"
        write(path, event("gpu_memcpy", name, 1, 1, args=args), kernel(3, 1))
        with open_trace(path) as trace:
            found = events(trace, Kind.COPY_PEER, "device", "source_device", "destination_device")
        assert found == [(1, 1, 2)]


class TestOnTheHost:
    @pytest.mark.parametrize("cat", ["cuda_runtime", "cuda_driver", "Runtime"])
    def test_calls_carry_thread_and_correlation(self, path: Path, cat: str) -> None:
        call = event(cat, "cudaLaunchKernel", 0, 1, tid="1890023232", args={"correlation": 5})
        with open_trace(write(path, call, kernel(3, 1))) as trace:
            assert events(trace, Kind.API, "thread", "correlation") == [(1890023232, 5)]
            assert trace.processes[0].pid == PID

    @pytest.mark.parametrize("tid", [3004819264, "3004819264", -1290148032])
    def test_a_thread_is_the_same_in_every_spelling_of_its_id(
        self, path: Path, tid: int | str
    ) -> None:
        call = event("cuda_runtime", "cudaLaunchKernel", 0, 1, tid=tid)
        with open_trace(write(path, call, kernel(3, 1))) as trace:
            assert events(trace, Kind.API, "thread") == [(3004819264 - (1 << 32),)]

    @pytest.mark.parametrize("cat", ["user_annotation", "cpu_op", "Operator"])
    def test_steps_and_waits_for_data_are_told_by_name(self, path: Path, cat: str) -> None:
        loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        write(path, event(cat, "ProfilerStep#5", 0, 9), event(cat, loader, 1, 2), kernel(3, 1))
        with open_trace(path) as trace:
            assert since(trace, Kind.STEP) == [(0, 9000)]
            assert since(trace, Kind.DATA_WAIT) == [(1000, 3000)]

    def test_annotations_are_ranges_and_operators_are_not_kept(self, path: Path) -> None:
        write(path, event("user_annotation", "forward", 0, 9), event("cpu_op", "aten::mm", 0, 9),
              event("python_function", "train.py(3): main", 0, 9), kernel(3, 1))  # fmt: skip
        with open_trace(path) as trace:
            names = trace.events([Kind.RANGE], ["name"]).name
            assert list(trace.names(names).values()) == ["forward"]

    def test_beginnings_and_ends_are_paired_within_their_thread(self, path: Path) -> None:
        outer, inner = event("user_annotation", "a", 0, 0), event("user_annotation", "b", 2, 0)
        halves = [
            outer | {"ph": "B"},
            inner | {"ph": "B"},
            inner | {"ph": "E", "ts": 4.5, "tid": 9},
            inner | {"ph": "E", "ts": 5},
            outer | {"ph": "E", "ts": 7.25},
            outer | {"ph": "B", "ts": 8},
        ]
        with open_trace(write(path, *halves, kernel(3, 1))) as trace:
            assert since(trace, Kind.RANGE) == [(0, 7250), (2000, 5000)]
            assert sum(trace.quality.dropped.values()) == 2


class TestTheRun:
    def test_rank_cards_and_host_are_those_the_file_names(self, path: Path) -> None:
        write(path, kernel(FIRST, 1), deviceProperties=[{"id": 0, "name": "NVIDIA A100"}],
              distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8},
              host_name="node7")  # fmt: skip
        with open_trace(path) as trace:
            assert trace.processes[0].rank == 3
            assert trace.device(0, 0) == Device(0, 0, UNKNOWN, "NVIDIA A100")
            assert trace.session == Session(
                trace.session.epoch_ns, hosts=frozenset({"node7"}), ranks=frozenset({3}),
                world_size=8,
            )  # fmt: skip

    def test_properties_of_an_unknown_form_are_left_out(self, path: Path) -> None:
        write(path, kernel(1, 1), distributedInfo="none", deviceProperties={"a": 1})
        with open_trace(path) as trace:
            assert trace.processes[0].rank == UNKNOWN

    def test_packed_and_plain_files_are_told_by_their_content(self, tmp_path: Path) -> None:
        plain = write(tmp_path / "plain.txt", kernel(1, 1))
        packed = tmp_path / "packed"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        for path in (plain, packed):
            with open_trace(path) as trace:
                assert trace.source == "kineto"
                assert len(np.asarray(trace.events([Kind.KERNEL], ["start"]).start)) == 1
