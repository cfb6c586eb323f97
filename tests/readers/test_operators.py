"""FLOPs by shapes: what PyTorch counts itself, and what planted products of known size make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.analyzers.device_metrics import roofline
from gputrace.api import Report
from gputrace.model.events import Kind
from gputrace.readers.operators import Call, CallWork, work_of
from gputrace.readers.registry import open_trace
from tests.helpers import command
from tests.helpers.kineto import event, kernel, real, write
from tests.helpers.recordings import DATA

COUNTED: Final = json.loads((DATA / "flop_counter.json").read_text())
H100: Final = "NVIDIA H100 80GB HBM3"
GEMM: Final = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"
BF16: Final = ["c10::BFloat16", "c10::BFloat16"]
MM_FLOP: Final = 2 * 4096**3


@pytest.mark.parametrize("model", list(COUNTED))
def test_flops_of_a_training_step_are_those_of_pytorchs_flop_counter(
    model: str, tmp_path: Path
) -> None:
    """The operators are PyTorch 2.14's own, with their shapes, nested as it nests them."""
    events = COUNTED[model]["events"]
    path = write(tmp_path / "run.pt.trace.json", *events, kernel(events[0]["ts"], 1000))
    with open_trace(path) as trace:
        operators = trace.events([Kind.OPERATOR], ("correlation",))
        assert int(operators.correlation.sum()) == COUNTED[model]["flop"]


@pytest.mark.parametrize(
    ("name", "shapes", "types", "values", "work"),
    [
        # Read 2 x 3 and 3 x 4, written 2 x 4, of two bytes each.
        ("aten::mm", [[2, 3], [3, 4]], BF16, ["", ""], CallWork(48, 2 * (6 + 12 + 8))),
        # 2 heads: scores of 5 x 7 for vectors of 8, then values of 8; two groups share a key.
        (
            "aten::scaled_dot_product_attention",
            [[1, 2, 5, 8], [1, 1, 7, 8], [1, 1, 7, 8]],
            [],
            ["", "", ""],
            CallWork(2 * 2 * 5 * 7 * (8 + 8), 0),
        ),
        # A fused backward pass computes the scores again: five products in place of two.
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            [[1, 2, 5, 8], [1, 2, 5, 8], [1, 2, 7, 8], [1, 2, 7, 8]],
            [],
            [],
            CallWork(2 * 2 * 5 * 7 * 8 * 5, 0),
        ),
        # Experts: each of 6 rows meets one of the 3 matrices.
        ("aten::_grouped_mm", [[6, 4], [3, 4, 5]], [], [], CallWork(2 * 6 * 4 * 5, 0)),
        # Both are read, the row for all: 8 x 4 and 4 elements of 4 bytes, and 8 x 4 written.
        ("aten::add", [[8, 4], [4], []], ["float", "float", "Scalar"], [], CallWork(0, 272)),
        # What is overwritten is not read: 8 x 4 of 4 bytes read, as many of 2 bytes written.
        ("aten::copy_", [[8, 4], [8, 4]], ["c10::BFloat16", "float"], [], CallWork(0, 192)),
        ("aten::sum", [[8, 4]], ["float"], [], CallWork(0, 128)),
        # The tensor of ``out=`` is written, not read.
        ("aten::mul", [[8, 4], [], [8, 4]], ["float", "Scalar", "float"], [], CallWork(0, 256)),
        ("aten::add", [[8, 4], [4], [], [8, 4]], ["float"] * 4, [], CallWork(0, 272)),
        ("aten::sum", [[8, 4], [], [], [], [8]], ["float"] * 5, [], CallWork(0, 128)),
        # A mask of one byte chooses among two of four: 13 bytes an element.
        ("aten::where", [[8, 4]] * 3, ["bool", "float", "float"], [], CallWork(0, 13 * 32)),
        ("aten::mul", [[1], [8, 4]], ["double", "float"], [], CallWork(0, 8 + 128 + 128)),
        ("aten::add", [[8, 4], [4]], ["float", "a type of 2031"], [], None),
        ("aten::add", [[], []], ["Scalar", "Scalar"], [], None),
        ("aten::mm", [[2, 3]], [], [], None),
        ("aten::mm", "no list", [], [], None),
        ("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], [], [], None),
    ],
)
def test_work_is_counted_by_hand(
    name: str, shapes: Any, types: list[str], values: list[str], work: CallWork | None
) -> None:
    assert work_of(name, Call(shapes, types, values)) == work


def trained(path: Path, known_ms: int, unknown_ms: int = 0, size: int = 4096) -> Report:
    """Steps of 10 ms with one product of known shapes, and maybe one by an operator of unknown."""
    events = []
    for step in range(12):
        at = 10_000.0 * step
        events.append(event("user_annotation", f"ProfilerStep#{step}", at, 9_990))
        shapes = {"Input Dims": [[size, size]] * 2, "Input type": BF16, "Concrete Inputs": ["", ""]}
        operators = [("aten::mm", GEMM, known_ms, shapes), ("mine::mm", GEMM, unknown_ms, {})]
        for number, (name, product, length, args) in enumerate(operators):
            launched = at + 100 * number
            link = 100 * step + 10 * number + 1
            events.append(event("cpu_op", name, launched, 60, args=args))
            call = {"args": {"correlation": link}}
            events.append(event("cuda_runtime", "cudaLaunchKernel", launched + 20, 5, **call))
            start = at + 200 + 1000 * known_ms * number
            if length:
                events.append(kernel(start, 1000 * length, product, correlation=link))
        copied = {"args": {"correlation": 100 * step + 50}}
        events.append(event("cuda_runtime", "cudaLaunchKernel", at + 9_000, 5, **copied))
        events.append(kernel(at + 9_100, 800, "elementwise_kernel", correlation=100 * step + 50))
    write(path, *events, deviceProperties=[{"id": 0, "name": H100}])
    with gputrace.open(path) as trace:
        return trace.analyze()


