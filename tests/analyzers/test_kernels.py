"""The kernels of the measured steps: how often, how long, on which GPU, and what to say of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gputrace.analyzers.kernel_names import FAMILIES
from gputrace.api import Report
from gputrace.model.kernels import Kernels, KernelUse
from tests.analyzers.test_generated_training import run
from tests.helpers.examples import few
from tests.helpers.handmade import ADAM, MS, US, Run, analyze, ids
from tests.helpers.lookups import finding_of
from tests.helpers.sentences import words_of
from tests.synthetic import Kind, Plan

SGEMM = "volta_sgemm_128x64_nn"
TENSOR = "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_nn"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar>(T1)"
TURN = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(T1)"
SUMS = "void (anonymous namespace)::indexing_backward_kernel<float, 4>(long const*, float*)"
BY_INDEX = "in kernels that gather or add by index"
STEPS = 20


def training(*kernels: tuple[str, int], card: str = "", gpu1: bool = False) -> Run:
    """Steps of a copy of 300 µs, the kernels and two of the optimizer of 30 µs, without gaps."""
    run = Run()
    for _ in range(STEPS):
        run.input_copy()
        for name, length in kernels:
            run.kernel(length, name)
        run.optimizer(2)
        if gpu1:
            run.device = 1
            run.kernel(100 * US, SGEMM)
            run.device = 0
    if card:
        run.export.add("TARGET_INFO_GPU", id=0, name=card, busLocation="0000:01:00.0", cuDevice=0)
        run.export.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=100)
    return run


def kernels_of(report: Report) -> Kernels:
    assert report.kernels is not None
    return report.kernels


def use_of(report: Report, name: str) -> KernelUse:
    return next(use for use in kernels_of(report).top if use.name == name)


def test_a_kernel_is_counted_over_the_measured_steps(tmp_path: Path) -> None:
    report = analyze(training((TENSOR, 600 * US), (TENSOR, 200 * US), (TENSOR, 400 * US)), tmp_path)
    steady = report.steps.steady_count
    use = use_of(report, TENSOR)
    assert (use.count, use.median_ns, use.max_ns) == (3 * steady, 400 * US, 600 * US)
    assert use.total_ns == steady * 1200 * US
    assert use.share == pytest.approx(use.total_ns / report.breakdown[0].total_ns, abs=1e-6)
    assert (use.family, use.tensor_cores) == ("gemm", "yes")
    assert use_of(report, ADAM).count == 2 * steady


def test_the_longest_launch_has_its_place(tmp_path: Path) -> None:
    _, report = run(tmp_path, Plan(steps=20))
    longest = kernels_of(report).longest
    assert longest.duration_ns == max(use.max_ns for use in kernels_of(report).top)
    assert longest.duration_ns == use_of(report, longest.name).max_ns
    (its,) = (
        step
        for step in report.step_list
        if (step.gpu, step.rank) == (longest.gpu, longest.rank)
        and step.start_ns <= longest.start_ns < step.end_ns
    )
    assert (longest.step, its.phase) == (its.step, "steady")
    at = f"{(longest.start_ns - report.origin_ns) / 1e9:.6f} s in step {its.step}"
    assert at in " ".join(report.render("text").split())


def test_where_the_longest_launch_communicates_so_has_the_longest_that_computes(
    tmp_path: Path,
) -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    many = [(f"kernel_{n}", 50 * US) for n in range(60) for _ in range(3)]
    report = analyze(training(*many, ("rare", 120 * US), (nccl, 130 * US)), tmp_path)
    kernels = kernels_of(report)
    assert kernels.longest_compute is not None
    assert (kernels.longest.name, kernels.longest_compute.name) == (nccl, "rare")
    assert kernels.longest_compute.duration_ns == 120 * US
    its = f"{(kernels.longest_compute.start_ns - report.origin_ns) / 1e9:.6f} s"
    shown = " ".join(report.render("text").split())
    assert f"; longest that computes: rare, 120 µs at {its} in step " in shown
    assert {nccl, "rare"} <= {use.name for use in kernels.top}
    assert len(kernels.top) == 50


def test_each_gpu_that_runs_a_kernel_is_told_and_what_the_first_one_runs_alone(
    tmp_path: Path,
) -> None:
    report = analyze(training((SGEMM, 300 * US), (TENSOR, 200 * US), gpu1=True), tmp_path)
    steady = report.steps.steady_count
    shared = use_of(report, SGEMM)
    assert [(own.gpu, own.count, own.median_ns, own.max_ns) for own in shared.by_gpu] == [
        (0, steady, 300 * US, 300 * US),
        (1, steady, 100 * US, 100 * US),
    ]
    assert shared.total_ns == sum(own.total_ns for own in shared.by_gpu)
    assert [use.name for use in kernels_of(report).first_gpu_only] == [TENSOR, ADAM]


def test_one_gpu_runs_nothing_that_others_lack(tmp_path: Path) -> None:
    assert kernels_of(analyze(training((SGEMM, 300 * US)), tmp_path)).first_gpu_only == ()


def test_a_gpu_that_is_only_touched_does_not_dilute_the_shares(tmp_path: Path) -> None:
    run = training((SGEMM, 500 * US))
    alone = kernels_of(analyze(run, tmp_path))
    run.device = 1
    run.memset()
    run.wait(900 * MS)
    run.memset()
    both = kernels_of(analyze(run, tmp_path))
    assert both.total_ns == alone.total_ns
    assert both.top[0].share == alone.top[0].share


def test_the_list_is_bounded_and_the_rest_is_summed(tmp_path: Path) -> None:
    report = analyze(training(*((f"kernel_{n}", 50 * US) for n in range(70))), tmp_path)
    found = kernels_of(report)
    assert (len(found.top), found.distinct) == (50, 71)
    assert found.count == sum(use.count for use in found.top) + found.rest_count
    assert found.rest_ns == 21 * 50 * US * report.steps.steady_count


def test_the_longest_launch_is_listed_however_rare_its_kernel(tmp_path: Path) -> None:
    often = [(f"kernel_{n}", 50 * US) for n in range(60) for _ in range(3)]
    report = analyze(training(*often, ("rare", 120 * US)), tmp_path)
    kernels = kernels_of(report)
    last = kernels.top[-1]
    assert (len(kernels.top), last.name, last.max_ns) == (50, "rare", 120 * US)
    assert kernels.count == sum(use.count for use in kernels.top) + kernels.rest_count
    assert kernels.rest_ns == (11 * 150 + 60) * US * report.steps.steady_count
    assert "| rare | other | 1 | 120 µs | 120 µs | 120 µs |" in report.render("markdown")


def test_tiny_kernels_and_the_delay_of_a_launch_are_measured(tmp_path: Path) -> None:
    run = Run()
    for _ in range(STEPS):
        run.input_copy(length=20 * US)
        for _ in range(30):
            run.kernel(2 * US, "tiny")
        run.optimizer()
        run.synchronize()
    report = analyze(run, tmp_path)
    assert "91% of the kernels take less than 5.00 µs" in words_of(
        finding_of(report, "launch-bound")
    )
    launches = kernels_of(report).launches
    assert launches.tiny_count == 30 * report.steps.steady_count
    assert launches.tiny_ns == launches.tiny_count * 2 * US
    assert (launches.call_ns, launches.latency_ns) == (5 * US, 2500)


def test_fp32_products_are_told_where_the_card_has_tensor_cores(tmp_path: Path) -> None:
    report = analyze(training((SGEMM, 500 * US), (TENSOR, 500 * US), card="Tesla T4"), tmp_path)
    found = finding_of(report, "no-tensor-cores")
    assert found.severity == "medium"
    assert found.evidence["touched_ns"] == found.evidence["on_tensor_cores_ns"] == 500 * US
    assert found.impact_ns == 250 * US
    assert "float16" in found.advice
    assert "TF32" not in found.advice
    newer = analyze(training((SGEMM, 500 * US), card="NVIDIA A100-SXM4-80GB"), tmp_path)
    assert "TF32" in finding_of(newer, "no-tensor-cores").advice


@pytest.mark.parametrize(
    ("in_tf32", "is_on"),
    [("sm80_xmma_fprop_implicit_gemm_tf32f32_f32", True), ("sm80_xmma_gemm_tf32f32_f32", False)],
)
def test_tf32_is_not_advised_where_it_is_on_for_that_kind(
    tmp_path: Path, in_tf32: str, is_on: bool
) -> None:
    """The library chooses fp32 for convolutions of some sizes."""
    convolution, product = "_5x_cudnn_ampere_scudnn_128x32_relu_small_nn_v1", (SGEMM, 20 * US)
    run = training((convolution, 500 * US), product, (in_tf32, 100 * US), card="NVIDIA A100")
    advice = finding_of(analyze(run, tmp_path), "no-tensor-cores").advice
    assert ("TF32" in advice) is not is_on


def test_products_of_unsuitable_sizes_are_told_though_tensor_cores_multiply(tmp_path: Path) -> None:
    odd = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(T1)"
    report = analyze(training((odd, 500 * US), (TENSOR, 500 * US), card="NVIDIA H200"), tmp_path)
    found = finding_of(report, "no-tensor-cores")
    assert found.evidence["unaligned_ns"] == found.evidence["touched_ns"] == 500 * US
    assert "not multiples of 8" in found.message
    assert "multiples of 8" in found.advice


@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA GeForce GTX 1080 Ti"])
def test_products_in_fp64_are_told_on_any_card_if_the_program_trains(
    tmp_path: Path, card: str
) -> None:
    double = "cutlass_80_tensorop_d884gemm_64x32_16x4_tn_align1"
    run = training((double, 800 * US), (TENSOR, 100 * US), card=card)
    report = analyze(run, tmp_path)
    found = report.findings[0]
    assert found.id == "double-precision"
    assert (found.evidence["fp64_ns"], found.impact_ns) == (800 * US, 400 * US)
    assert "fp32" in found.advice
    assert "no-tensor-cores" not in ids(report)
    alone = Run()
    alone.kernels(50, double, MS)
    assert "double-precision" not in ids(analyze(alone, tmp_path))


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (RELU, "in element-wise kernels and reductions"),
        (ADAM, "in the optimizer"),
        (TENSOR, ""),
        (SUMS, BY_INDEX),
    ],
)
def test_a_limit_by_the_cards_says_what_they_spend_most_on(
    tmp_path: Path, kernel: str, words: str
) -> None:
    found = finding_of(analyze(training((kernel, 3 * MS)), tmp_path), "compute-bound")
    assert found.message.endswith(f"% of it {words}" if words else "its speed is the limit")


def test_without_steps_products_and_layouts_cost_what_they_take_on_a_gpu(tmp_path: Path) -> None:
    run = Run()
    for run.device in (0, 1):
        run.kernel(500 * US, SGEMM)
        run.kernel(300 * US, RELU)
        run.kernel(200 * US, TURN)
        run.export.card(run.device, f"0000:0{run.device}:00.0", "Tesla T4")
        run.export.ordinal(100, run.device, run.device)
    report = analyze(run, tmp_path)
    assert kernels_of(report).steps == 0
    products, layouts = (finding_of(report, id) for id in ("no-tensor-cores", "layout-transposes"))
    assert products.evidence["touched_ns"] == 500 * US
    assert "take 50% of the time (500 µs of 1.00 ms)" in products.message
    assert layouts.impact_ns == 200 * US


@pytest.mark.parametrize("card", ["Tesla P100-PCIE-16GB", "NVIDIA GeForce GTX 1080 Ti"])
def test_a_card_without_tensor_cores_gets_no_such_advice(tmp_path: Path, card: str) -> None:
    report = analyze(training((SGEMM, 500 * US), card=card), tmp_path)
    assert kernels_of(report).has_tensor_cores is False
    assert "no-tensor-cores" not in ids(report)


def test_a_few_fp32_products_are_not_worth_a_word(tmp_path: Path) -> None:
    report = analyze(training((SGEMM, 20 * US), (TENSOR, MS), card="NVIDIA H100"), tmp_path)
    assert "no-tensor-cores" not in ids(report)


def test_products_in_fp32_take_a_part_of_the_ratio_of_the_peaks(tmp_path: Path) -> None:
    """An H100 multiplied 6.5 times as fast in TF32 as in FP32, and 11 times in bf16."""
    run = training((SGEMM, 4 * MS), (RELU, MS), card="NVIDIA H100 80GB HBM3")
    cures = {cure.id: cure for cure in analyze(run, tmp_path).what_if}
    others = cures["tf32"].now_ns - 4 * MS
    for precision, faster in (("tf32", 6.5), ("bf16", 11)):
        cure, true = cures[precision], others + 4 * MS / faster
        assert cure.finding == "no-tensor-cores"
        assert cure.low_ns <= true <= cure.high_ns < cure.now_ns
        assert cure.step_ns == pytest.approx(true, rel=0.1)
    assert cures["bf16"].low_ns < others


@pytest.mark.parametrize(
    ("card", "length"), [("Tesla V100-SXM2-16GB", MS), ("", MS), ("NVIDIA H100", 4 * US)]
)
def test_no_gain_is_foretold_without_peaks_or_of_tiny_products(
    tmp_path: Path, card: str, length: int
) -> None:
    report = analyze(training(*[(SGEMM, length)] * 20, card=card), tmp_path)
    assert not {"tf32", "bf16"} & {cure.id for cure in report.what_if}


def test_turning_layouts_is_told_with_its_cost(tmp_path: Path) -> None:
    report = analyze(training((TURN, 100 * US), (TENSOR, 500 * US), (TURN, 100 * US)), tmp_path)
    found = finding_of(report, "layout-transposes")
    assert found.evidence["kernels"] == 2
    assert found.impact_ns == 200 * US
    assert found.severity == "medium"
    plain = analyze(training((TURN, 10 * US), (TENSOR, MS)), tmp_path)
    assert "layout-transposes" not in ids(plain)


def test_of_computation_alone_what_need_not_be_comes_first(tmp_path: Path) -> None:
    """Turning layouts takes 11.5 % of it, more than an eighth of the rest."""
    report = analyze(training((TURN, 1150 * US), (TENSOR, 8850 * US)), tmp_path)
    assert ids(report)[:2] == ["layout-transposes", "compute-bound"]


@settings(max_examples=few(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranks=st.integers(1, 3), kernels=st.integers(12, 80), seed=st.integers(0, 99))
def test_counts_and_sums_are_those_of_the_rows(
    tmp_path: Path, ranks: int, kernels: int, seed: int
) -> None:
    plan = Plan(steps=12, ranks=ranks, kernels_per_step=kernels, seed=seed, allreduces=ranks - 1)
    recording, report = run(tmp_path, plan)
    starts = {(s.rank, s.step): s for s in report.step_list if s.phase == "steady"}
    rows = recording.of_kind(Kind.KERNEL, Kind.COMMUNICATION)
    inside = np.zeros(len(rows), bool)
    for (rank, _), step in starts.items():
        mine = (rows["rank"] == rank) & (rows["start"] >= step.start_ns)
        inside |= mine & (rows["start"] < step.end_ns)
    found, names = kernels_of(report), recording.names
    assert found.count == np.count_nonzero(inside)
    length = int((rows["end"] - rows["start"])[inside].sum())
    assert sum(use.total_ns for use in found.top) + found.rest_ns == length
    assert sum(family.total_ns for family in found.families) == length
    assert {family.family for family in found.families} <= set(FAMILIES)
    assert {family.family for family in found.families} >= {"convolution", "optimizer"}
    for use in found.top:
        assert sum(own.count for own in use.by_gpu) == use.count
        lengths = (rows["end"] - rows["start"])[inside & (rows["name"] == names.index(use.name))]
        assert use.median_ns == np.sort(lengths)[(len(lengths) - 1) // 2]


def test_a_balanced_run_on_tensor_cores_yields_neither_finding(tmp_path: Path) -> None:
    plan = Plan(steps=12, ranks=2, allreduces=2, kernel_ns=200_000)
    assert not {"no-tensor-cores", "layout-transposes"} & set(ids(run(tmp_path, plan)[1]))


def test_the_table_of_kernels_fits_the_page_and_comes_after_the_findings(
    tmp_path: Path,
) -> None:
    report = analyze(training((TURN, 100 * US), (SGEMM, 500 * US), card="NVIDIA H100"), tmp_path)
    text = report.render("text")
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("layout-transposes:") < text.index("Kernels that take most time")
    assert "| volta\\_sgemm\\_128x64\\_nn | gemm | no | 1 | 500 µs |" in report.render("markdown")
    table = report.to_pandas("kernels")
    assert table["total_ns"].sum() == sum(use.total_ns for use in kernels_of(report).top)


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("void at::native::add<float>", "pytorch"),
        ("void tensorflow::BiasNHWCKernel<float>", "tensorflow"),
        ("wrapped_add", "jax"),
        ("ampere_sgemm_128x64_nn", ""),
    ],
)
def test_kernels_name_the_framework(name: str, framework: str, tmp_path: Path) -> None:
    """But not those that XLA brings along, in whatever program."""
    run = Run()
    for _ in range(10):
        run.kernel(300 * US, name)
        run.kernel(10 * US, "void stream_executor::gpu::xla_fp_comparison<Eigen::bfloat16>(float)")
        run.synchronize()
    assert analyze(run, tmp_path).framework == framework
