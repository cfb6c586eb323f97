"""Experiments of GPU machines: what their figures are held against, and what is left out where."""

from __future__ import annotations

import gzip
import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from benchmarks import __main__ as benchmarks
from benchmarks import experiment, harmless, loaders, modules, overhead, phases, sick
from benchmarks.experiment import Check, Ended, Figure, Journal, near
from benchmarks.harmless import Least, Recorded, whole_runs
from benchmarks.measure import Failed
from benchmarks.options import Options
from benchmarks.overhead import Ran
from benchmarks.sick import TRAININGS, Trial
from gputrace.trials.ledger import Entry
from tests.helpers.command import ROOT
from tests.helpers.kineto import real
from tests.native.build import Machine

EXPERIMENTS: Final = (harmless, overhead, phases, modules, sick, loaders)


def missed(checks: list[Check]) -> list[str]:
    return [check.what for check in checks if check.met is False]


# ---- the machine ----


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "has_driver", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("module", EXPERIMENTS, ids=lambda module: str(module.__name__))
def test_without_a_gpu_an_experiment_says_so_in_one_line(
    module: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.run(Options()) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    "module", [phases, modules, sick, loaders], ids=lambda module: str(module.__name__)
)
def test_without_pytorch_an_experiment_says_so_in_one_line(
    module: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "lacks", lambda *names: f"{', '.join(names)} not installed")
    assert module.run(Options(cpu=True)) == 0
    said = capsys.readouterr().out
    assert "torch not installed" in said
    assert said.count("\n") == 1


def test_a_framework_that_is_not_there_is_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harmless, "lacks", lambda *names: f"{', '.join(names)} not installed")
    saved = tmp_path / "saved.json"
    assert harmless.run(Options(cpu=True, parts=("jax", "cupy"), save=saved)) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == ["  jax: skipped: jax not installed", "  cupy: skipped: cupy not installed"]
    assert json.loads(saved.read_text())["harmless"]["skipped"] == [
        {"part": "jax", "why": "jax not installed"},
        {"part": "cupy", "why": "cupy not installed"},
    ]


def test_the_python_of_programs_is_asked_for_its_modules() -> None:
    assert experiment.lacks("json", "sqlite3") == ""
    assert experiment.lacks("json", "no_such_module") == "no_such_module not installed"


# ---- the journal ----


def test_what_is_found_is_saved_before_the_next_part(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text('{"other": 1}')
    journal = Journal("tried", Options(save=saved))
    kept = []

    def part(name: str) -> None:
        kept.append(len(json.loads(saved.read_text()).get("tried", {"rows": []})["rows"]))
        journal.row(name, step_ms=Figure((3.0, 1.0, 2.0)))
        if name == "b":
            raise Failed("it fell over")

    assert journal.each(("a", "b", "c"), part) == 1
    assert kept == [0, 1, 2]
    told = json.loads(saved.read_text())
    assert told["other"] == 1
    assert told["tried"]["rows"][0] == {
        "part": "a",
        "step_ms": {"median": 2.0, "rounds": [3.0, 1.0, 2.0]},
    }
    assert told["tried"]["skipped"] == [{"part": "b", "why": "it fell over", "failed": True}]


def test_parts_can_be_named_alone_and_those_without_time_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 1000, 40))
    monkeypatch.setattr("benchmarks.experiment.monotonic", lambda: next(now))
    journal = Journal("tried", Options(minutes=1, parts=("a", "c", "d")))
    ran: list[str] = []
    assert journal.each("abcd", ran.append) == 0
    assert ran == ["a"]
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  c: skipped: no time was left",
        "  d: skipped: no time was left",
    ]


def test_what_a_part_leaves_of_its_time_the_next_ones_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, given = [0.0], []
    monkeypatch.setattr("benchmarks.experiment.monotonic", lambda: clock[0])
    journal = Journal("tried", Options(minutes=1))

    def part(name: str) -> None:
        given.append(journal.left_s)
        clock[0] += {"a": 0, "b": 50}.get(name, 5)

    journal.each("abcd", part)
    assert given == [15.0, 20.0, 5.0, 5.0]


def test_variants_run_in_turn_and_a_round_that_would_be_late_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.experiment.monotonic", lambda: clock[0])
    order = []

    def variant(name: str) -> Callable[[], str]:
        def run() -> str:
            clock[0] += 10
            order.append(name)
            return name

        return run

    journal = Journal("tried", Options(minutes=50 / 60))
    found = experiment.in_turn(journal, {name: variant(name) for name in "ab"}, 3)
    assert order == ["a", "b", "b", "a"]
    assert found == {"a": ["a", "a"], "b": ["b", "b"]}


