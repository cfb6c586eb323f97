"""Cures: which fit findings and programs, and what predictions say of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gputrace.trials.cures import (
    Prediction,
    all_cures,
    combine,
    predict,
    read_candidates,
)
from tests.helpers.installed_packages import install
from tests.helpers.tried_programs import PROGRAM, Real


def test_a_plugins_cure_changes_what_its_file_says(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = real.folder / "hook.py"
    hook.write_text(
        "def patches(value):\n"
        "    def plant(module): module.planted = value\n"
        "    return {'torch.utils.data.dataloader': plant}\n"
    )
    module = (
        "from pathlib import Path\nfrom gputrace.extend import Cure\n"
        f"it = Cure('planted', 'a name in a module', hook=Path({str(hook)!r}))\n"
    )
    entries = {"gputrace.cures": {"planted": "cures_of_others:it"}}
    install(real.folder, "their-package", entries, {"cures_of_others": module})
    monkeypatch.syspath_prepend(real.folder)
    all_cures.cache_clear()
    try:
        run = real.run("planted", "from torch.utils.data.dataloader import planted\n" + PROGRAM)
    finally:
        all_cures.cache_clear()
    assert [change.cure for change in run.changes] == ["planted"]


def test_cures_that_exclude_each_other_are_not_combined() -> None:
    together = combine(read_candidates("workers=8,fused,foreach,workers=4,pinned+gc"))
    assert str(together) == "workers=8+fused+pinned+gc"


def test_variables_join_what_the_environment_has_where_they_should() -> None:
    [candidate] = read_candidates("expandable+threads=2+xla-latency")
    inherited = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "OMP_NUM_THREADS": "9"}
    changed = candidate.environment(inherited)
    assert changed["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
    assert changed["OMP_NUM_THREADS"] == "2"
    assert changed["XLA_FLAGS"] == "--xla_gpu_enable_latency_hiding_scheduler=true"


def test_every_finding_and_prediction_that_a_cure_names_is_one() -> None:
    from gputrace.analyzers.findings import ALL_RULES
    from gputrace.analyzers.whatif.optimizations import CURES as EFFECTS

    findings = {rule.__name__.replace("_", "-") for rule in ALL_RULES}
    for cure in all_cures().values():
        assert findings.issuperset(cure.findings)
        assert {effect.id for effect in EFFECTS}.issuperset(cure.predictions)


def test_a_finding_that_a_cure_removes_foretells_its_step() -> None:
    finding = SimpleNamespace(id="layout-transposes", impact_ns=25)
    steps = SimpleNamespace(mean_ns=100)
    analysis: Any = SimpleNamespace(
        loader=(), step_phases=(), what_if=(), findings=(finding,), steps=steps
    )
    layout, precision = read_candidates("channels-last,bf16")
    assert predict(layout, analysis) == Prediction(0.75)
    assert predict(precision, analysis) is None


def test_a_cure_of_some_phases_saves_the_launches_in_them() -> None:
    """Of a step of 40, the GPU waits 30 for launches: 20 in the optimizer, 9 in the model."""
    phases = [
        SimpleNamespace(name=name, host_ns=host, launch_ns=launch)
        for name, host, launch in (
            ("forward", 4, 3),
            ("backward", 8, 6),
            ("optimizer", 26, 20),
            ("other", 2, 1),
        )
    ]
    effect = SimpleNamespace(id="graphs", now_ns=40, step_ns=10, low_ns=8, high_ns=20)
    analysis: Any = SimpleNamespace(
        loader=(),
        step_phases=[SimpleNamespace(step_ns=40, phases=phases)],
        what_if=[effect],
        findings=(),
    )
    model, optimizer, whole = read_candidates("graphs,fused,xla-graphs")
    whole_step = predict(whole, analysis)
    assert whole_step is not None
    assert whole_step.ratio == pytest.approx(10 / 40)
    foretold = predict(model, analysis)
    assert foretold is not None
    assert foretold.ratio == pytest.approx(1 - 0.75 * 9 / 30)
    assert foretold.middle == pytest.approx(1 - 0.65 * 9 / 30)
    assert predict(optimizer, analysis) == Prediction(1 - 20 / 40, 1 - 26 / 40, 1.0)


def test_of_several_ranks_the_one_that_waits_longest_foretells_workers() -> None:
    def loader(wait: int, step: int) -> SimpleNamespace:
        choices = [SimpleNamespace(workers=4, step_ns=step)]
        now = SimpleNamespace(step_ns=30)
        return SimpleNamespace(
            wait_ns=wait, now=now, predictions=choices, prefetch_factor=2, doubled_step_ns=29
        )

    analysis: Any = SimpleNamespace(loader=[loader(2, 25), loader(12, 20)])
    workers, deeper, as_deep = read_candidates("workers=4,prefetch=4,prefetch=2")
    assert predict(workers, analysis) == Prediction(20 / 30)
    assert predict(deeper, analysis) == Prediction(29 / 30)
    analysis.step_phases, analysis.what_if, analysis.findings = (), (), ()
    analysis.steps = SimpleNamespace(mean_ns=30)
    assert predict(as_deep, analysis) is None
