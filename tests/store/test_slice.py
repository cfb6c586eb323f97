"""A part cut out of a trace: small, of the same kind, and with the same answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gputrace
from gputrace.api import Report
from gputrace.data import unpacked
from tests.helpers import command
from tests.helpers.examples import few
from tests.helpers.exports import KERNEL, NVTX, RUNTIME, Export, global_id
from tests.helpers.handmade import Run, train
from tests.helpers.lookups import rows
from tests.synthetic import Plan, simulate, write_nsys, write_nvml

DATAPARALLEL: Final = "h200x4-dataparallel-7-9.sqlite"
PLAN: Final = Plan(steps=12, warmup_steps=0, kernels_per_step=24, data_wait_ns=2_000_000)
USAGE: Final = 2


def export(source: Path, target: Path, time: str | tuple[int, int]) -> Path:
    with gputrace.open(source) as trace:
        trace.export("trace", target, time=time, force=True)
    return target


def analyze(path: Path, time: str | tuple[int, int] | None = None) -> Report:
    with gputrace.open(path) as trace:
        return trace.analyze(time=time, gaps=200)


def answers(report: Report) -> object:
    """Return what an analysis says of a window, without the steps, which need what is outside."""
    gaps = report.gaps
    listed = [replace(gap, step=None) for gap in gaps.largest]
    return report.gpus, gaps.count, gaps.total_ns, gaps.by_cause, listed


@settings(max_examples=few(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1_000),
    ranks=st.integers(1, 2),
    input_copies=st.integers(0, 2),
    allocs_per_step=st.integers(0, 3),
    sync_every_step=st.booleans(),
    # Input copies are told by their coming again: the part has four steps of the twelve, or more.
    edges=st.tuples(st.integers(0, 300), st.integers(650, 1_000)),
    inner=st.tuples(st.integers(0, 999), st.integers(1, 1_000)).map(sorted),
)
def test_a_window_of_the_part_has_the_answers_of_the_whole(
    tmp_path: Path, edges: tuple[int, int], inner: list[int], **values: int
) -> None:
    whole = tmp_path / "whole.sqlite"
    whole.unlink(missing_ok=True)
    fields = {name: getattr(PLAN, name) for name in PLAN.__dataclass_fields__} | values
    write_nsys(simulate(Plan(**fields)), whole)
    ((start, end),) = rows(whole, f"SELECT min(start), max(end) FROM {KERNEL}")
    first, last = (int(start + (end - start) * edge // 1_000) for edge in edges)
    part = export(whole, tmp_path / "part.sqlite", (first, last))
    begin, end = (first + (last - first) * edge // 1_000 for edge in inner)
    assert answers(analyze(part, (first, last))) == answers(analyze(whole, (first, last)))
    if begin < end:
        assert answers(analyze(part, (begin, end))) == answers(analyze(whole, (begin, end)))


def test_a_part_of_a_real_trace_has_its_answers(
    recording: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = recording(DATAPARALLEL)
    part = export(whole, tmp_path / "part.sqlite", "36.2s:37s")
    assert part.stat().st_size < whole.stat().st_size / 5
    for time in ("36.2s:37s", "36.3s:36.4s"):
        assert answers(analyze(part, time)) == answers(analyze(whole, time))


@pytest.mark.parametrize("time", ["8s:8.3s", "8.2s:8.6s", "7.5s:8.1s"])
def test_a_part_of_a_recording_of_ours_lacks_no_steps(tmp_path: Path, time: str) -> None:
    with unpacked("demo.sqlite.xz") as whole:
        part = export(whole, tmp_path / "part.sqlite", time)
        expected = analyze(whole, time)
    report = analyze(part)
    assert "steps without any work" not in {part.evidence for part in report.missing}
    assert report.findings[0].id == expected.findings[0].id


def test_rows_that_touch_the_window_are_whole_and_others_are_few(tmp_path: Path) -> None:
    export_ = Export()
    for index in range(100):
        export_.kernel(100 * index, 100 * index + 50, f"kernel {index}")
    whole = export_.write(tmp_path / "whole.sqlite")
    part = export(whole, tmp_path / "part.sqlite", (2_020, 2_220))
    times = rows(part, f"SELECT start, end FROM {KERNEL} ORDER BY start")
    # One more on each side: the gaps at the edges begin and end there.
    assert times == [(1900, 1950), (2000, 2050), (2100, 2150), (2200, 2250), (2300, 2350)]


def test_only_texts_that_are_named_come_along(tmp_path: Path) -> None:
    made = Export().kernel(0, 10, "early").kernel(100, 110, "inside").kernel(200, 210, "late")
    made.kernel(900, 910, "much later")
    part = export(made.write(tmp_path / "whole.sqlite"), tmp_path / "part.sqlite", (95, 150))
    assert rows(part, "SELECT value FROM StringIds ORDER BY id") == [
        ("early",),
        ("inside",),
        ("late",),
    ]


def test_calls_come_along_with_what_they_issued(tmp_path: Path) -> None:
    made = Export()
    for index in range(10):
        made.call(10 * index, 10 * index + 5, "cudaLaunchKernel", correlation=index + 1)
        made.kernel(1_000 * (index + 1), 1_000 * (index + 1) + 10, correlationId=index + 1)
    part = export(made.write(tmp_path / "whole.sqlite"), tmp_path / "part.sqlite", (5_000, 5_001))
    issued = f"SELECT count(*) FROM {KERNEL} JOIN {RUNTIME} USING (correlationId)"
    assert rows(part, issued) == rows(part, f"SELECT count(*) FROM {KERNEL}") == [(3,)]


def test_what_names_domains_comes_along_from_anywhere(tmp_path: Path) -> None:
    thread = global_id(100, thread=100)
    made = Export().kernel(1_000, 1_100)
    made.add(NVTX, start=1, eventType=75, globalTid=thread, text="NCCL", domainId=1)
    for start in (10, 20, 30):
        made.add(NVTX, start=start, end=start + 1, eventType=59, globalTid=thread, text="x")
    part = export(made.write(tmp_path / "whole.sqlite"), tmp_path / "part.sqlite", (1_000, 1_010))
    assert rows(part, f"SELECT start, eventType FROM {NVTX} ORDER BY start") == [(1, 75), (30, 59)]


def test_samples_of_cards_come_along_with_one_more_on_each_side(tmp_path: Path) -> None:
    """One every 2 ms and card: those of 10 ms are 5, and 7 with the nearest of both sides."""
    recording = simulate(replace(PLAN, ranks=2))
    write_nsys(recording, tmp_path / "whole", osrt=False)
    write_nvml(recording, tmp_path / "whole", every_ns=2_000_000)
    first = rows(tmp_path / "whole", "SELECT min(timeNs) FROM GPUTRACE_NVML_SAMPLE")[0][0]
    assert isinstance(first, int)
    start = first + 60_000_001
    export(tmp_path / "whole", tmp_path / "part", (start, start + 10_000_000))
    sql = "SELECT count(*) FROM GPUTRACE_NVML_SAMPLE GROUP BY gpu"
    assert rows(tmp_path / "part", sql) == [(7,), (7,)]
    ran = command.gputrace(
        "export", tmp_path / "whole", "--to", "trace", "--time", f"{first}ns:{first + 10**7}ns",
        "-o", tmp_path / "none",
    )  # fmt: skip
    command.assert_refused(ran, USAGE, "nothing was recorded in that window")


def test_small_tables_come_along_whole(h100: Path, tmp_path: Path) -> None:
    part = export(h100, tmp_path / "part.sqlite", "156.06s:156.061s")
    names = "SELECT name FROM sqlite_master WHERE name NOT LIKE '%GPUTRACE%' AND sql LIKE '%TABLE%'"
    names += " AND type = 'table' ORDER BY name"
    assert rows(part, names) == rows(h100, names)
    for table in ("TARGET_INFO_CUDA_STREAM", "META_DATA_EXPORT", "PROCESSES"):
        assert rows(part, f"SELECT * FROM {table}") == rows(h100, f"SELECT * FROM {table}")


def test_the_analysis_says_that_it_is_a_part(tmp_path: Path) -> None:
    run = Run()
    train(run, 8)
    whole = run.export.write(tmp_path / "whole.sqlite")
    part = export(whole, tmp_path / "part.sqlite", "5ms:12ms")
    assert "Cut out of a larger trace, 0.005s to 0.012s" in str(analyze(part)).replace("\n", " ")


def test_a_part_of_a_part_is_one(tmp_path: Path) -> None:
    run = Run()
    train(run, 8)
    whole = run.export.write(tmp_path / "whole.sqlite")
    part = export(whole, tmp_path / "part.sqlite", "2ms:12ms")
    smaller = export(part, tmp_path / "smaller.sqlite", "5ms:8ms")
    assert answers(analyze(smaller, "5ms:8ms")) == answers(analyze(whole, "5ms:8ms"))


def test_the_command_writes_the_part_and_leaves_the_trace_alone(tmp_path: Path) -> None:
    folder = tmp_path / "input"
    folder.mkdir()
    run = Run()
    train(run, 8)
    whole, part = run.export.write(folder / "whole.sqlite"), tmp_path / "part.sqlite"
    before = command.state(folder)
    ran = command.gputrace("export", whole, "--to", "trace", "--time", "5ms:12ms", "-o", part)
    assert (ran.code, ran.out, ran.err) == (0, "", f"gputrace: wrote {part}\n")
    assert command.state(folder) == before
    assert part.stat().st_mode & 0o077 == 0
    analyzed = command.gputrace("analyze", part, "--time", "5ms:12ms", "--json")
    assert analyzed.code == 0


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    whole = Export().kernel(0, 10).kernel(20, 30).write(tmp_path / "whole.sqlite")
    part = tmp_path / "part.sqlite"
    part.write_text("mine")
    words = ("export", whole, "--to", "trace", "--time", "0:1", "-o", part)
    command.assert_refused(command.gputrace(*words), USAGE, str(part), "exists", "--force")
    assert part.read_text() == "mine"
    assert command.gputrace(*words, "--force").code == 0
    assert analyze(part).span_ns == 30


def test_the_trace_itself_is_never_the_output(tmp_path: Path) -> None:
    whole = Export().kernel(0, 10).write(tmp_path / "whole.sqlite")
    before = command.state(tmp_path)
    words = ("export", whole, "--to", "trace", "--time", "0:1", "-o", whole, "--force")
    command.assert_refused(command.gputrace(*words), USAGE, "is the trace itself")
    assert command.state(tmp_path) == before


@pytest.mark.parametrize(
    ("time", "words"),
    [
        (["--time", "5s:6s"], "nothing was recorded in that window"),
        (["--time", "6s:5s"], "ends before it starts"),
        ([], "would be a copy"),
    ],
)
def test_windows_that_make_no_part_are_refused(time: list[str], words: str, tmp_path: Path) -> None:
    whole = Export().kernel(0, 10).write(tmp_path / "whole.sqlite")
    part = tmp_path / "part.sqlite"
    ran = command.gputrace("export", whole, "--to", "trace", *time, "-o", part)
    command.assert_refused(ran, USAGE, words)
    assert list(tmp_path.iterdir()) == [whole]


def test_a_broken_trace_leaves_no_part(h100: Path, tmp_path: Path) -> None:
    content = bytearray(h100.read_bytes())
    content[400_000:3_000_000] = bytes(2_600_000)
    whole = tmp_path / "whole.sqlite"
    whole.write_bytes(content)
    part = tmp_path / "part.sqlite"
    ran = command.gputrace("export", whole, "--to", "trace", "--time", ":157s", "-o", part)
    command.assert_refused(ran, command.UNREADABLE, str(whole), "broken")
    assert list(tmp_path.iterdir()) == [whole]


def test_a_part_is_judged_without_what_it_holds_around_its_window(tmp_path: Path) -> None:
    """Its context has the next input copy, long after the window: the GPU did not idle till then.

    The step that the window cuts lacks most of its kernels.
    """
    run = Run()
    train(run, 12)
    whole = run.export.write(tmp_path / "whole.sqlite")
    steps = analyze(whole).step_list
    middle = (steps[8].start_ns + steps[8].end_ns) // 2
    window = steps[2].start_ns, middle
    found, expected = (
        analyze(export(whole, tmp_path / "part.sqlite", window)),
        analyze(whole, window),
    )
    of_a_step = [{r.total_ns // r.steps for r in report.breakdown} for report in (found, expected)]
    assert of_a_step[0] == of_a_step[1]
    assert max(step.end_ns for step in found.step_list if step.phase == "steady") <= middle


def test_launches_whose_operation_lies_after_the_cut_are_not_lost(tmp_path: Path) -> None:
    """The host runs ahead: the window has launches of which the kernels came later."""
    run = Run()
    run.input_copy()
    for _ in range(10):
        run.kernels(120, "gemm", 100_000)
    run.synchronize()
    run.input_copy()
    whole = run.export.write(tmp_path / "whole.sqlite")
    part = export(whole, tmp_path / "part.sqlite", (0, 5_000_000))
    assert not analyze(part).missing
