"""What was recorded: generated passes of networks, alone and repeated, whose layers are no loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gputrace
from gputrace.analyzers.steps.marks import Marks, join_updates, kind_of_ranges, mend
from gputrace.analyzers.steps.windows import count_warmup
from gputrace.model.events import Events, Kind
from gputrace.model.trace import Trace
from tests.helpers import kineto, lookups
from tests.helpers.examples import few
from tests.helpers.handmade import MS, US, Run, analyze
from tests.synthetic import Plan, simulate, write_nsys

NAMES = (
    "ampere_sgemm_128x64_tn",
    "ampere_sgemm_128x128_nn",
    "void at::native::vectorized_elementwise_kernel<AddFunctor>",
    "void at::native::vectorized_elementwise_kernel<GeluFunctor>",
    "void at::native::reduce_kernel<MeanOps>",
    "void at::native::softmax_warp_forward",
    "void at::native::layer_norm_kernel",
    "void at::native::CatArrayBatchedCopy",
)


class Network:
    """A network of layers drawn from a seed: equal ones, between an embedding and a head."""

    def __init__(self, seed: int, experts: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.layers = int(draw.integers(4, 48))
        layer = draw.choice(NAMES, int(draw.integers(12, 40))).tolist()
        self.layer = [NAMES[0], *layer, NAMES[1], *["expert_gemm", "expert_act"] * experts]
        # A layer has norms of its own at its end, and the head shares kernels with layers.
        self.before = ["void at::native::embedding_gather", *draw.choice(NAMES, 5).tolist()]
        self.after = [*self.layer[2:6], NAMES[0], "void at::native::argmax_head"]

    def forward(self, run: Run) -> None:
        for name in (*self.before, *self.layer * self.layers, *self.after):
            run.kernel(20 * US, name)

    def backward(self, run: Run) -> None:
        back = [f"{name}_backward" for name in reversed(self.layer)]
        for name in back * self.layers:
            run.kernel(30 * US, name)


def upload(run: Run, weights: int) -> None:
    for _ in range(weights):
        run.input_copy(1 << 22, 100 * US)


@pytest.mark.parametrize("seed", range(few(3)))
@pytest.mark.parametrize("weights", [0, 40])
def test_layers_of_one_forward_pass_are_no_steps(tmp_path: Path, seed: int, weights: int) -> None:
    run = Run()
    upload(run, weights)
    Network(seed).forward(run)
    report = analyze(run, tmp_path)
    assert (report.steps.kind, report.steps.count) == ("pass", 1)
    assert report.steps.reason.startswith("one forward pass")
    (row,) = report.breakdown
    assert row.steps == 1
    assert row.total_ns == report.steps.mean_ns == report.span_ns - weights * 100 * US
    assert "step" not in report.render().split("\n")[0]


@pytest.mark.parametrize("seed", range(few(3)))
def test_layers_of_a_pass_both_ways_are_no_steps(tmp_path: Path, seed: int) -> None:
    run, network = Run(), Network(seed)
    network.forward(run)
    network.backward(run)
    report = analyze(run, tmp_path)
    assert (report.steps.kind, report.steps.count) == ("pass", 1)
    assert report.steps.reason.startswith("one forward and backward pass")


@pytest.mark.parametrize("seed", range(few(3)))
def test_layers_of_experts_are_no_steps(tmp_path: Path, seed: int) -> None:
    """Layers hold a repetition themselves."""
    run = Run()
    Network(seed, experts=8).forward(run)
    assert analyze(run, tmp_path).steps.count <= 1


@pytest.mark.parametrize("seed", range(few(3)))
def test_a_part_of_a_pass_is_no_loop(tmp_path: Path, seed: int) -> None:
    """A recording that begins and ends amid the layers."""
    run, network = Run(), Network(seed)
    cut = len(network.layer) // 3
    for name in (network.layer * 9)[cut : -2 * cut]:
        run.kernel(20 * US, name)
    assert analyze(run, tmp_path).steps.count <= 1


@pytest.mark.parametrize("seed", range(few(3)))
def test_passes_over_batches_are_an_evaluation(tmp_path: Path, seed: int) -> None:
    run, network = Run(), Network(seed)
    for _ in range(12):
        run.input_copy()
        network.forward(run)
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("evaluation", 12)
    assert "input copy" in steps.reason


@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("as_graph", [False, True])
def test_an_optimizer_ends_each_step_however_the_rest_of_it_is_launched(
    tmp_path: Path, as_graph: bool, clones: bool
) -> None:
    """In its first step it may clone its state between two of its kernels: that is one update."""
    run = Run()
    for step in range(12):
        for _ in range(20 * as_graph):
            run.graph(250 * US)
        if not as_graph:
            run.model()
        run.optimizer()
        if clones and step == 0:
            for _ in range(60):
                run.copy(2 * US, to_host=False)
            run.optimizer()
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("training", 12)


@pytest.mark.parametrize("late_us", [0, 500], ids=["the GPU waited", "the GPU was behind"])
def test_a_pass_begins_with_the_only_marked_step_if_the_gpu_waited(
    tmp_path: Path, late_us: int
) -> None:
    events = [kineto.event("user_annotation", "ProfilerStep#6", 1_000, 60_000)]
    for number in range(40):
        at, correlated = 41_000 + 100 * number, {"correlation": number + 1}
        events.append(kineto.event("cuda_runtime", "cudaLaunchKernel", at, 5, args=correlated))
        name = NAMES[number % 8 if number != 20 else 0]
        events.append(kineto.kernel(at + 10 + late_us, 80, correlation=number + 1) | {"name": name})
    with gputrace.open(kineto.write(tmp_path / "run.pt.trace.json", *events)) as trace:
        report = trace.analyze()
    assert (report.steps.kind, report.steps.count) == ("pass", 1)
    (row,) = report.breakdown
    assert (row.total_ns > 40 * MS) == (late_us == 0)
    assert (report.findings[0].id == "host-work") == (late_us == 0)


def test_winograd_is_no_backward_pass(tmp_path: Path) -> None:
    for name, kind in (("winograd_fwd_4x4", "evaluation"), ("winogradWgradData4x4", "training")):
        run, network = Run(), Network(1)
        network.layer.append(f"cudnn_{name}")
        for _ in range(12):
            run.input_copy()
            network.forward(run)
        assert analyze(run, tmp_path).steps.kind == kind


@pytest.mark.parametrize("slow", [(), (0,), (0, 1)])
def test_windows_of_one_pass_each_are_its_steps(tmp_path: Path, slow: tuple[int, ...]) -> None:
    """A profiler that is started for one pass at a time, the first of which load code."""
    names = [*NAMES, *NAMES[:2]]
    for window in range(6):
        at, pause = 200_000.0 * window, 9_000.0 if window in slow else 10.0
        events = []
        for index, name in enumerate(names):
            begin, id = at + (pause + 30) * index, {"correlation": index}
            events.append(kineto.event("cuda_runtime", "cudaLaunchKernel", begin, 5, args=id))
            events.append(kineto.kernel(begin + 6, 24, name, **id))
        path = tmp_path / f"host_1.{window}.pt.trace.json"
        kineto.write(path, *events, baseTimeNanoseconds=1_700_000_000_000_000_000)
    report = lookups.analyze(tmp_path)
    assert (report.steps.kind, report.steps.count) == ("evaluation", 6)
    assert sum(step.phase == "warmup" for step in report.step_list) == len(slow)


@pytest.mark.parametrize(
    ("lengths", "count"),
    [
        ([614, 40, 32, 30, 33], 1),
        ([900, 200, 31, 31], 2),
        ([900, 31, 31], 1),
        ([60, 40, 20], 0),
        ([30, 31, 29, 30], 0),
        ([900, 30], 0),
        ([900], 0),
    ],
)
def test_a_few_steps_begin_with_a_warm_up_if_the_rest_lie_together(
    lengths: list[int], count: int
) -> None:
    assert count_warmup(lengths) == count


@pytest.mark.parametrize("seed", range(few(3)))
def test_tokens_are_counted_and_not_their_layers(tmp_path: Path, seed: int) -> None:
    """Each token's id is read by the host, and each layer adds to a cache."""
    run, network = Run(), Network(seed)
    network.layer.append("void vllm::reshape_and_cache_flash_kernel")
    for _ in range(15):
        network.forward(run)
        run.item()
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("generation", 15)
    assert steps.mean_ns is not None
    rate = f"{1e9 / steps.mean_ns:,.1f} tokens a second of each sequence"
    assert steps.reason.endswith(rate)


