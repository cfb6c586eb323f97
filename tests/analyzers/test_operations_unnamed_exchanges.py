"""Exchanges whose kernels have names that say nothing: what else there is shows what they are."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from gputrace.analyzers.operations import OperationClass, read_operations
from gputrace.model.events import Kind
from gputrace.readers.registry import open_trace
from tests.helpers.recordings import CUTS, unpack
from tests.synthetic import Plan, simulate, write_nsys


@pytest.mark.parametrize("recording", CUTS)
def test_exchanges_of_recordings_are_found_under_any_name(recording: str, tmp_path: Path) -> None:
    path = unpack(recording, tmp_path)
    before = _exchanging_ns(path)
    assert before > 1_000_000
    _rename_kernels(path)
    assert _exchanging_ns(path) == pytest.approx(before, rel=0.05)


def test_ranks_that_end_together_exchange(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    plan = Plan(ranks=2, steps=12, kernels_per_step=60, allreduces=4, jitter=0.2)
    write_nsys(simulate(plan), path)
    before = _exchanging_ns(path)
    _rename_kernels(path)
    assert before > 0
    assert _exchanging_ns(path) == before


def test_ranks_that_only_compute_exchange_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    write_nsys(simulate(Plan(ranks=2, steps=12, kernels_per_step=60)), path)
    _rename_kernels(path)
    assert _exchanging_ns(path) == 0


@pytest.mark.parametrize(
    ("ranks", "called", "communicates"),
    [(2, "ncclAllReduce", True), (2, "c10d::allreduce_", False), (1, "ncclAllReduce", False)],
)
def test_copies_that_nccl_issues_are_exchanges(
    ranks: int, called: str, communicates: bool, tmp_path: Path
) -> None:
    """Its copy engines write into memory of other GPUs that the process has mapped; PyTorch's own
    calls also copy within a GPU, and a lone rank copies to itself.
    """
    path = tmp_path / "run.sqlite"
    write_nsys(simulate(Plan(ranks=ranks, steps=6, kernels_per_step=60, allreduces=4)), path)
    before = _exchanging_ns(path)
    shared = "start, end, deviceId, contextId, streamId, correlationId, globalPid"
    of_nccl = "(SELECT id FROM StringIds WHERE value LIKE 'ncclDev%')"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            f"""INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY ({shared}, bytes, copyKind, srcKind, dstKind)
            SELECT {shared}, 4096, 8, 2, 2 FROM {_KERNELS} WHERE demangledName IN {of_nccl};
            DELETE FROM {_KERNELS} WHERE demangledName IN {of_nccl};
            UPDATE StringIds SET value = '{called}' WHERE value = 'ncclAllReduce';"""
        )
    assert _exchanging_ns(path) == 0
    assert before > 0
    assert _exchanging_ns(path, Kind.COPY_D2D) == before * communicates


def _exchanging_ns(path: Path, kind: Kind = Kind.KERNEL) -> int:
    total = 0
    for gpu in read_operations(open_trace(path)):
        exchanges = gpu.classes == OperationClass.COMMUNICATION
        exchanges &= gpu.events.kind == kind
        total += int((gpu.end - gpu.start)[exchanges].sum())
    return total


def _rename_kernels(path: Path) -> None:
    """Give each name of a kernel another one, of random syllables."""
    draw = random.Random(3)
    with sqlite3.connect(path) as connection:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({_KERNELS})")]
        named = [name for name in ("demangledName", "shortName", "mangledName") if name in columns]
        ids = {
            id for name in named for (id,) in connection.execute(f"SELECT {name} FROM {_KERNELS}")
        }
        words = [
            ("".join(draw.choice("bdfgklmprvz") + draw.choice("aeiou") for _ in range(5)), id)
            for id in sorted(ids)
        ]
        connection.executemany("UPDATE StringIds SET value = ? WHERE id = ?", words)


_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
