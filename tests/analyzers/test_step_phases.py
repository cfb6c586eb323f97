"""Phases of a step: forward, backward, optimizer, data; and how long GPUs idle in each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from gputrace.api import Report
from gputrace.model.host import PHASES, StepPhases
from gputrace.model.results import Finding
from tests.helpers.exports import NVTX, PUSH_POP_RANGE, STEP, Export, global_id
from tests.helpers.handmade import MS, Run, analyze
from tests.helpers.programs import recorded_with_torch
from tests.helpers.sentences import words_of

PID: Final = 100
STEPS: Final = 20
PERIOD: Final = 10 * MS
RANGES: Final = "GPUTRACE_HOST_RANGE"
WAIT: Final = "torch.wait"

Calls = list[tuple[str, float, float]]
"""Name, begin and end in milliseconds of a step."""

PLAIN: Final[Calls] = [
    (WAIT, 1, 2),
    ("backward", 4, 7),
    ("gradient clipping", 7, 7.5),
    ("optimizer", 8, 10),
]
"""Nothing for 1 ms, as in the half before the optimizer; data for 1, forward for 2."""


class Host:
    """A process whose training thread makes the same calls in each step of 10 ms."""

    def __init__(self) -> None:
        self.export = Export()
        self.export.give("GPUTRACE_META", "name", "value")
        self.export.give(RANGES, "start", "end", "globalTid", "nameId", "kind")
        self.export.rows.setdefault("GPUTRACE_META", [])
        self.step = PERIOD

    def trains(
        self, *calls: tuple[str, float, float], thread: int = PID, marks: bool = True
    ) -> Host:
        """Calls of a thread, which is a process of its own from 200 on."""
        for number in range(STEPS):
            begin = (number + 1) * self.step
            if marks and thread % PID == 0:
                self._add(STEP, "torch.step", begin, begin + self.step, thread, step=number)
            for name, start, end in calls:
                span = begin + round(start * MS), begin + round(end * MS)
                self._add(RANGES, name, *span, thread, kind=1 if name == WAIT else 4)
        return self

    def annotates(self, name: str, start: float, end: float) -> Host:
        """A range of NVTX in each step."""
        for number in range(STEPS):
            begin = (number + 1) * self.step
            span = {"start": begin + round(start * MS), "end": begin + round(end * MS)}
            who = {"globalTid": global_id(PID, thread=PID), "textId": self.export.string(name)}
            self.export.add(NVTX, **span, **who, eventType=PUSH_POP_RANGE)
        return self

    def _add(self, table: str, name: str, start: int, end: int, thread: int, **more: int) -> None:
        who = {"globalTid": global_id(thread // PID * PID, thread=thread)}
        name_id = self.export.string(name)
        self.export.add(table, start=start, end=end, nameId=name_id, **who, **more)

    def computes(self, *work: tuple[float, float]) -> Run:
        """A GPU that works from the one to the other millisecond of each step."""
        run = Run(self.export, pid=PID)
        # Before the first step too, which would else begin with its first kernel.
        for number in range(STEPS + 1):
            for start, end in work:
                run.now = number * self.step + round(start * MS)
                run.kernel(round((end - start) * MS), "gemm")
        return run


def the(report: Report) -> StepPhases:
    (row,) = report.step_phases
    return row


def host_ms(row: StepPhases) -> dict[str, float]:
    return {phase.name: phase.host_ns / MS for phase in row.phases if phase.host_ns}


def host_work(report: Report) -> Finding:
    (found,) = (finding for finding in report.findings if finding.id == "host-work")
    return found


# ---- what the host does ----


def test_forward_is_from_the_end_of_the_wait_to_the_beginning_of_backward(tmp_path: Path) -> None:
    row = the(analyze(Host().trains(*PLAIN).export, tmp_path))
    assert host_ms(row) == {
        "data": 1,
        "forward": 2,
        "backward": 3,
        "gradient clipping": 0.5,
        "optimizer": 2,
        "other": 1.5,
    }
    assert tuple(phase.name for phase in row.phases) == tuple(PHASES)
    assert (row.rank, row.step_ns) == (0, PERIOD)


def test_without_a_wait_forward_begins_where_the_step_before_ended(tmp_path: Path) -> None:
    row = the(analyze(Host().trains(("backward", 4, 7), ("optimizer", 8, 9)).export, tmp_path))
    assert host_ms(row) == {"forward": 4, "backward": 3, "optimizer": 1, "other": 2}


def test_a_forward_pass_that_a_framework_calls_is_what_it_says(tmp_path: Path) -> None:
    """As Lightning does, in a closure that its optimizer calls."""
    calls: Calls = [(WAIT, 0, 1), ("optimizer", 1, 10), ("forward", 2, 4), ("backward", 5, 8)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"data": 1, "forward": 2, "backward": 3, "optimizer": 4}


def test_each_of_several_backward_passes_has_a_forward_pass(tmp_path: Path) -> None:
    """Gradients of two batches are summed, and then those of a third without a wait for it."""
    calls: Calls = [
        *[(WAIT, 0, 1), ("backward", 2, 3), (WAIT, 3.5, 4), ("backward", 6, 7)],
        *[("backward", 8, 9), ("optimizer", 9, 10)],
    ]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    expected = {"data": 1.5, "forward": 1 + 2 + 1, "backward": 3, "optimizer": 1, "other": 0.5}
    assert host_ms(row) == expected


@pytest.mark.parametrize("slow", ["rollouts", "rewards", "the sync of weights"])
def test_what_an_update_waits_for_is_named(tmp_path: Path, slow: str) -> None:
    """Weights are sent in rollouts; the policy is asked without gradients, then with some."""
    sync, rolled, scored = {"rollouts": (1, 5, 6), "rewards": (1, 2, 6)}.get(slow, (4, 5, 6))
    calls: Calls = [
        *[("rollout", 0, rolled), ("weight sync", 0, sync), ("model", 1, 2)],
        ("checkpoint", 0, 0.5),  # Weights are pickled.
        *[("reward", rolled, scored), ("reference", scored, 6.5)],
        *[("forward", 7, 8), ("reference", 7, 7.5), ("backward", 8, 9), ("optimizer", 9, 9.5)],
    ]
    report = analyze(Host().trains(*calls).export, tmp_path)
    expected: dict[str, float] = {
        "rollout": rolled - sync,
        "reward": scored - rolled,
        "weight sync": sync,
    }
    expected |= {"reference": 0.5, "forward": 1, "backward": 1, "optimizer": 0.5, "other": 1}
    assert host_ms(the(report)) == expected
    assert (report.steps.kind, report.steps.count) == ("rl", STEPS - 1)
    found = report.findings[0]
    assert (found.id, found.impact_ns) == ("update-waits", 4 * MS)
    assert found.message == f"the update waits 40% of each step (4.00 of 10.0 ms) for {slow}"
    assert found.details[0] == "the update itself takes 2.50 ms"


def test_the_rank_whose_rewards_take_longest_is_named(tmp_path: Path) -> None:
    host = Host()
    for pid, scored in ((100, 2.2), (200, 6)):
        calls: Calls = [("rollout", 0, 2), ("reward", 2, scored), ("backward", 8, 9)]
        host.trains(*calls, ("optimizer", 9, 10), thread=pid)
    found = analyze(host.export, tmp_path).findings[0]
    assert found.message.endswith("(4.00 of 10.0 ms) for rewards of rank 1")
    assert found.details[0] == "on another rank they take 200 µs"


def test_an_engine_that_does_more_on_the_trainers_card_is_no_trainer(tmp_path: Path) -> None:
    host = Host().trains(("rollout", 0, 5), ("backward", 6, 8), ("optimizer", 8, 9))
    host.trains(("generate", 1, 5), thread=200, marks=False)
    for pid, kernels, at in ((200, 40, 1), (100, 4, 6)):
        host.export.ordinal(pid, 0, 0)
        run = Run(host.export, pid=pid)
        for number in range(1, STEPS + 1):
            run.now = number * PERIOD + at * MS
            run.kernels(kernels, "gemm", length=10_000)
    host.export.card(0, "0000:01:00.0")
    report = analyze(host.export, tmp_path)
    assert len(report.breakdown) == 1
    expected = {"rollout": 5, "backward": 2, "optimizer": 1, "forward": 1, "other": 1}
    assert host_ms(the(report)) == pytest.approx(expected, rel=0.06)
    assert report.findings[0].id == "update-waits"


@pytest.mark.parametrize("call", ["backward", "generate"])
def test_an_engine_that_gets_weights_has_no_optimizer(tmp_path: Path, call: str) -> None:
    run = Run(Host().trains((call, 4, 9), marks=False).export)
    for number in range(STEPS):
        run.now = (number + 1) * PERIOD
        for _ in range(10):
            run.copy(20, to_host=True)
        run.wait(2 * MS)
        for _ in range(10):
            run.input_copy(length=20)
        run.kernels(400, "decode", 5_000)
        run.synchronize()
    charged = {row.cause for row in analyze(run, tmp_path).ledger}
    assert ("host-optimizer" in charged) is (call == "backward")


def test_phases_of_a_loop_of_its_own_are_known_by_their_place(tmp_path: Path) -> None:
    """A network generates, answers are scored, a reference is asked, and two updates are made."""
    calls: Calls = [
        *[("generate", 1, 4), ("model", 2, 3), ("model", 6, 6.5), ("model", 7, 7.4)],
        *[("backward", 7.5, 8), ("optimizer", 8, 8.5), ("model", 8.6, 9)],
        *[("backward", 9, 9.5), ("optimizer", 9.5, 10)],
    ]
    report = analyze(Host().trains(*calls).export, tmp_path)
    expected = {"rollout": 3, "reward": 2, "reference": 1, "forward": 0.5 + 0.4, "backward": 1}
    assert host_ms(the(report)) == {**expected, "optimizer": 1, "other": 1.1}
    assert report.findings[0].message.endswith("for rollouts")


@pytest.mark.parametrize(
    "names",
    [
        ("update_weights", "gen", "reward", "old_log_prob", "update_actor"),
        ("broadcast_to_vllm", "make_experience", "compute_score", "ref", "ppo_train"),
        (
            "prepare_for_generation",
            "generation",
            "reward_calculation",
            "logprobs",
            "policy_training",
        ),
        ("sync_weights", "train_wait", "rewards", "ref_log_probs", "actor_train"),
        (
            "train.update_weights",
            "train.rollout",
            "compute_reward",
            "train.ref_logp",
            "train.ppo_update",
        ),
    ],
)
def test_ranges_are_phases_as_frameworks_name_them(tmp_path: Path, names: tuple[str, ...]) -> None:
    host = Host().trains(("optimizer", 9, 9.5))
    for name, start, end in zip(names, (0, 1, 5, 6, 7), (1, 5, 6, 7, 9.5), strict=True):
        host.annotates(name, start, end)
    report = analyze(host.export, tmp_path)
    expected = {"weight sync": 1, "rollout": 4, "reward": 1, "reference": 1}
    assert host_ms(the(report)) == {**expected, "optimizer": 0.5, "update": 2, "other": 0.5}
    assert report.findings[0].message.endswith("for rollouts")


@pytest.mark.parametrize(
    ("name", "trains"),
    [
        ("all2all_data:recat_permute_gen", True),
        ("execute_context_1(8)_generation_0(0)", True),
        ("generate", False),
    ],
)
def test_ranges_of_other_programs_are_no_rollouts(tmp_path: Path, name: str, trains: bool) -> None:
    host = Host().trains(*[("optimizer", 9, 9.5)] if trains else []).annotates(name, 1, 5)
    rows = analyze(host.export, tmp_path).step_phases
    assert [host_ms(row).get("rollout", 0) for row in rows] == [0] * trains


def test_rollouts_of_another_process_are_no_data(tmp_path: Path) -> None:
    """A trainer waits for an engine of another process, and copies what that generated."""
    run = Run()
    engine = Run(run.export, pid=PID + 100, device=1)
    for _ in range(12):
        begin = engine.now = run.now
        engine.kernels(400, "decode")
        engine.range(begin, engine.now, "generate_sequences")
        run.now = begin = engine.now
        run.input_copy()
        run.model()
        run.optimizer()
        run.synchronize()
        run.range(begin, run.now, "update_actor")
    report = analyze(run, tmp_path)
    assert report.steps.kind == "rl"
    assert report.findings[0].id == "update-waits"
    assert report.findings[0].message.endswith("for rollouts")
    assert "data-feeding" not in {finding.id for finding in report.findings}


def test_an_optimizer_that_calls_a_closure_counts_for_the_rest(tmp_path: Path) -> None:
    calls: Calls = [(WAIT, 0, 1), ("optimizer", 2, 10), ("backward", 5, 8)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"data": 1, "forward": 4, "backward": 3, "optimizer": 2}


def test_a_closure_that_is_timed_itself_is_no_part_of_the_optimizer(tmp_path: Path) -> None:
    """As Lightning's, which zeroes gradients and calls the program's hooks."""
    calls: Calls = [("optimizer", 1, 10), ("other", 2, 9), ("forward", 3, 5), ("backward", 5, 8)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 2, "backward": 3, "optimizer": 2, "other": 3}


def test_optimizers_within_a_backward_pass_are_no_part_of_it(tmp_path: Path) -> None:
    calls: Calls = [(WAIT, 0, 1), ("backward", 3, 9), ("optimizer", 4, 5), ("optimizer", 6, 7)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"data": 1, "forward": 2, "backward": 4, "optimizer": 2, "other": 1}


def test_what_autograd_s_threads_do_counts_for_the_thread_that_called_it(tmp_path: Path) -> None:
    host = Host().trains(*PLAIN)
    host.trains(("backward", 5, 6), thread=PID + 1)
    assert host_ms(the(analyze(host.export, tmp_path)))["backward"] == 3


@pytest.mark.parametrize("odd", [1, 7, 333_333])
def test_phases_sum_to_the_step_to_the_nanosecond(tmp_path: Path, odd: int) -> None:
    host = Host()
    host.step += odd
    run = host.trains(*PLAIN).computes((2, 4), (6.5, 8))
    report = analyze(run, tmp_path)
    row, (gpu,) = the(report), report.breakdown
    assert sum(phase.host_ns for phase in row.phases) == row.step_ns == gpu.total_ns // gpu.steps
    causes = ("recorder", "data_feeding", "sync", "alloc", "launch", "other_idle")
    idle = sum(gpu.of(cause) for cause in causes)
    assert sum(phase.idle_ns or 0 for phase in row.phases) == idle // gpu.steps
    launch = sum(phase.launch_ns or 0 for phase in row.phases)
    assert launch == gpu.of("launch") // gpu.steps


# ---- what the GPU lacks meanwhile ----


@pytest.fixture
def slow_backward(tmp_path: Path) -> Report:
    """The GPU idles 2.5 of the 3 ms of backward, and until the forward pass: 1 ms for data."""
    return analyze(Host().trains(*PLAIN).computes((2, 4), (6.5, 10)), tmp_path)


def test_idle_time_is_given_to_the_phase_that_the_host_is_in(slow_backward: Report) -> None:
    row = the(slow_backward)
    idle = {phase.name: phase.idle_ns for phase in row.phases if phase.idle_ns}
    launch = {phase.name: phase.launch_ns for phase in row.phases if phase.launch_ns}
    # A launch takes some microseconds of the forward pass, too.
    expected = {"data": 1.0, "forward": 0.0, "backward": 2.5, "other": 1.0}
    assert {name: (time or 0) / MS for name, time in idle.items()} == pytest.approx(
        expected, abs=0.02
    )
    del expected["data"]
    assert {name: (time or 0) / MS for name, time in launch.items()} == pytest.approx(
        expected, abs=0.02
    )


def test_a_finding_names_the_phase_that_has_most_of_it(slow_backward: Report) -> None:
    found = host_work(slow_backward)
    assert "most of it is in the backward pass (2.50 of " in words_of(found)
    assert found.evidence["phase"] == "backward"
    # A launch takes some microseconds of it.
    assert found.evidence["phase_ns"] == pytest.approx(2.5 * MS, rel=0.01)


def test_no_phase_is_named_where_none_has_most(tmp_path: Path) -> None:
    report = analyze(Host().trains(*PLAIN).computes((3, 5), (6, 8), (9, 10)), tmp_path)
    found = host_work(report)
    assert "most of it" not in words_of(found)
    assert "phase" not in found.evidence


def test_the_report_has_a_table(slow_backward: Report) -> None:
    shown = slow_backward.render()
    table = shown[shown.index("What the host does in a step") :].split("\n\n")[0].splitlines()
    assert table[0].startswith("What the host does in a step (mean of ")
    assert table[1].split() == ["host", "share", "GPU", "idle", "meanwhile"]
    assert ["backward", "3.00", "ms", "30.0%", "2.50", "ms"] in [line.split() for line in table]
    assert not any("unscaling" in line for line in table)


def test_the_json_has_all_phases(slow_backward: Report) -> None:
    (row,) = json.loads(slow_backward.render("json"))["step_phases"]
    assert row.keys() == {"rank", "steps", "step_ns", "phases"}
    assert [phase["name"] for phase in row["phases"]] == list(PHASES)
    assert row["phases"][list(PHASES).index("gradient unscaling")] == {
        "name": "gradient unscaling",
        "host_ns": 0,
        "idle_ns": 0,
        "launch_ns": 0,
    }


def test_without_a_gpu_idle_time_is_unknown(tmp_path: Path) -> None:
    report = analyze(Host().trains(*PLAIN).export, tmp_path)
    assert {(phase.idle_ns, phase.launch_ns) for phase in the(report).phases} == {(None, None)}
    assert "GPU idle meanwhile" not in report.render()


def test_waits_for_data_alone_are_no_phases(tmp_path: Path) -> None:
    report = analyze(Host().trains((WAIT, 1, 2)).computes((2, 4), (8, 10)), tmp_path)
    assert report.step_phases == ()
    assert "What the host does" not in report.render()
    assert "most of it" not in words_of(host_work(report))


def test_what_a_phase_takes_before_an_input_copy_is_no_loading(tmp_path: Path) -> None:
    """The host is held in the optimizer for 5 ms, then makes a batch in 3 and copies it."""
    host = Host().trains(("backward", 0.5, 1), ("optimizer", 1, 7))
    run = Run(host.export, pid=PID)
    for number in range(STEPS + 1):
        run.now = number * PERIOD
        run.input_copy()
        run.now = number * PERIOD + MS
        run.kernel(MS, "gemm")
    (row,) = analyze(run, tmp_path).breakdown
    assert row.data_feeding_ns / row.steps == pytest.approx(3 * MS, rel=0.1)
    assert row.launch_ns / row.steps == pytest.approx(5.5 * MS, rel=0.1)


def test_what_the_program_does_before_it_asks_for_a_batch_is_no_loading(tmp_path: Path) -> None:
    """It logs for 5 ms, then waits 2 ms for the loader and changes the batch for 1 ms."""
    host = Host().trains((WAIT, 7, 9))
    run = Run(host.export, pid=PID)
    for number in range(STEPS + 1):
        run.now = number * PERIOD
        run.input_copy()
        run.now = number * PERIOD + MS
        run.kernel(MS, "gemm")
    (row,) = analyze(run, tmp_path).breakdown
    assert row.data_feeding_ns / row.steps == pytest.approx(3 * MS, rel=0.1)
    assert row.launch_ns / row.steps == pytest.approx(5.5 * MS, rel=0.1)


# ---- with calls of the model ----


def test_forward_begins_with_the_model_and_ends_where_backward_begins(tmp_path: Path) -> None:
    """Between the two are a loss that is no module's, and a call that is none of the pass."""
    calls: Calls = [(WAIT, 0, 1), ("model", 3, 4), ("other", 5, 5.5), ("backward", 6, 8)]
    row = the(analyze(Host().trains(*calls, ("optimizer", 8, 9)).export, tmp_path))
    expected = {"data": 1, "forward": 2.5, "backward": 2, "optimizer": 1, "other": 3.5}
    assert host_ms(row) == expected