def test_graphs_whose_results_are_read_generate(tmp_path: Path) -> None:
    """The prompt's kernels are more than the launches of all the tokens' graphs."""
    run, network = Run(), Network(1)
    network.layer.append("void vllm::reshape_and_cache_flash_kernel")
    network.forward(run)
    for _ in range(15):
        run.graph(20 * MS)
        run.item()
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("generation", 15)


@pytest.mark.parametrize("size", [1, 32])
def test_ranges_may_tell_how_many_sequences_a_token_is_for(tmp_path: Path, size: int) -> None:
    run, network = Run(), Network(1)
    for _ in range(5):
        begin = run.now
        network.forward(run)
        run.item()
        run.range(begin, run.now, f"step[DECODE bs={size}]")
    steps = analyze(run, tmp_path).steps
    assert steps.mean_ns is not None
    every = " of each sequence" if size == 1 else ""
    assert steps.reason.endswith(f"{size * 1e9 / steps.mean_ns:,.1f} tokens a second{every}")


@pytest.mark.parametrize("seed", range(few(3)))
def test_passes_one_after_another_with_nothing_beside_are_counted(
    tmp_path: Path, seed: int
) -> None:
    run, network = Run(), Network(seed)
    for _ in range(5):
        network.forward(run)
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("evaluation", 5)