def test_mfu_is_the_flops_of_a_step_by_its_time_and_the_peak(tmp_path: Path) -> None:
    report = trained(tmp_path / "run.pt.trace.json", known_ms=4)
    (row,) = report.throughput
    assert row.flop_per_step == pytest.approx(MM_FLOP)
    assert (row.flop_source, row.samples_per_step) == ("shapes", None)
    # 0.137 TFLOP in 10 ms, of 989 TFLOP/s; the lengths of steps are the GPU's.
    assert row.mfu == pytest.approx(MM_FLOP / 10e-3 / 989e12, rel=0.02)
    assert report.kernels is not None
    use = next(use for use in report.kernels.top if use.family == "gemm")
    assert use.roofline is not None
    assert use.roofline.flop_per_s == pytest.approx(MM_FLOP / 4e-3)
    # 2 * 4096^3 operations for three matrices of 2 bytes: 1365 each byte, far above 989 / 3.35.
    assert (use.roofline.flop_per_byte, use.roofline.limit) == (1365.33, "compute")
    assert "by the shapes of operators" in report.render("text")


def test_flops_that_are_next_to_nothing_of_the_peak_have_no_mfu(tmp_path: Path) -> None:
    (row,) = trained(tmp_path / "run.pt.trace.json", known_ms=4, size=512).throughput
    # 0.27 GFLOP in 10 ms: 0.003 % of 989 TFLOP/s.
    assert (row.flop_per_step, row.mfu, row.peak_flop_per_s) == (2 * 512**3, None, None)


def test_kernels_that_only_move_their_operands_have_a_bandwidth(tmp_path: Path) -> None:
    events = []
    shapes = {"Input Dims": [[1 << 28], [1 << 28]], "Input type": ["float", "float"]}
    for step in range(12):
        at, link = 10_000.0 * step, {"args": {"correlation": step + 1}}
        events.append(event("user_annotation", f"ProfilerStep#{step}", at, 9_990))
        events.append(event("cpu_op", "aten::add", at, 60, args=shapes))
        events.append(event("cuda_runtime", "cudaLaunchKernel", at + 20, 5, **link))
        events.append(kernel(at + 100, 2_000, "elementwise_kernel", correlation=step + 1))
    path = write(
        tmp_path / "run.pt.trace.json", *events, deviceProperties=[{"id": 0, "name": H100}]
    )
    with gputrace.open(path) as trace:
        report = trace.analyze()
    assert report.kernels is not None
    line = report.kernels.top[0].roofline
    assert line is not None
    # 3 GiB in 2 ms, of 3.35 TB/s.
    assert line.bytes_per_s == pytest.approx(3 * (1 << 30) / 2e-3)
    assert (line.flop_per_s, line.limit) == (0, "memory")
    assert line.of_limit == pytest.approx(1.61 / 3.35, abs=0.001)
    shown = report.render("markdown")
    assert "| 1,611 GB/s | 48% memory |" in shown
    told = command.gputrace("kernel", path, "1")
    assert "1,611 GB/s at least" in told.out
    assert "48% of the memory's peak" in told.out
    assert report.throughput == (), "moving makes no FLOPs"


def test_without_the_shapes_of_all_products_there_is_no_mfu(tmp_path: Path) -> None:
    report = trained(tmp_path / "run.pt.trace.json", known_ms=3, unknown_ms=2)
    assert report.kernels is not None
    (counted,) = report.kernels.flop
    assert counted.known == pytest.approx(0.6, abs=0.01)
    assert report.throughput == ()
    use = next(use for use in report.kernels.top if use.family == "gemm")
    assert use.roofline is not None, "the launches that are known have a speed"
    assert use.roofline.flop_per_s == pytest.approx(MM_FLOP / 3e-3)


def test_a_kernel_that_moves_much_for_what_it_computes_is_bound_by_memory() -> None:
    line = roofline(flop=1e12, traffic=1e11, time_ns=10**8, precision="bf16", card=H100)
    # 10 operations a byte, and 3.35 TB/s: 33.5 TFLOP/s at most; it makes 10.
    assert (line.limit, line.limit_flop_per_s) == ("memory", 33.5e12)
    assert line.of_limit == pytest.approx(10 / 33.5, abs=1e-4)
    assert roofline(1e12, 1e11, 10**8, "bf16", "a card of 2031").of_limit is None


def test_the_work_of_a_real_inference_is_that_of_its_model(tmp_path: Path) -> None:
    """A ViT-B/16 of four pictures: 35.1 GFLOP each."""
    path = real("tracelens", "tracelens-falconsai.json.gz")
    with gputrace.open(path) as trace:
        kernels = trace.analyze().kernels
    assert kernels is not None
    (counted,) = kernels.flop
    assert counted.flop == pytest.approx(4 * 35.127e9, rel=0.001)
    assert counted.known > 0.99
    told = command.gputrace("kernel", path, next(u.short for u in kernels.top if u.roofline))
    assert told.code == 0
    assert "TFLOP/s to which" in told.out