def test_each_backward_pass_follows_the_first_call_of_the_model(tmp_path: Path) -> None:
    calls: Calls = [
        *[("model", 1, 2), ("model", 2, 2.5), ("backward", 3, 4)],
        *[("model", 5, 6), ("backward", 6, 7), ("optimizer", 7, 8)],
    ]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 2 + 1, "backward": 2, "optimizer": 1, "other": 4}


def test_a_call_of_the_model_without_a_backward_pass_is_forward_too(tmp_path: Path) -> None:
    calls: Calls = [("model", 1, 2), ("backward", 3, 4), ("optimizer", 4, 5), ("model", 6, 9)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 2 + 3, "backward": 1, "optimizer": 1, "other": 3}


def test_calls_of_the_model_within_a_backward_pass_belong_to_it(tmp_path: Path) -> None:
    calls: Calls = [("model", 1, 2), ("backward", 2, 6), ("model", 3, 4), ("optimizer", 6, 7)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 1, "backward": 4, "optimizer": 1, "other": 4}


def test_a_forward_pass_recorded_by_a_framework_includes_the_models_calls(tmp_path: Path) -> None:
    calls: Calls = [("forward", 1, 4), ("model", 2, 3), ("backward", 5, 6), ("optimizer", 6, 7)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 3, "backward": 1, "optimizer": 1, "other": 5}