@pytest.mark.parametrize("seed", range(few(3)))
def test_two_passes_are_not_told_as_one(tmp_path: Path, seed: int) -> None:
    run, network = Run(), Network(seed)
    for _ in range(2):
        network.forward(run)
    assert analyze(run, tmp_path).steps.kind == "none"


@pytest.mark.parametrize("name", ["Forward", "benchmark iteration {}", "run {}"])
@pytest.mark.parametrize("seed", range(few(1)))
def test_what_is_measured_after_a_warm_up_is_counted(tmp_path: Path, seed: int, name: str) -> None:
    run, network = Run(), Network(seed)

    def turn(name: str) -> None:
        begin = run.now
        network.forward(run)
        run.synchronize()
        run.range(begin, run.now, name)

    for step in range(5):
        begin = run.now
        turn(name.format(step))
        network.backward(run)
        run.optimizer()
        run.synchronize()
        run.range(begin, run.now, f"Warm-up Step {step}")
    for step in range(10):
        turn(name.format(step))
    report = analyze(run, tmp_path)
    kernels = len(network.before) + len(network.layer) * network.layers + len(network.after)
    assert (report.steps.kind, report.steps.count) == ("benchmark", 10)
    assert report.steps.mean_ns == pytest.approx(kernels * 20 * US, rel=0.02)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "training") for name in ("step 3", "epoch 0 step 17", "Epoch 1, Iter 4/90")],
        *[(name, "training") for name in ("forward_backward_step 7", "train_step", "iteration")],
        *[(name, "training") for name in ("TrainStep", "training_step-3", "Body of iteration 5")],
        *[(name, "training") for name in ("[pl][profile]run_training_batch", "train")],
        *[(name, "") for name in ("optimizer_step", "backward", "epoch 3", "train epoch 2")],
        *[(name, "") for name in ("micro-batch 3", "get_batch", "next batch", "forward layer 3")],
        *[(name, "") for name in ("FSDP::forward (blocks.3)", "backward_step", "matmul")],
        *[(name, "evaluation") for name in ("Forward", "val step 3", "validation_step", "predict")],
        *[(name, "warmup") for name in ("Warm-up Step 1", "warmup", "warming up")],
        *[(name, "generation") for name in ("decode step 5", "step[DECODE bs=32]", "generate")],
        *[(name, "benchmark") for name in ("benchmark step 3", "timed run", "trial 4")],
        ("rollout 3", "rl"),
    ],
)
def test_names_of_ranges_say_what_they_mark(name: str, kind: str) -> None:
    assert kind_of_ranges(name) == kind


