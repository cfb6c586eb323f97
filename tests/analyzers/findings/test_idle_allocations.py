"""Memory that torch's allocator takes and gives back in steady steps, as torch counts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from gputrace.api import Report
from tests.analyzers.findings.test_host_threads import COUNTERS, PID, counted, the, with_counters
from tests.helpers.exports import Export, global_id
from tests.helpers.handmade import ADAM, MS, US, Run, analyze
from tests.helpers.sentences import words_of

GB: Final = 10**9
STEPS: Final = 40
PERIOD: Final = 10 * MS


def trained(folder: Path, calls: int = 2, **of_step: int) -> Report:
    """Steps of 10 ms on a GPU that waits 1 ms for each call that allocates, with torch's counts."""
    run = Run(pid=PID)
    for step in range(STEPS):
        run.now = step * PERIOD
        run.kernel(6 * MS, "void at::native::gemm")
        run.synchronize()
        for _ in range(calls):
            run.allocate(MS)
        run.kernel(500 * US, ADAM)
    counted(with_counters(run.export), {"on core": 5 * MS}, {})
    names = {name: name.replace("_", " ") for name in of_step}
    for name, value in of_step.items():
        for step in range(STEPS):
            end = (step + 1) * PERIOD
            start = end if name.startswith("memory") else step * PERIOD + 1
            add(run.export, names[name], start, end, value)
    return analyze(run, folder)


def add(export: Export, name: str, start: int, end: int, value: int) -> None:
    who = {"globalTid": global_id(PID, thread=PID), "nameId": export.string(name)}
    export.add(COUNTERS, start=start, end=end, value=value, **who)


HELD: Final = {"memory_reserved": 70 * GB, "memory_allocated": 50 * GB}


def test_memory_that_runs_out_in_fragments_wants_segments_that_grow(tmp_path: Path) -> None:
    report = trained(tmp_path, allocation_retries=1, segments=1, memory_split=15 * GB, **HELD)
    found = the(report, "alloc-stall")
    assert "torch ran out of memory" in words_of(found)
    assert "70 GB reserved, of which 15 GB are unused fragments" in words_of(found)
    assert found.advice.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or max_split")
    (own,) = report.allocators
    assert (own.retries, own.segments) == (own.steps, own.steps)
    assert found.evidence["retries"] == own.retries


def test_memory_that_runs_out_whole_wants_less_of_it(tmp_path: Path) -> None:
    found = the(trained(tmp_path, allocation_retries=1, memory_split=GB, **HELD), "alloc-stall")
    assert found.advice.startswith("use less memory")


def test_a_cache_that_is_emptied_is_named(tmp_path: Path) -> None:
    report = trained(
        tmp_path, cache_emptied=1, segments=3, segments_freed=3, segment_bytes=600_000_000, **HELD
    )
    found = the(report, "alloc-stall")
    assert "torch.cuda.empty_cache() is called" in words_of(found)
    assert "segments of 200 MB are allocated again" in words_of(found)
    assert found.advice.startswith("take torch.cuda.empty_cache()")


def test_segments_that_are_new_in_steady_steps_have_their_size(tmp_path: Path) -> None:
    found = the(trained(tmp_path, segments=2, segment_bytes=64_000_000, **HELD), "alloc-stall")
    assert "new segments of 32 MB" in words_of(found)
    assert "tensors" not in words_of(found)
    assert "pad to the longest" in found.advice


def test_segments_are_named_by_what_they_are_taken_for(tmp_path: Path) -> None:
    report = trained(tmp_path, segments=2, segment_request=21_000_000, **HELD)
    found = the(report, "alloc-stall")
    assert words_of(found).endswith("; segments are allocated for tensors of 21 MB")
    assert found.evidence["request_bytes"] == 21_000_000


def test_without_counts_or_with_none_that_rise_no_reason_is_given(tmp_path: Path) -> None:
    for values in ({}, HELD):
        found = the(trained(tmp_path, **values), "alloc-stall")
        assert "torch" not in words_of(found)
        assert found.advice.startswith("keep memory allocated")


def test_an_allocator_that_asks_for_nothing_is_no_finding(tmp_path: Path) -> None:
    report = trained(tmp_path, 0, **HELD)
    assert "alloc-stall" not in {found.id for found in report.findings}
    (row,) = json.loads(report.render("json"))["allocators"]
    assert (row["retries"], row["segments"], row["peak_bytes"]) == (0, 0, None)
    assert (row["allocated_bytes"], row["reserved_bytes"]) == (50 * GB, 70 * GB)