def test_forward_passes_before_calls_were_timed_are_as_long_as_the_others(tmp_path: Path) -> None:
    host = Host().trains(("model", 3, 4), ("backward", 6, 8), ("optimizer", 8, 9))
    rows, model = host.export.rows[RANGES], host.export.string("model")
    for early in [row for row in rows if row["nameId"] == model][:5]:
        rows.remove(early)
    row = the(analyze(host.export, tmp_path))
    assert host_ms(row) == {"forward": 3, "backward": 2, "optimizer": 1, "other": 4}


# ---- real torch ----

PLANTED: Final = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        time.sleep(0.030)
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        time.sleep(0.045)
        return gradient

class SGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.020)
        return super().step(closure)

class Data(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)

torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(Data(torch.randn(75, 8)), 3))
times = []
for _ in range(25):
    now = [time.perf_counter()]
    (x,) = next(batches)
    now.append(time.perf_counter())
    loss = Slow.apply(model(x)).sum()
    now.append(time.perf_counter())
    loss.backward()
    now.append(time.perf_counter())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    now.append(time.perf_counter())
    optimizer.step()
    now.append(time.perf_counter())
    optimizer.zero_grad()
    time.sleep(0.025)
    took = time.perf_counter() - now[0]
    times.append([1e3 * (b - a) for a, b in zip(now, now[1:])] + [1e3 * took])
