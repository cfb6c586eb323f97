"""Choice of cures: by the time that their causes take, and by what the program has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gputrace.trials.choice import charge, choose, describe, find_needless
from gputrace.trials.cures import read_candidates

STEP_NS = 1000


def analysis(
    findings: dict[str, int] | None = None,
    ledger: dict[str, int] | None = None,
    phases: dict[str, int] | None = None,
    workers: int | None = None,
) -> Any:
    """A recording of steps of 1,000 ns: costs of findings, charges of causes, times of phases."""
    better = SimpleNamespace(workers=6)
    return SimpleNamespace(
        steps=SimpleNamespace(mean_ns=STEP_NS),
        findings=[SimpleNamespace(id=id, impact_ns=ns) for id, ns in (findings or {}).items()],
        breakdown=[SimpleNamespace(total_ns=10 * STEP_NS)],
        ledger=[SimpleNamespace(cause=id, ns=10 * ns) for id, ns in (ledger or {}).items()],
        step_phases=[
            SimpleNamespace(
                step_ns=10 * STEP_NS,
                phases=[SimpleNamespace(name=name, host_ns=10 * ns) for name, ns in phases.items()],
            )
        ]
        if phases
        else [],
        loader=[]
        if workers is None
        else [SimpleNamespace(workers=workers, better=better, pins_memory=True)],
    )


def program(framework: str = "torch", gpu: str = "", ranks: int = 1, has: str = "") -> Any:
    return SimpleNamespace(
        versions={framework: "2"}, gpu=gpu, ranks=ranks, has=frozenset(has.split()), threads=1
    )


def chosen(analysis: Any, pilot: Any) -> str:
    return ",".join(map(str, choose(analysis, pilot, cores=16)[0]))


def test_cures_are_tried_in_the_order_of_the_time_charged_to_their_causes() -> None:
    lost = {"launch-bound": 200, "garbage-collection": 300, "page-faults": 5}
    order = chosen(analysis({"launch-bound": 900}, lost), program("jax", "H100"))
    assert order == "gc,xla-graphs", "a ledger counts rather than what a finding may cost"
    lost = {"garbage-collection": 100, "launch-bound": 700}
    assert chosen(analysis({}, lost), program("jax", "H100")) == "xla-graphs,gc"


def test_what_a_late_host_costs_others_is_charged_to_what_delays_it() -> None:
    """Of rank 1, whose GPU is idle for want of batches mostly; nothing is known of rank 2."""

    def row(cause: str, of: str, rank: int, ns: int) -> Any:
        return SimpleNamespace(cause=cause, of=of, rank=rank, ns=10 * ns)

    recording = analysis({"late-host": 500})
    recording.ledger = [
        row("late-host", "communication", 1, 400),
        row("data-feeding", "idle", 1, 300),
        row("launch-bound", "idle", 1, 100),
        row("compute-bound", "compute", 1, 100),
        row("late-host", "communication", 2, 50),
        row("launch-bound", "idle", 0, 20),
    ]
    causes = charge(recording).causes
    assert causes["data-feeding"] == pytest.approx(0.3 + 0.4 * 0.75)
    assert causes["launch-bound"] == pytest.approx(0.1 + 0.02 + 0.4 * 0.25)
    assert causes["late-host"] == pytest.approx(0.05)
    del recording.ledger[4]
    assert charge(recording).causes["late-host"] == 0


@pytest.mark.parametrize(("part_ns", "tried"), [(9, ""), (11, "gc")])
def test_what_takes_less_than_a_hundredth_of_a_step_has_no_cure_tried(
    part_ns: int, tried: str
) -> None:
    assert chosen(analysis({"garbage-collection": part_ns}), program("jax")) == tried


def test_without_a_gpu_the_phases_of_the_host_are_the_step() -> None:
    phases = {"forward": 160, "backward": 240, "optimizer": 500}
    charges = charge(analysis(phases=phases))
    fused, compiled, collector = read_candidates("fused,compile,gc")
    assert charges.of(fused) == pytest.approx(0.5)
    assert charges.of(compiled) == pytest.approx(0.4 / 8), "cheaper kernels save an eighth"
    assert charges.of(collector) == 0
    assert charge(analysis({}, {"launch-bound": 10}, phases)).of(fused) == pytest.approx(0.01)
    anomalies = "skip-anomalies"
    assert anomalies in chosen(analysis(phases=phases), program(has="anomalies"))
    assert anomalies not in chosen(analysis(phases=phases), program()), "it does not look for any"


def test_without_a_gpu_findings_have_the_lines_of_what_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main = tmp_path / "train.py"
    main.write_text(
        "def judge(rows):\n    return sum(rows)\n"
        "for step in range(9):\n    optimizer.step()\n    judge([1, 2])\n"
    )
    recording = analysis({"host-work": 300})
    recording.findings[0].evidence = {"line": "train.py:2 judge"}
    assert find_needless(recording, str(main)) == ["train.py:5"]
    recording.findings[0].evidence = {}
    assert find_needless(recording, str(main)) == []


def test_what_the_program_lacks_or_has_already_is_left_out_and_said_in_one_line() -> None:
    starved = analysis({}, {"data-feeding": 400}, workers=8)
    cures, left_out = choose(starved, program(has="loader workers"), cores=16)
    assert [str(cure) for cure in cures if cure.settings[0].cure.id == "workers"] == [
        "workers=6",
        "workers=16",
    ]
    assert left_out["workers=8"] == "it has as many"
    assert "pinned" in left_out, "there is no GPU"
    [line] = describe({"a": "it has one rank", "b": "no GPU", "c": "it has one rank"})
    assert line == "left out: a, c (it has one rank); b (no GPU)"
    assert describe({}) == []


@pytest.mark.parametrize(
    ("finding", "framework", "cures"),
    [
        ("data-feeding", "tensorflow", "tf-parallel,tf-prefetch"),
        ("communication-exposed", "jax", "xla-latency"),
        ("compute-bound", "chainer", ""),
    ],
)
def test_cures_are_for_the_frameworks_that_the_program_has(
    finding: str, framework: str, cures: str
) -> None:
    assert chosen(analysis({finding: 800}), program(framework, "H100")) == cures


def test_copies_that_do_not_wait_are_tried_from_pinned_memory() -> None:
    tried = {
        has: chosen(analysis(ledger={"h2d-pageable": 300}), program(gpu="H100", has=has))
        for has in ("loader", "")
    }
    assert tried == {"loader": "staging,pinned+non-blocking", "": "non-blocking"}