class TestMarks:
    @given(st.lists(st.integers(100, 10_000), min_size=3, max_size=40), st.data())
    def test_flaws_cost_no_step(self, lengths: list[int], data: st.DataObject) -> None:
        """Some begin a nanosecond early, some stand twice, in any order; one range holds all."""
        ends = np.cumsum(lengths)
        starts = ends - lengths
        early = np.array([data.draw(st.integers(0, 1)) for _ in lengths])
        twice = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=5))
        flawed = [*zip(starts - early, ends, strict=True), (-5, int(ends[-1]) + 5)]
        flawed += [flawed[index] for index in twice]
        flawed = data.draw(st.permutations(flawed))
        mended = mend(*np.array(flawed, np.int64).T)
        assert mended is not None
        _, found_starts, found_ends, note = mended
        assert found_ends.tolist() == ends.tolist()
        assert found_starts[1:].tolist() == starts[1:].tolist()
        assert ("repeat" in note) == bool(twice)
        assert "holds others" in note

    def test_a_clock_set_back_moves_one_border(self) -> None:
        starts = np.arange(10) * 100
        ends = starts + 100
        starts[5] -= 40
        mended = mend(starts, ends)
        assert mended is not None
        assert mended[1].tolist() == (np.arange(10) * 100).tolist()
        assert mended[3] == ("1 began 40 ns before the previous one ended, and counts from there")

    def test_ranges_beside_each_other_are_no_steps(self) -> None:
        starts = np.arange(10) * 100
        assert mend(starts, starts + 190) is None

    def test_a_flaw_is_told(self, tmp_path: Path) -> None:
        run = Run()
        for step in range(12):
            begin = run.now
            run.kernels(8, "gemm", 1 * MS)
            run.synchronize()
            run.range(begin - (step == 4), run.now, f"iteration {step}")
            if step == 7:
                run.range(begin, run.now, f"iteration {step}")
        report = analyze(run, tmp_path)
        assert (report.steps.source, report.steps.count) == ("nvtx", 12)
        assert any("1 repeats another and is left out" in warning for warning in report.warnings)


@pytest.mark.parametrize(("updates", "others"), [(1, 0), (2, 0), (3, 12)])
def test_updates_after_each_rollout_are_one_step(updates: int, others: int) -> None:
    """A rollout has as many operations as three updates; some windows were not recorded."""
    counts = np.array([400 if step % updates == 0 and updates > 1 else 100 for step in range(60)])
    ends = np.cumsum(counts)
    marks = Marks(0, 1, "torch.optim.Optimizer.step", "markers", ends - counts, ends, np.arange(60))
    joined = join_updates(marks, np.arange(others, 60), counts[others:])
    assert len(joined.start) == 60 // updates
    assert joined.start.tolist() == (ends - counts)[::updates].tolist()
    assert joined.end.tolist() == ends[updates - 1 :: updates].tolist()


def test_training_on_rollouts_is_told(tmp_path: Path) -> None:
    run = Run()
    for _ in range(12):
        begin = run.now
        run.kernels(40, "decode")
        run.range(begin, run.now, "generate_sequences")
        run.input_copy()
        run.model()
        run.optimizer()
        run.synchronize()
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("rl", 12)


@pytest.mark.parametrize("updates", [1, 3])
def test_updates_after_tokens_are_turns_without_any_range(tmp_path: Path, updates: int) -> None:
    """A value head multiplies by a vector in each update."""
    run = Run()
    for turn in range(6):
        run.input_copy()
        for _ in range(5 + turn):
            run.kernels(12, "gemv")
            run.kernels(2, "softmax")
            run.item()
        for _ in range(updates):
            run.input_copy(4096, 10 * US)
            run.model()
            run.kernels(1, "gemv")
            run.optimizer()
        run.synchronize()
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("rl", 6)


def test_a_profiler_marks_an_evaluation_too(tmp_path: Path) -> None:
    run, network = Run(), Network(1)
    for step in range(6):
        begin = run.now
        network.forward(run)
        run.synchronize()
        run.range(begin, run.now, f"step {step}")
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("evaluation", 6)


def test_a_start_is_told(tmp_path: Path) -> None:
    run = Run()
    for number in range(6):
        run.kernel(20 * US, f"fill_{number}")
        run.synchronize()
        run.allocate(5 * MS, "cuModuleLoadData")
    run.kernel(20 * US, "fill")
    steps = analyze(run, tmp_path).steps
    assert (steps.kind, steps.count) == ("start-up", 0)


def test_names_of_ranges_are_read_once_for_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, names = Trace.events, list[int]()

    def count(
        self: Trace, kinds: Iterable[Kind], columns: Sequence[str], *more: Any, **how: Any
    ) -> Events:
        names[-1] += list(columns) == ["name"]
        return read(self, kinds, columns, *more, **how)

    monkeypatch.setattr(Trace, "events", count)
    for ranks in (2, 6):
        path = tmp_path / f"{ranks}.sqlite"
        write_nsys(simulate(Plan(steps=10, ranks=ranks)), path)
        names.append(0)
        with gputrace.open(path) as trace:
            assert trace.analyze().steps.count == 10
    assert names[0] == names[1]
