"""``gputrace check``: limits, a baseline, findings; each gate with its figure."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.analyzers.test_host_only_traces import Made
from tests.analyzers.test_host_only_traces import train as host_steps
from tests.helpers import command
from tests.helpers.command import assert_refused
from tests.helpers.exports import Export
from tests.helpers.handmade import MS, Run, train
from tests.synthetic import Plan, simulate, write_nsys

MET, NOT_MET, USAGE, UNREADABLE = 0, 1, 2, 3


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of 3.34 ms, of which 0.95 ms (28 %) wait for data."""
    return trained(tmp_path_factory.mktemp("check") / "waiting.sqlite", MS)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trace without the wait."""
    return trained(tmp_path_factory.mktemp("check") / "quick.sqlite", 0)


@pytest.fixture
def stepless(tmp_path: Path) -> Path:
    return Export().kernel(0, 40).kernel(60, 100).write(tmp_path / "stepless.sqlite")


def trained(path: Path, wait: int) -> Path:
    run = Run()
    train(run, wait=wait)
    return run.export.write(path)


def noisy(path: Path, wait: int) -> Path:
    """Steps of 20 ms without a GPU that wait for data every other time, ten times as long."""
    made = Made(path)
    made.process(1, 0)
    for number in range(20):
        made.step(20 * number, 20 * number + 20)
        made.wait(20 * number, 20 * number + wait * (5 if number % 4 == 0 else 0.1))
    made.report()
    return path


def gates(*arguments: str | Path, code: int) -> list[dict[str, Any]]:
    """The gates of the JSON of a check that ends with a code."""
    ran = command.gputrace("check", *arguments, "--json")
    assert (ran.code, ran.err) == (code, "")
    found = json.loads(ran.out)
    assert found["passed"] == (code == MET) == all(gate["passed"] for gate in found["gates"])
    listed: list[dict[str, Any]] = found["gates"]
    return listed


KEPT = (
    *("--max-data-feeding", "30%", "--max-idle", "40%", "--min-compute", "60%"),
    *("--max-step-time", "3.4ms", "--max-step-time-p95", "3.4ms"),
    *("--min-throughput", "9000", "--batch", "32", "--fail-on", "alloc-stall"),
)
BROKEN = (
    *("--max-data-feeding", "20%", "--max-idle", "20%", "--min-compute", "90%"),
    *("--max-step-time", "3.3ms", "--max-step-time-p95", "3.3ms"),
    *("--min-throughput", "10000", "--global-batch", "32"),
    *("--fail-on", "data-feeding", "--fail-on", "medium"),
)


def test_the_share_of_a_cause_is_limited(waiting: Path) -> None:
    limits = ("data-feeding=20%", "data=1ms", "garbage-collection=5%", "launch-bound=5ms")
    options = [word for limit in limits for word in ("--max-cause", limit)]
    feeding, data, garbage, launch = gates(waiting, *options, code=NOT_MET)
    assert feeding["id"] == "max-cause data-feeding"
    assert feeding["message"] == (
        "the time lost to waiting for the next batch (input) is 28.5% of a step; at most 20% asked "
        "for"
    )
    # A general cause includes its parts.
    assert (data["passed"], data["value"]) == (True, pytest.approx(952_850))
    assert data["message"].startswith("the time lost to input is 953 µs of a step; at most 1.00 ms")
    assert (garbage["passed"], garbage["value"], garbage["limit"]) == (True, 0, 0.05)
    assert (launch["passed"], launch["unit"]) == (True, "ns")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Steps of 20 ms without a GPU, 12 of them waiting for data."""
    made = Made(tmp_path / "host.sqlite")
    made.process(1, 0)
    host_steps(made)
    made.report()
    return made.path