def test_minutes_are_shared_and_what_one_leaves_the_next_ones_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.__main__.monotonic", lambda: clock[0])
    given = {}

    def run(self: benchmarks.Benchmark, options: Options) -> int:
        given[self.name] = round(options.minutes, 6)
        clock[0] += {"harmless": 0, "overhead": 60 * options.minutes}.get(self.name, 0)
        return int(self.name == "phases")

    monkeypatch.setattr(benchmarks.Benchmark, "run", run)
    assert benchmarks.main(["gpu", "--minutes", "29", "--seconds", "60"]) == 1
    assert list(given) == list(benchmarks.GROUPS["gpu"])
    # Shares of 4, 9, 4, 3, 6 and 4; the first one leaves all of its own.
    assert given["harmless"] == 4
    assert given["overhead"] == round(30 * 9 / 26, 6)
    left = 30 - 30 * 9 / 26
    assert given["sick"] == round(left * 6 / 10, 6)
    assert given["loaders"] == round(left, 6)
    given.clear()
    benchmarks.main(["hour", "--minutes", "60"])
    assert given == {"hour": 60}


def test_a_command_that_hangs_is_ended() -> None:
    ended = experiment.execute(("sh", "-c", "echo begun; sleep 60"), 0.5)
    assert (ended.code, ended.output) == (-15, "begun\n")
    with pytest.raises(Failed, match=r"exit status 3 \(why\)"):
        experiment.completed(("sh", "-c", "echo why >&2; exit 3"))


# ---- verdicts ----


def test_what_is_off_by_less_than_the_noise_is_neither_met_nor_missed() -> None:
    quiet, noisy = Figure((10.0, 10.1, 9.9)), Figure((10.0, 11.0, 9.5))
    assert near("", 10.39, quiet, 0.04).met
    assert near("", 10.5, quiet, 0.04).met is False
    assert near("", 11.49, noisy, 0.04).met is None
    assert near("", 11.51, noisy, 0.04).met is False
    assert Check("", math.nan, 1.0, 1.0).met is False
    assert Check("", 0.2, 1.0, 0.0, at_most=True).met
    assert str(near("step", 11.0, noisy, 0.04)) == (
        "step: 11, asked 10 ± 0.4, noise 1.5: within the noise"
    )


def test_harmless_counts_each_way_not_to_be_whole() -> None:
    good = Recorded(Ended(0, "a", ""), 48, 0, 24)
    bare = [Ended(0, "a", "")] * 8
    runs = [
        *[good] * 3,
        replace(good, ended=Ended(-11, "a", "")),
        replace(good, ended=Ended(0, "b", "")),
        replace(good, kernels=-1),
        replace(good, kernels=47),
        replace(good, kernels=3),
        replace(good, steps=23),
    ]
    assert whole_runs(bare, runs, Least(24, 24)) == (
        3,
        "exit status -11: 1; another output: 1; no trace: 1; not the kernels of most: 1; "
        "less than a kernel a step: 1; fewer steps: 1",
    )
    assert whole_runs(bare, runs, Least(0, 0))[0] == 6
    graph = replace(good, kernels=0, replays=24)
    assert whole_runs(bare, [graph], Least(24, 24)) == (1, "")
    with pytest.raises(Failed, match="differ in what they print"):
        whole_runs([*bare, Ended(0, "b", "")], runs, Least(24, 24))


def test_a_program_runs_as_often_as_there_is_time_for() -> None:
    assert harmless.affordable(30, math.inf, 0.1) == 30
    # Two runs a second, of which three (one is recorded) take three and a half.
    assert harmless.affordable(30, 10.0, 2.0) == 5
    assert harmless.affordable(30, 100.0, 2.0) == 30
    assert harmless.affordable(30, 1.0, 2.0) == 3


def of_runs(**steps: tuple[float, ...]) -> dict[str, list[Ran]]:
    return {
        name.replace("_", "."): [Ran(ms, ms, 100.0, unrecorded_ms=10.2) for ms in rounds]
        for name, rounds in steps.items()
    }


