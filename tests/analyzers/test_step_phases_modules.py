"""Modules of a network: what they and their parts launch, forward and backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.api import Report
from tests.helpers.exports import STEP, global_id
from tests.helpers.handmade import US, Run, analyze
from tests.helpers.kineto import event, kernel, real, write
from tests.helpers.recordings import DATA

REAL: Final = json.loads((DATA / "torch_modules.json").read_text())
"""Two steps of Sequential(Mlp, Mlp, Linear) under PyTorch 2.14's profiler with stacks; an Mlp has
two Linears. The times are of a CPU: each product is given a kernel here."""
BACKWARD: Final = "autograd::engine::evaluate_function: AddmmBackward0"


def launched(number: int, at: float, start: float, length: float, **more: Any) -> list[Any]:
    """A kernel, and the call that launches it, by the thread of the recording."""
    tid = {"tid": REAL[0]["tid"], "pid": REAL[0]["pid"]} | more
    call = event("cuda_runtime", "cudaLaunchKernel", at, 1, args={"correlation": number}, **tid)
    return [call, kernel(start, length, correlation=number)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("modules") / "run.pt.trace.json"
    events, begun = list(REAL), min(e["ts"] for e in REAL)
    for number, e in enumerate(REAL, 1):
        length = {"aten::addmm": 10, BACKWARD: 20}.get(e["name"])
        if length:
            # Far behind the host, as on a busy GPU.
            events += launched(number, e["ts"] + 1, begun + 5_000 + 50 * number, length)
    write(path, *events, deviceProperties=[{"id": 0, "name": "GPU"}])
    with gputrace.open(path) as trace:
        return trace.analyze()


def test_backward_kernels_belong_to_the_modules_that_made_them(report: Report) -> None:
    assert report.steps.count == 2
    rows = {row.path: row for row in report.modules}
    # Products a step: one in each of the five Linears, and one for the gradients of each.
    expected = {"Sequential": (1, 5), "Sequential/Linear": (1, 1), "Sequential/Mlp": (2, 4)}
    expected["Sequential/Mlp/Linear"] = (4, 4)
    assert rows.keys() == expected.keys()
    for path, (instances, products) in expected.items():
        row = rows[path]
        assert row.instances == instances
        assert row.forward_ns == products * 10_000
        assert row.backward_ns == products * 20_000
        assert row.launches == products * 2


def test_the_tree_is_shown_with_its_parts_below_it(report: Report) -> None:
    text = report.render("text")
    assert text.index("· Mlp") < text.index("· · Linear")
    assert "backward" in text[text.index("Modules by the kernels") :]


def test_kernels_of_no_module_are_set_apart_and_all_sum_up(tmp_path: Path) -> None:
    module = {"pid": 1, "tid": 1}
    events = [
        event("python_function", "nn.Module: Net_0", 100, 100, **module),
        event("python_function", "nn.Module: Linear_0", 120, 20, **module),
        *launched(1, 125, 1000, 7, **module),
        *launched(2, 150, 1010, 11, **module),
        *launched(3, 250, 1030, 13, **module),
    ]
    with gputrace.open(write(tmp_path / "run.pt.trace.json", *events)) as trace:
        modules = trace.analyze().modules
    assert [(row.path, row.forward_ns, row.launches) for row in modules] == [
        ("", 13_000, 1),
        ("Net", 18_000, 2),
        ("Net/Linear", 7_000, 1),
    ]


def test_a_real_vision_transformer_has_its_twelve_layers() -> None:
    with gputrace.open(real("tracelens", "tracelens-falconsai.json.gz")) as trace:
        report = trace.analyze()
    layers = next(row for row in report.modules if row.path.endswith("/ViTLayer"))
    assert layers.instances == 12
    whole = sum(row.forward_ns for row in report.modules if "/" not in row.path)
    assert report.kernels is not None
    assert whole == sum(use.total_ns for use in report.kernels.top) + report.kernels.rest_ns
    assert 0.8 * whole < layers.forward_ns < whole


# ---- of a recording ----


def rows_of(report: Report) -> dict[str, tuple[int, int, int, float]]:
    return {
        row.path: (row.instances, row.forward_ns, row.backward_ns, row.launches)
        for row in report.modules
    }


def test_modules_are_means_of_the_steps_in_which_they_were_recorded(tmp_path: Path) -> None:
    run = Run()
    thread, ranges = global_id(100, thread=100), "GPUTRACE_HOST_RANGE"
    run.export.give("GPUTRACE_META", "name", "value").rows["GPUTRACE_META"] = []
    run.export.give(ranges, "start", "end", "globalTid", "nameId", "kind", "number")

    def inside(path: str, backward: int, recorded: bool, name: str, length: int) -> None:
        start = run.now
        run.kernel(length, name)
        name_id = run.export.string(path)
        more = {"globalTid": thread, "nameId": name_id, "kind": 7, "number": backward}
        if recorded:
            run.export.add(ranges, start=start, end=run.now, **more)

    for step in range(20):
        begin, recorded = run.now, step in (12, 13)
        run.input_copy()
        for layer in range(2):
            inside(f"Net_0/Mlp_{layer}", 0, recorded, "forward", 40 * US)
        for layer in (1, 0):
            inside(f"Net_0/Mlp_{layer}", 1, recorded, "backward", 70 * US)
        run.optimizer(1)
        run.synchronize()
        step_row = {"globalTid": thread, "nameId": run.export.string("step"), "step": step}
        run.export.add(STEP, start=begin, end=run.now, **step_row)
    assert rows_of(analyze(run, tmp_path)) == {
        "": (0, 30 * US, 0, 1),
        "Net": (1, 80 * US, 140 * US, 4),
        "Net/Mlp": (2, 80 * US, 140 * US, 4),
    }


@pytest.mark.parametrize("form", ["{}", "{{'Module': '{}', 'TrainableParams': 12}}"])
def test_ranges_named_as_modules_are_modules(tmp_path: Path, form: str) -> None:
    run = Run()
    for step in range(20):
        begin_of_step = run.now
        run.input_copy()
        outer, spans = run.now, []
        for layer in range(3):
            begin = run.now
            run.kernel(10 * US, "norm")
            inner = run.now
            run.kernel(20 * US, "gemm")
            spans += [(inner, run.now, f"model.layers.{layer}.mlp")]
            spans += [(begin, run.now, f"model.layers.{layer}")]
        run.kernel(5 * US, "head")
        for start, end, name in (*spans, (outer, run.now, "model")):
            run.range(start, end, form.format(name))
        run.optimizer(1)
        run.synchronize()
        run.range(begin_of_step, run.now, f"step {step}")
    assert rows_of(analyze(run, tmp_path)) == {
        "": (0, 30 * US, 0, 1),
        "model": (1, 95 * US, 0, 7),
        "model/layers": (3, 90 * US, 0, 6),
        "model/layers/mlp": (3, 60 * US, 0, 3),
    }