@pytest.mark.parametrize(
    ("limits", "code", "messages"),
    [
        (
            ("--max-data-wait", "50%"),
            NOT_MET,
            ["the host waits for data for 60% of a step; at most 50% asked for"],
        ),
        (
            ("--max-data-wait", "12ms", "--max-slow-steps", "0%", "--max-step-time", "20ms"),
            0,
            [
                "a step takes 20.0 ms; at most 20.0 ms asked for",
                "steps over 1.3 times the median are 0% of all; at most 0% asked for",
                "the host waits for data for 12.0 ms of a step; at most 12.0 ms asked for",
            ],
        ),
        (
            ("--max-data-feeding", "5%"),
            NOT_MET,
            ["unknown: no GPU activity was recorded; without a GPU use --max-data-wait"],
        ),
        (
            ("--max-cause", "data=50%", "--max-cause", "garbage-collection=5%"),
            NOT_MET,
            [
                "the time lost to input is 60% of a step; at most 50% asked for",
                "the time lost to garbage collection (host) is 0% of a step; at most 5% asked for",
            ],
        ),
        (
            ("--max-cause", "launch-bound=5%"),
            NOT_MET,
            ["unknown: no GPU activity was recorded"],
        ),
        (
            ("--max-cause", "host=10%", "--max-cause", "gil-wait=5%"),
            NOT_MET,
            [
                "unknown: no GPU activity was recorded; without a GPU, limit its parts: "
                "garbage-collection, recompilation, warmup, checkpoint-stall, update-waits, "
                "host-work, gil-wait, cpu-throttled, cpu-starved, page-faults, slow-cores",
                "unknown: the host was not sampled",
            ],
        ),
        (
            ("--max-cause", "cpu-starved=5%"),
            NOT_MET,
            ["unknown: the time of the host's threads was not counted"],
        ),
    ],
)
def test_a_machine_without_a_gpu_can_hold_gates(
    host: Path, limits: tuple[str, ...], code: int, messages: list[str]
) -> None:
    assert sorted(gate["message"] for gate in gates(host, *limits, code=code)) == sorted(messages)


def test_a_baseline_holds_without_a_gpu(host: Path) -> None:
    (gate,) = gates(host, "--baseline", host, code=0)
    assert gate["evaluated"]


def test_a_cause_without_a_gpu_is_unknown(tmp_path: Path) -> None:
    host = Made(tmp_path / "host.sqlite")
    host.process(1, 0)
    host_steps(host)
    host.report()
    (gate,) = gates(host.path, "--max-cause", "launch-bound=5%", code=NOT_MET)
    assert (gate["evaluated"], gate["message"]) == (False, "unknown: no GPU activity was recorded")


def test_a_program_s_own_work_is_unknown_where_its_passes_are(tmp_path: Path) -> None:
    host = Made(tmp_path / "host.sqlite")
    host.process(1, 0)
    host_steps(host)
    host.report()
    (gate,) = gates(host.path, "--max-cause", "host-work=5%", code=NOT_MET)
    assert not gate["evaluated"]
    assert gate["message"].startswith("unknown: no forward passes were recorded")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "host-blocked=5%",
            "'host-blocked' is a finding and no cause: give --fail-on host-blocked",
        ),
        ("hunger=5%", "'hunger' is not a cause of lost time; choose from data, loader-restart, "),
        ("host=much", "--max-cause host much: write 10% of a step, or a time, 5ms"),
        ("host", "--max-cause host: write 10% of a step, or a time, 5ms"),
    ],
)
def test_a_limit_of_a_cause_that_makes_no_sense_is_refused(
    waiting: Path, given: str, words: str
) -> None:
    ran = command.gputrace("check", waiting, "--max-cause", given)
    assert_refused(ran, USAGE, words)


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("--max-cause=data=+20%", NOT_MET),
        ("--max-cause=data=+500us", NOT_MET),
        ("--max-cause=data=+50%", MET),
        ("--max-data-feeding=+20%", NOT_MET),
        ("--max-data-feeding=+50%", MET),
        ("--max-idle=+20%", NOT_MET),
        ("--max-sync=+1%", MET),
    ],
)
def test_a_limit_may_be_relative_to_the_baseline(
    waiting: Path, quick: Path, limit: str, code: int
) -> None:
    (gate, _) = gates(waiting, limit, "--baseline", quick, "--max-slowdown=90%", code=code)
    assert gate["evaluated"]
    assert gate["passed"] == (code == MET)


def test_a_relative_limit_tells_what_is_more_with_its_bounds(waiting: Path, quick: Path) -> None:
    (gate, _) = gates(waiting, "--max-cause=data=+20%", "--baseline", quick, code=NOT_MET)
    assert gate["message"] == (
        "the time lost to input is 39.6% of a step more than in the baseline (+35.2% to +44%); at "
        "most 20% more asked for"
    )
    assert (gate["unit"], gate["limit"]) == ("share", 0.2)