print("times =", times)
"""


def test_planted_times_are_found_in_a_real_program(tmp_path: Path) -> None:
    out, report = recorded_with_torch(tmp_path, PLANTED)
    row = the(report)
    # By the program's own clock, since a busy machine makes sleeps longer.
    clocked = json.loads(out.split("times = ")[1].splitlines()[0])[-row.steps :]
    names = "data", "forward", "backward", "gradient clipping", "optimizer", "step"
    clock = {name: sum(own) / row.steps for name, *own in zip(names, *clocked, strict=True)}
    step, clipping, found = clock.pop("step"), clock.pop("gradient clipping"), host_ms(row)
    assert clock["backward"] >= 45
    assert found.pop("gradient clipping") == pytest.approx(clipping, rel=0.1, abs=0.2)
    assert row.step_ns / MS == pytest.approx(step, rel=0.1)
    assert found.pop("other") >= 24
    assert found == pytest.approx(clock, rel=0.1)


CLOCKED: Final = """
import time, torch
torch.set_num_threads(1)
class SGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.020)
        return super().step(closure)
    def zero_grad(self):
        super().zero_grad()

class Slow(torch.nn.Sequential):
    def forward(self, x):
        time.sleep(0.030)
        return super().forward(x)

model = Slow(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = SGD(model.parameters(), lr=0.01)
times = []
for _ in range(25):
    x = torch.randn(4, 8)
    time.sleep(0.025)
    now = [time.perf_counter()]
    loss = model(x).sum()
    now.append(time.perf_counter())
    loss.backward()
    now.append(time.perf_counter())
    optimizer.step()
    now.append(time.perf_counter())
    optimizer.zero_grad()
    times.append([1e3 * (b - a) for a, b in zip(now, now[1:])])
print("times =", times)
"""


def test_preparing_a_batch_does_not_count_as_forward(tmp_path: Path) -> None:
    out, report = recorded_with_torch(tmp_path, CLOCKED)
    row = the(report)
    clocked = json.loads(out.split("times = ")[1].splitlines()[0])[-row.steps :]
    found = host_ms(row)
    for name, own in zip(
        ("forward", "backward", "optimizer"), zip(*clocked, strict=True), strict=True
    ):
        # A busy machine may take the core away between the two clocks.
        assert found[name] == pytest.approx(sum(own) / row.steps, rel=0.03, abs=1.0)
    assert found["forward"] >= 30
    assert found["other"] >= 25
    assert row.step_ns >= 75 * MS
