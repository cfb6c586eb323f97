"""The report on a terminal: its tables at any width, its numbers and its sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.api import Report
from gputrace.model.results import Gap, LedgerRow, WhatIf
from gputrace.report import Table, render, tables, text, wording
from gputrace.units import format_bytes, format_ns, format_number

WIDTHS: Final = (40, 60, 80, 120)
QUANTITY: Final = re.compile(r"\d+(?:\.\d+)? (?:ns|µs|ms|s)\b")
FIGURES: Final = Table(
    "Kernels",
    ("", "family", "times", "median", "", "evidence"),
    (
        ("a_kernel_with_a_rather_long_name", "gemm", "1,234", "52.4 ms", "12.1%", "no CUDA call"),
        ("b", "normalisation", "7", "340 µs", "<0.1%", "cudaLaunchKernel 5.47 µs (thread 5617)"),
    ),
)


@pytest.fixture(scope="module")
def report(h100: Path) -> Iterator[Report]:
    with gputrace.open(h100) as trace:
        yield trace.analyze()


def printed(table: Table, width: int) -> str:
    console = text.open_console(width, color=False)
    text.print_table(console, table)
    return text.without_blanks(console)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_cell_is_cut_at_any_width(width: int) -> None:
    shown = printed(FIGURES, width)
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.split())
    for cell in (cell for row in FIGURES.rows for cell in row[:-1]):
        assert cell in words
    assert "no CUDA call" in words


@pytest.mark.parametrize("width", WIDTHS)
def test_no_number_of_a_real_report_is_cut_or_parted_from_its_unit(
    width: int, report: Report
) -> None:
    shown = render(report, "text", width)
    assert max(map(len, shown.splitlines())) <= width
    assert not re.search(r"(?<!\w)\d[\d.,]*…|\d$\n\s*(µs|ms|s)\b", shown, re.MULTILINE)
    assert set(QUANTITY.findall(render(report, "text", 200))) <= set(QUANTITY.findall(shown))


def test_a_table_that_is_too_wide_goes_on_below_with_its_first_cells() -> None:
    wide = Table("Wide", ("", *(f"column {n}" for n in range(6))), (("gpu 0", *"123456"),))
    assert printed(wide, 40).splitlines() == [
        "Wide",
        "        column 0 column 1 column 2",
        "  gpu 0        1        2        3",
        "",
        "        column 3 column 4 column 5",
        "  gpu 0        4        5        6",
        "",
    ]


def test_a_share_stays_with_the_time_that_it_is_of() -> None:
    pairs = Table(
        "Pairs", ("", "device 1", "", "device 2", ""), (("x", "1 ms", "9%", "2 ms", "8%"),)
    )
    assert [line.split() for line in printed(pairs, 20).splitlines()[1:]] == [
        ["device", "1"],
        ["x", "1", "ms", "9%"],
        [],
        ["device", "2"],
        ["x", "2", "ms", "8%"],
        [],
    ]


def test_columns_that_say_nothing_in_any_row_are_left_out() -> None:
    table = Table(
        "",
        ("", "size", "wait", "step", "bus"),
        (("a", "?", "–", "", "?"), ("b", "?", "?", "", "1")),
    )
    assert table.header == ("", "bus")
    assert table.rows == (("a", "?"), ("b", "1"))


def test_times_are_in_microseconds_with_their_sign(report: Report) -> None:
    for form in ("text", "markdown"):
        assert " µs" in report.render(form)
        assert not re.search(r"\d us\b", report.render(form))


def with_gaps(report: Report, *lengths: int) -> Report:
    """The report with steps of 1 ms, and gaps of some lengths in them."""
    rows = tuple(Gap(0, 0, 1, 0, length, "launch", "no CUDA call") for length in lengths)
    gaps = replace(report.gaps, largest=rows, largest_in_steps=rows)
    return replace(report, gaps=gaps, steps=replace(report.steps, mean_ns=1_000_000))


def test_gaps_below_half_a_percent_of_a_step_are_not_listed(report: Report) -> None:
    table = tables.gaps_table(with_gaps(report, 40_000, 5_000, 4_999), 10)
    assert table is not None
    assert [row[1] for row in table.rows] == ["40.0 µs", "5.00 µs"]
    assert tables.gaps_table(with_gaps(report, 4_999), 10).rows == ()


def test_gaps_of_one_cause_that_are_about_as_long_share_a_row(report: Report) -> None:
    lengths = 40_000, 39_000, 20_000, 19_500, 19_000
    table = tables.gaps_table(with_gaps(report, *lengths), 10)
    assert table.header[1:3] == ("longest", "alike")
    # The last ones are more than are known, unless there are no others.
    assert [row[1:3] for row in table.rows] == [("40.0 µs", "2"), ("20.0 µs", "≥3")]
    every = with_gaps(report, *lengths)
    every = replace(every, gaps=replace(every.gaps, count=len(lengths)))
    assert [row[2] for row in tables.gaps_table(every, 10).rows] == ["2", "3"]


def test_the_cause_of_a_gap_is_that_of_most_of_it_in_the_words_of_the_ledger(
    report: Report,
) -> None:
    charged = with_gaps(report, 40_000)
    assert tables.gaps_table(charged, 1).rows[0][-2] == "launch", "no ledger"
    charges = {"garbage-collection": 30_000, "launch-bound": 10_000}
    rows = tuple(replace(gap, charges=charges) for gap in charged.gaps.largest_in_steps)
    charged = replace(charged, gaps=replace(charged.gaps, largest_in_steps=rows))
    assert tables.gaps_table(charged, 1).rows[0][-2] == "host: garbage collection"


def test_longer_gaps_of_the_warm_up_are_mentioned(report: Report) -> None:
    with_some = with_gaps(report, 40_000)
    longer = replace(with_some.gaps.largest[0], step=0, end_ns=460_000)
    gaps = replace(with_some.gaps, largest=(longer, *with_some.gaps.largest))
    steps = replace(with_some.steps, count=24, warmup_count=1)
    said = "The warm-up, left out here, has longer gaps, up to 460 µs (--steps 0:24)."
    assert said in [*wording.notes(replace(with_some, gaps=gaps, steps=steps))]
    assert said not in [*wording.notes(replace(with_some, steps=steps))]


def charged(report: Report, *rows: tuple[str, int, int, int]) -> Report:
    """The report of two GPUs with two steps of 1 ms each, and of lost time: cause, rank, rank of
    the GPU that pays, and nanoseconds of both steps.
    """
    parents = {node.id: node.parent for node in report.causes}
    ledger = tuple(
        LedgerRow(
            cause, (parents[cause], cause), "idle", paid_by, rank, 7, "train.py:31 step", ns,
            "3 of 4 samples", None, paid_by,
        )
        for cause, rank, paid_by, ns in rows
    )  # fmt: skip
    gpus = tuple(
        replace(row, gpu=rank, rank=rank, steps=2, total_ns=2_000_000)
        for rank, row in enumerate(report.breakdown)
    )
    named = tuple(replace(row, gpu=rank, rank=rank) for rank, row in enumerate(report.gpus))
    return replace(report, breakdown=gpus, gpus=named, ledger=ledger)


def test_below_where_the_time_goes_is_why_with_the_same_total(report: Report) -> None:
    title, *lines = render(report, "text").partition("Why (")[2].split("\n\n")[0].splitlines()
    assert title == "a pass, per GPU)"
    lost = [row.total_ns - row.compute_ns for row in report.breakdown]
    charged_to = [
        sum(row.ns for row in report.ledger if row.gpu == gpu.gpu and row.of != "compute")
        for gpu in report.breakdown
    ]
    assert charged_to == lost
    quantities = QUANTITY.findall(lines[-1])
    assert quantities == [format_ns(ns) for ns in lost]


def test_causes_come_largest_first_and_small_ones_are_summed(report: Report) -> None:
    made = charged(
        report,
        ("garbage-collection", 0, 0, 800_000),
        ("launch-bound", 0, 0, 200_000),
        ("launch-bound", 1, 1, 400_000),
        ("host-work", 1, 1, 15_000),
        ("memset", 0, 0, 4_000),
    )
    table = tables.causes_table(made, 4, 6)
    assert table is not None
    assert table.header == ("", "device 0", "", "device 1", "", "evidence")
    at = "train.py:31 step (3 of 4 samples)"
    assert table.rows == (
        ("host: garbage collection", "400 µs", "40.0%", "–", "", at),
        ("host: launch overhead", "100 µs", "10.0%", "200 µs", "20.0%", at),
        ("other", "2.00 µs", "0.2%", "7.50 µs", "0.8%", ""),
        ("total", "502 µs", "50.2%", "208 µs", "20.8%", ""),
    )


def test_waiting_names_the_rank_that_the_others_wait_for(report: Report) -> None:
    made = charged(
        report, ("garbage-collection", 1, 1, 900_000), ("garbage-collection", 1, 0, 600_000)
    )
    across, mean = tables.causes_table(made, 4, 6), tables.causes_table(made, 1, 6)
    assert across is not None
    assert mean is not None
    waiting = "waiting for rank 1: garbage collection"
    assert [row[0] for row in across.rows] == ["host: garbage collection", waiting, "total"]
    # Many GPUs have one column, their mean.
    assert [row[:4] for row in mean.rows] == [
        ("host: garbage collection", "225 µs", "22.5%", "1"),
        ("waiting for another rank: garbage collection", "150 µs", "15.0%", "1"),
        ("total", "375 µs", "37.5%", ""),
    ]


def test_a_run_that_computes_all_the_time_has_no_causes(report: Report) -> None:
    assert tables.causes_table(charged(report, ("launch-bound", 0, 0, 9_000)), 4, 6) is None


def test_a_mean_over_gpus_that_work_for_different_times_is_said(report: Report) -> None:
    first, second = (replace(row, steps=0) for row in report.breakdown)
    even = replace(report, breakdown=(first, second))
    assert "(whole span, 969 ms;" in tables.main_table(even, 4).title
    uneven = replace(report, breakdown=(first, replace(second, total_ns=second.total_ns // 3)))
    title = tables.main_table(uneven, 4).title
    assert "(each GPU from its first to its last operation, 646 ms on average;" in title


def predicted(report: Report, low_ns: int, high_ns: int, cost_ns: int = 1_000_000) -> Report:
    """The report with a prediction of the step for its first finding, which gains 1 ms."""
    first = replace(report.findings[0], impact_ns=cost_ns, evidence={})
    cure = WhatIf(
        "pinned", first.id, "Pinned memory", 10_000_000, 9_000_000, low_ns, high_ns, 1_000_000,
        500_000, "", "launches that come sooner", 0.0, 8, 4,
    )  # fmt: skip
    return replace(report, findings=(first, *report.findings[1:]), what_if=(cure,))


def test_a_gain_larger_than_the_cost_says_what_it_includes(report: Report) -> None:
    more = predicted(report, 8_000_000, 9_500_000, cost_ns=500_000)
    assert wording.expected_gain(more, more.findings[0]) == (
        "1.00 ms a pass, likely 500 µs to 2.00 ms (more than the loss: includes launches that "
        "come sooner)"
    )
    wide = predicted(report, 8_000_000, 10_000_000)
    assert wording.expected_gain(wide, wide.findings[0]).startswith("up to 2.00 ms a pass (more")
    wide = predicted(report, 8_000_000, 10_000_000, cost_ns=2_000_000)
    assert wording.expected_gain(wide, wide.findings[0]) == "up to 2.00 ms a pass"
    at_top = predicted(report, 8_980_000, 9_500_000)
    assert wording.expected_gain(at_top, at_top.findings[0]) == "500 µs to 1.02 ms a pass"
    less = predicted(report, 9_000_000, 9_000_000)
    less = replace(less, steps=replace(less.steps, kind="training"))
    assert wording.expected_gain(less, less.findings[0]) == "1.00 ms a step"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gpu 0 has work", "GPU 0 has work"),
        ("the GPUs wait", "The GPUs wait"),
        ("rank's kernels take", "Rank's kernels take"),
        ("run.node0.sqlite: cut short", "run.node0.sqlite: cut short"),
        ("921 ms of 969 ms", "921 ms of 969 ms"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_unless_a_name_does(text: str, shown: str) -> None:
    assert wording.capital(text) == shown


def test_sentences_of_markdown_and_html_are_parted_and_begin_with_capitals(report: Report) -> None:
    finding = replace(report.findings[0], message="gpu 0 waits", advice="wait less")
    both = replace(
        predicted(report, 9_000_000, 9_000_000), findings=(finding, replace(finding, id="other"))
    )
    markdown = render(both, "markdown")
    assert "**GPU 0 waits.**" in markdown
    below = "- Expected gain: 1.00 ms a pass.\n- What to do: wait less.\n"
    assert f"**GPU 0 waits.**\n\n{below}" in markdown
    assert "- `other`: GPU 0 waits.\n  - What to do: wait less.\n" in markdown
    assert "<p>other: GPU 0 waits.</p>" in both._repr_html_()
    assert "<li>What to do: wait less.</li>" in both._repr_html_()


def test_numbers_of_three_digits_are_never_powers_of_ten() -> None:
    values = (0.0123, 1.0, 2.345, 99.96, 1_234.5, 2_500_000)
    assert [format_number(value) for value in values] == [
        *("0.0123", "1", "2.35", "100", "1,234", "2,500,000"),
    ]
    assert format_bytes(2_345e9) == "2,345 GB"