def test_a_relative_limit_is_of_as_many_samples(waiting: Path, quick: Path) -> None:
    """Of twice the batch, a step may take twice as long."""
    limit = "--max-compute=+20%", "--max-slowdown=90%", "--baseline"
    same, twice = (
        gates(waiting, *limit, quick, "--batch", batch, code=code)[0]
        for batch, code in (("32,32", MET), ("64,32", MET))
    )
    assert "the work" not in same["message"]
    assert same["value"] == pytest.approx(0, abs=0.1)
    assert twice["message"].endswith("a step does 2x the work, and the baseline's times count 2x")
    assert twice["value"] < -0.2


def test_what_the_noise_of_the_steps_explains_is_no_growth(tmp_path: Path) -> None:
    a, b = (noisy(tmp_path / f"{wait}.sqlite", wait) for wait in (1, 3))
    options = "--max-data-wait=+5%", "--baseline", a, "--max-slowdown=90%"
    (gate, _) = gates(b, *options, code=MET)
    assert gate["value"] > gate["limit"]
    assert "the noise of the steps could explain it: about" in gate["message"]
    assert not gates(b, "--max-data-wait=9%", code=NOT_MET)[0]["passed"]


def test_growth_is_unknown_where_the_baseline_does_not_know_the_figure(
    waiting: Path, host: Path
) -> None:
    (gate, _) = gates(waiting, "--max-cause=data=+5%", "--baseline", host, code=NOT_MET)
    assert gate["message"] == "unknown: in the baseline, it ran on other GPUs"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--max-cause=data=+5%", "a limit such as +5% needs --baseline"),
        ("--max-step-time=+5ms", "only parts of a step can be relative to a baseline"),
        ("--min-compute=+5%", "only parts of a step can be relative to a baseline"),
        ("--max-slow-steps=+5%", "only parts of a step can be relative to a baseline"),
    ],
)
def test_a_relative_limit_that_makes_no_sense_is_refused(
    waiting: Path, option: str, words: str
) -> None:
    assert_refused(command.gputrace("check", waiting, option), USAGE, words)


@pytest.mark.parametrize(
    "name", ["launch-bound", "Launch-Bound", "launch overhead", "host: launch overhead"]
)
def test_a_cause_may_be_named_by_its_label(waiting: Path, name: str) -> None:
    (gate,) = gates(waiting, "--max-cause", f"{name}=50%", code=MET)
    assert gate["id"] == "max-cause launch-bound"


def test_limits_of_one_cause_are_all_held(waiting: Path) -> None:
    assert len(gates(waiting, "--max-cause=data=50%", "--max-cause=data=9ms", code=MET)) == 2


@pytest.mark.parametrize(("options", "code"), [(KEPT, MET), (BROKEN, NOT_MET)])
def test_limits_are_kept_or_not(waiting: Path, options: tuple[str, ...], code: int) -> None:
    found = gates(waiting, *options, code=code)
    assert {gate["passed"] for gate in found} == {code == MET}
    assert all(gate["evaluated"] for gate in found)
    assert len(found) == len([word for word in options if word.startswith(("--m", "--f"))])


@pytest.mark.parametrize(("limit", "code"), [("1ms", MET), ("900us", NOT_MET)])
def test_a_class_may_be_limited_in_time(waiting: Path, limit: str, code: int) -> None:
    (gate,) = gates(waiting, "--max-data-feeding", limit, code=code)
    assert (gate["unit"], gate["value"]) == ("ns", pytest.approx(950_000, rel=0.01))


def test_a_gate_tells_its_figure_and_its_limit(waiting: Path) -> None:
    (gate,) = gates(waiting, "--max-data-feeding", "10%", code=NOT_MET)
    assert (gate["id"], gate["unit"], gate["limit"]) == ("max-data-feeding", "share", 0.1)
    assert gate["value"] == pytest.approx(0.95 / 3.34, rel=0.01)
    assert gate["message"] == "data feeding takes 28.5% of a step; at most 10% asked for"


def test_all_gates_are_told_and_those_that_fail_first(waiting: Path) -> None:
    limits = ("--max-step-time", "4ms", "--max-idle", "1%", "--max-alloc", "1%")
    ran = command.gputrace("check", waiting, *limits)
    verdict, *lines = ran.out.splitlines()
    assert verdict == "1 of 3 gates is not met."
    told = [line.split()[:2] for line in lines if line.startswith(("ok", "FAILED"))]
    assert told == [["FAILED", "max-idle:"], ["ok", "max-step-time:"], ["ok", "max-alloc:"]]