def test_overhead_asks_half_of_what_the_profiler_adds() -> None:
    runs = of_runs(bare=(10, 10.1, 9.9), recorded=(11, 11, 11), torch_profiler=(12.1, 12, 13))
    assert missed(overhead.asked(runs)) == []
    runs |= of_runs(recorded=(11.5, 11.5, 11.5))
    assert missed(overhead.asked(runs)) == ["recording adds, ms"]
    # A profiler that costs nothing does not let recording cost less than nothing.
    runs |= of_runs(recorded=(10.1, 10.1, 10.1), torch_profiler=(9, 9, 9))
    assert missed(overhead.asked(runs)) == []


def test_overhead_asks_for_the_unrecorded_step_and_for_the_idle_time_of_sampled_runs() -> None:
    runs = of_runs(bare=(10, 10.1, 9.9), recorded=(11, 11, 11))
    assert missed(overhead.asked(runs)) == []
    runs["recorded"] = [replace(ran, unrecorded_ms=10.5) for ran in runs["recorded"]]
    assert missed(overhead.asked(runs)) == ["unrecorded step, ms"]
    runs["recorded"] = [Ran(11, 11, 0, unrecorded_ms=10, launch_idle_ms=5.0)]
    runs["sampled"] = [Ran(10, 10, 0, launch_idle_ms=5.4)]
    assert missed(overhead.asked(runs)) == []
    runs["sampled"] = [Ran(10, 10, 0, launch_idle_ms=5.7)]
    assert missed(overhead.asked(runs)) == ["launch idle, ms a step"]


def test_a_long_run_is_as_long_as_time_is_left_and_its_bound_has_the_noise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.experiment.monotonic", lambda: 0.0)
    bare: Iterator[float] = iter((10.0, 10.0, 10.0, 10.4))
    default = iter((10.3, 10.45))
    asked: list[str] = []

    def ran(command: tuple[str, ...]) -> Ran:
        asked.append(command[-1])
        return Ran(next(bare), 0, 0)

    monkeypatch.setattr(overhead, "_ran", ran)
    monkeypatch.setattr(overhead, "_ran_recorded", lambda _: Ran(next(default), 0, 0))
    monkeypatch.setattr(overhead, "lacks", lambda *_: "")
    journal = Journal("overhead", Options(minutes=7))
    training = overhead.TRAININGS["resnet18"]
    for _ in range(2):
        overhead._long(journal, "long-compute", training, Options())
    # 420 s less 60 for starts, of which the default has two thirds and each bare run a sixth.
    assert asked == ["60"] * 4
    lines = capsys.readouterr().out.splitlines()[3::2]
    assert [line.rpartition(": ")[2] for line in lines] == ["MISSED", "within the noise"]


def test_phases_take_the_round_whose_error_is_the_median() -> None:
    clocks = {"forward": 0.010, "optimizer": 0.0002, "other": 0.5}
    found = ({"forward": 0.0125}, {"forward": 0.0102}, {"forward": 0.0101, "optimizer": 0.0005})
    rounds = [{"step": 0.02, "phases": clocks, "found": one} for one in found]
    checks = {check.what: check for check in phases.phases(rounds)}
    assert list(checks) == ["forward, ms", "optimizer, ms"]
    assert checks["forward, ms"].found == pytest.approx(10.2)
    assert checks["forward, ms"].met
    # Off by 0.2 ms, where 3 % of a tenth of the step is 0.06.
    assert not checks["optimizer, ms"].met


def test_what_is_recorded_of_hosts_may_cost_a_hundredth() -> None:
    assert phases.cost(Figure((1.009, 1.011, 1.0))).met
    assert phases.cost(Figure((1.02, 1.03, 1.025))).met is False
    assert phases.cost(Figure((0.97, 1.1, 1.0))).met is None
    assert phases.cost(Figure((1.02,))).met is False


def test_two_gpus_are_swapped_so_that_neither_is_in_the_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(command: Sequence[str]) -> dict[str, float]:
        is_second, is_hosts = "CUDA_VISIBLE_DEVICES=1" in command, command[-1] == "hosts"
        return {"step": (1.3 if is_second else 1.0) * (1.02 if is_hosts else 1.0)}

    monkeypatch.setattr(phases, "_told", told)
    assert phases._ratio(("bare",), ("hosts",), (0, 1)) == pytest.approx(1.02)
    assert phases._ratio(("bare",), ("hosts",), (None,)) == pytest.approx(1.02)


