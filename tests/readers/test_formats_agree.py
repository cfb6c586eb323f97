"""One run gives one answer, whoever recorded it: all that the JSON tells, of random runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from tests.helpers.examples import few
from tests.synthetic import (
    Plan,
    Recording,
    random_plan,
    simulate,
    write_kineto,
    write_nsys,
    write_nvprof,
)
from tests.synthetic.kineto import PLAIN

MANY_GAPS: Final = 60
RANGES: Final = ("step", "data")

TOLD_BY_SOME: Final = {
    "source", "path", "paths", "origin_ns", "host", "name", "rank_known", "gpu_known", "warnings",
    "thread",
}  # fmt: skip
"""Who recorded it, and names of machines and cards, which some formats have."""
MOMENTS: Final = {"start_ns", "end_ns", "time_ns"}
THREAD: Final = re.compile(r"\(thread -?\d+\)")
"""nvprof's are addresses, cut to 32 bits."""

PLANS: Final = {
    **{f"random {seed}": random_plan(seed) for seed in (4, 14, 38, 49, 11, 23, 53, 59)[: few(2)]},
    "late rank": Plan(ranks=4, allreduces=3, late_host_rank=2, late_host_ns=4_000_000),
    "slow rank": Plan(ranks=3, allreduces=2, slow_rank=1, slow_factor=1.3, data_wait_ns=3_000_000),
    "phases": Plan(
        ranks=2, allreduces=1, validation_after=(9,), validation_batches=4, checkpoint_after=(14,)
    ),
    "DataParallel": Plan(gpus_per_process=3, allocs_per_step=2),
    "parameter server": Plan(gpus_per_process=4, exchange="gpu-server", peer_access=False),
    "pageable": Plan(pageable=True, sync_every_step=True, data_wait_ns=2_000_000),
}


@pytest.fixture(scope="module", params=list(PLANS))
def recording(request: pytest.FixtureRequest) -> Recording:
    """A short run; no format but nsys's keeps a CUDA graph as one operation and its name."""
    plan = PLANS[request.param]
    steps = min(plan.steps, 18)
    return simulate(
        replace(
            plan,
            steps=steps,
            kernels_per_step=min(plan.kernels_per_step, 40),
            validation_after=tuple(step for step in plan.validation_after if step < steps),
            checkpoint_after=tuple(step for step in plan.checkpoint_after if step < steps),
            graph=False,
        )
    )


def told(*paths: Path) -> dict[str, Any]:
    """The JSON, without what only some formats tell; moments from the first operation on."""
    with gputrace.open(*paths) as trace:
        document = json.loads(trace.analyze(gaps=MANY_GAPS).render("json"))
    start = min(gpu["start_ns"] for gpu in document["gpus"])
    found: dict[str, Any] = _plain(document, start)
    return found


def _plain(value: Any, start: int) -> Any:
    if isinstance(value, dict):
        return {
            key: _moved(one, start) if key in MOMENTS else _plain(one, start)
            for key, one in value.items()
            if key not in TOLD_BY_SOME
        }
    if isinstance(value, list):
        return [_plain(one, start) for one in value]
    return THREAD.sub("", value) if isinstance(value, str) else value


def _moved(moment: Any, start: int) -> Any:
    if isinstance(moment, list):
        return [one - start for one in moment]
    return None if moment is None else moment - start


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Where two documents differ, and how."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif one != other:
        yield f"{place}: {str(one)[:100]} and {str(other)[:100]}"


@pytest.mark.parametrize("ranges", [(), RANGES], ids=["silent", "annotated"])
def test_breakdown_gaps_findings_and_all_else_are_equal(
    recording: Recording, ranges: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "kineto").mkdir()
    annotations = {name: PLAIN[name] for name in ranges}
    path = tmp_path / "run.sqlite"
    write_nsys(recording, path, osrt=False, nvtx=ranges, with_device_table=False)
    nsys = told(path)
    kineto = told(*write_kineto(recording, tmp_path / "kineto", annotations=annotations))
    nvprof = told(*write_nvprof(recording, tmp_path / "nvprof", nvtx=ranges))
    assert len(nsys["gaps"]["largest"]) > 50
    assert nsys["findings"]
    assert list(differences(nsys, kineto)) == []
    if recording.plan.isolated:
        # nvprof names no machine, and these files no card in common: no link joins them.
        assert nvprof["links"] == []
        nvprof["links"] = nsys["links"]
    assert list(differences(nsys, nvprof)) == []