def test_what_cannot_be_told_is_not_met(stepless: Path) -> None:
    limits = ("--max-data-feeding", "99%", "--max-step-time", "1h", "--min-throughput", "0")
    for gate in gates(stepless, *limits, "--batch", "1", code=NOT_MET):
        assert (gate["passed"], gate["evaluated"], gate["value"]) == (False, False, None)
        assert "no measured steps" in gate["message"]


def test_a_throughput_without_a_batch_is_not_met(waiting: Path) -> None:
    (gate,) = gates(waiting, "--min-throughput", "1", code=NOT_MET)
    assert "--batch" in gate["message"]


def test_a_slower_run_fails_beside_its_baseline(waiting: Path, quick: Path) -> None:
    (gate,) = gates(waiting, "--baseline", quick, code=NOT_MET)
    assert gate["id"] == "max-slowdown"
    assert gate["value"] == pytest.approx(0.95 / 2.39, rel=0.02)
    assert gate["limit"] == 0.03
    gates(waiting, "--baseline", quick, "--max-slowdown", "50%", code=MET)
    gates(quick, "--baseline", waiting, "--max-slowdown", "0%", code=MET)


def test_a_slow_down_within_the_noise_is_let_through(tmp_path: Path) -> None:
    plan = Plan(steps=14, kernels_per_step=40, hiccup_rate=0.3, data_wait_ns=500_000)
    paths = [tmp_path / name for name in ("a.sqlite", "b.sqlite")]
    for path, seed in zip(paths, (3, 4), strict=True):
        write_nsys(simulate(replace(plan, seed=seed, sync_every_step=True)), path)
    results = [
        gates(a, "--baseline", b, "--max-slowdown", "0%", code=MET)[0]
        for a, b in (paths, paths[::-1])
    ]
    slower = max(results, key=lambda gate: float(gate["value"]))
    assert slower["value"] > 0
    assert "noise" in slower["message"]


def test_a_baseline_without_steps_is_not_met(waiting: Path, stepless: Path) -> None:
    (gate,) = gates(waiting, "--baseline", stepless, code=NOT_MET)
    assert "no steps were found" in gate["message"]


def test_a_baseline_on_other_gpus_is_not_met(waiting: Path, tmp_path: Path) -> None:
    write_nsys(simulate(Plan(ranks=2, steps=10, kernels_per_step=40)), tmp_path / "two.sqlite")
    (gate,) = gates(waiting, "--baseline", tmp_path / "two.sqlite", code=NOT_MET)
    assert "2 GPUs" in gate["message"]


def test_junit_tells_failures_from_errors(waiting: Path) -> None:
    limits = ("--max-idle", "1%", "--max-alloc", "1%", "--min-throughput", "1")
    ran = command.gputrace("check", waiting, *limits, "--format", "junit")
    assert ran.code == NOT_MET
    suite = ET.fromstring(ran.out)
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["3", "1", "1"]
    cases = {case.get("name"): case[0].tag for case in suite}
    assert cases == {"max-idle": "failure", "max-alloc": "system-out", "min-throughput": "error"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ((), "no limit"),
        (("--max-slowdown", "3%"), "--baseline"),
        (("--max-idle", "20"), "10%"),
        (("--max-idle", "-1%"), "--max-idle"),
        (("--max-idle", "nan%"), "--max-idle"),
        (("--max-step-time", "10%"), "65ms"),
        (("--max-step-time", "65"), "65ms"),
        (("--fail-on", "data-feedign"), "data-feeding"),
        (("--min-throughput", "fast"), "--min-throughput"),
    ],
)
def test_wrong_usage(waiting: Path, options: tuple[str, ...], word: str) -> None:
    assert_refused(command.gputrace("check", waiting, *options), USAGE, word)


def test_a_trace_or_a_baseline_that_cannot_be_read(waiting: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.sqlite"
    assert_refused(command.gputrace("check", nowhere, "--max-idle", "1%"), UNREADABLE, "nowhere")
    assert_refused(command.gputrace("check", waiting, "--baseline", nowhere), UNREADABLE, "nowhere")