def test_predicted_steps_are_held_against_whole_runs_with_as_many_workers() -> None:
    bare = [{"step_ms": {"1": 54.0 + more, "8": 15.0}} for more in (0.0, 0.5, -0.5)]
    truth = loaders.steps(bare)
    predictions = [{"workers": n, "step_ns": 16_000_000 * 4 // n} for n in (1, 2, 4)]
    own = [{"workers": 2, "loader": {"predictions": predictions}}]
    (found,) = loaders.checks(own, truth)
    assert (found.found, found.wanted, found.noise, found.met) == (64.0, 54.0, 1.0, False)
    predictions[0]["step_ns"] = 58_000_000
    predictions.append({"workers": 8, "step_ns": 16_000_000})
    assert missed(loaders.checks(own, truth)) == []


def call(tid: int, start: float, end: float, name: str) -> dict[str, Any]:
    kind = {"cat": "python_function", "name": f"nn.Module: {name}"}
    return kind | {"tid": tid, "ts": start, "dur": end - start}


def launched(tid: int, moment: float, correlation: int, duration: float) -> list[dict[str, Any]]:
    args = {"args": {"correlation": correlation}}
    return [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": tid, "ts": moment} | args,
        {"cat": "kernel", "name": "k", "tid": 7, "ts": 1e6, "dur": duration} | args,
    ]


def test_kernels_belong_to_the_modules_in_whose_calls_they_were_launched() -> None:
    events = [
        call(1, 0, 100, "Net_0"),
        call(1, 10, 20, "Linear_0"),
        call(1, 30, 40, "Linear_1"),
        {"cat": "python_function", "name": "train.py(3): step", "tid": 1, "ts": 0, "dur": 200},
        *launched(1, 15, 1, 3000.0),
        *launched(1, 35, 2, 3000.0),
        *launched(1, 50, 3, 1500.0),
        *launched(1, 150, 4, 9000.0),
        *launched(2, 15, 5, 9000.0),
    ]
    truth = modules.forward_times(events)
    assert truth == pytest.approx({"Net": 2.5, "Net/Linear": 2.0})
    right = [
        {"rank": 0, "path": "Net", "forward_ns": 2_500_000},
        {"rank": 0, "path": "Net/Linear", "forward_ns": 2_080_000},
        {"rank": 1, "path": "Net", "forward_ns": 9_000_000},
    ]
    assert missed(modules.compare_trees([right], truth)) == []
    wrong = [right[0], right[1] | {"forward_ns": 2_120_000}]
    assert missed(modules.compare_trees([wrong], truth)) == ["forward of Net/Linear, ms"]


def test_sums_by_module_of_a_real_profile_are_those_of_analysis() -> None:
    path = real("tracelens", "tracelens-falconsai.json.gz")
    truth = modules.forward_times(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    with gputrace.open(path) as trace:
        rows = trace.analyze().modules
    assert len(rows) > 20
    # It is of one forward pass and of no steps.
    found = {row.path: row.forward_ns / 1e6 / modules.PROFILED for row in rows}
    assert truth == pytest.approx(found)


def test_throughput_and_power_are_held_against_the_programs_own() -> None:
    counted = [{"tokens_per_s": 1000.0, "flop_per_s": 2e12, "mfu": 0.30, "watts": 500.0}]
    told = [{"tokens_per_s": 1020.0, "flop_per_s": 2e12, "mfu": 0.32}]
    assert missed(modules.throughput(counted, told)) == ["mfu"]
    assert [c.what for c in modules.throughput(counted, [told[0] | {"mfu": None}])] == [
        "tokens_per_s",
        "flop_per_s",
    ]
    # 510 W for 2 s.
    row = {"total_mj": 1_020_000, "measured_ns": 2 * 10**9, "classes_mj": {"compute": 1_020_000}}
    assert missed(modules.energy(counted, [row])) == []
    assert modules.energy([{"watts": None}], [row]) == []
    less = row | {"classes_mj": {"compute": 1_000_000, "sync": 10_000}}
    assert missed(modules.energy(counted, [less])) == ["sum of the classes, mJ"]


def test_the_peak_of_memory_is_held_against_torchs_own() -> None:
    counted, row = (
        [{"peak_bytes": 100 << 20}],
        {"allocated_bytes": 80 << 20, "peak_bytes": 104 << 20},
    )
    assert missed(modules.memory(counted, [row])) == []
    assert missed(modules.memory(counted, [row | {"peak_bytes": None}])) == ["peak of memory, MiB"]
    assert modules.memory([{"peak_bytes": None}], [row]) == []


def answer(cure: str, ratio: float | None, verdict: str = "faster") -> Entry:
    row = Entry(**dict.fromkeys(field.name for field in fields(Entry)))  # type: ignore[arg-type]
    row = replace(row, ratio=ratio, low=ratio and ratio - 0.01, high=ratio and ratio + 0.01)
    return replace(row, cure=cure, verdict=verdict, bare_ns=20e6, rounds=5, why="")


def test_a_trial_is_right_if_the_fastest_single_cure_was_planted() -> None:
    rows = [
        answer("tf32", 0.5),
        answer("bf16", 0.25),
        answer("bf16+tf32", 0.2),
        answer("compile=default", None, "failed"),
    ]
    fastest = sick.fastest_of(rows)
    assert fastest == rows[1]
    assert sick.fastest_of(rows[3:]) is None
    hand = sick.gains([{"sick": 4.0, "cured": 1.0}, {"sick": 4.1, "cured": 1.0}])
    assert hand == pytest.approx((300.0, 310.0))
    assert missed(sick.asked(TRAININGS["fp32"], [Trial(fastest, (304.0,))])) == []
    far = sick.asked(TRAININGS["fp32"], [Trial(fastest, (306.0,))])
    assert missed(far) == ["gain of bf16, %"]
    # Changes by hand that differ by ten points do not tell six apart.
    unclear = sick.asked(TRAININGS["fp32"], [Trial(fastest, (306.0, 316.0, 306.0))])
    assert [check.met for check in unclear] == [True, None]
    other = sick.asked(TRAININGS["nchw"], [Trial(fastest, (300.0,)), Trial(None, (1.0,))])
    assert missed(other) == ["trials that found the planted cure"]


def test_a_row_of_the_ledger_is_as_the_study_has_it() -> None:
    row = replace(answer("tf32", 1 / 3.84), bare_ns=24.6e6)
    row = replace(row, low=1 / 3.98, high=1 / 3.71, predicted=1 / 3.48)
    row = replace(row, predicted_low=1 / 4.21, predicted_high=1 / 1.51)
    measured = "24.6 → 6.41 ms, 3.8x faster (3.7x to 4.0x)"
    shown = f"| `fp32.py` | `tf32` | {measured} | 3.5x (1.51x to 4.2x) |"
    assert sick.ledger_row("fp32", row) == f"{shown} 24.6 | 5 |  |"
    study = (ROOT / "docs" / "studies" / "cures.md").read_text(encoding="utf-8")
    assert f"{shown} 24.6 | 5 |  |" in study


# ---- with the stand-in for a GPU ----


@pytest.fixture
def stand_in(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Have programs of experiments meet our libcupti."""
    monkeypatch.setenv("GPUTRACE_CUPTI", str(machine.folder / "libcupti.so.13"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(machine.folder))
    return machine


ON_STAND_IN: Final = ("--backend", "cupti", "--no-nvml")


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("", 0, "whole 2 of 2; armed 2 of 2; kernels 48; replays 3; steps 0; not whole –"),
        (
            'echo "$GPUTRACE_DIR"',
            1,
            "whole 0 of 2; armed 2 of 2; kernels 48; replays 3; steps 0; not whole an",
        ),
        ('[ -z "$GPUTRACE_DIR" ]', 1, "not whole exit status 1: 2"),
    ],
)
def test_a_program_that_notices_the_recorder_is_not_whole(
    stand_in: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    code: int,
    said: str,
) -> None:
    work = shlex.join(stand_in.command("inject storm 48 1 replays 3 say done"))
    command = ("sh", "-c", f"{work}; {script}")
    monkeypatch.setattr(experiment, "has_driver", lambda: True)
    monkeypatch.setattr(harmless, "program", lambda *_: command)
    monkeypatch.setattr(harmless, "PROGRAMS", {"sh": harmless.Program(("",), (), how=ON_STAND_IN)})
    assert harmless.run(Options(asked_runs=2)) == code
    assert said in capsys.readouterr().out


def test_a_recorded_run_has_what_the_program_and_what_analysis_says(stand_in: Machine) -> None:
    told = '{"mean_ms":2.5,"median_ms":2.4,"peak_mib":10,"steps":40}'
    command = stand_in.command(["inject", "nvtx", "train", "40", "8", "50", "say", told])
    ran = overhead._ran_recorded(command, *ON_STAND_IN)
    assert (ran.mean_ms, ran.median_ms, ran.steps) == (2.5, 2.4, 40)
    # Eight launches with 50 us between, of kernels that are shorter.
    assert ran.unrecorded_ms > 0.4
    assert 0 < ran.launch_idle_ms < ran.unrecorded_ms
