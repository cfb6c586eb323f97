"""Parts of the browser: its window, its words, its colours, its gaps."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.style import Style

from gputrace.analyzers.timeline_model import (
    SORTS,
    GapFilter,
    GapTable,
    SceneLane,
    join,
    order,
)
from gputrace.analyzers.timeline_model.cells import NOTHING, Layers
from gputrace.model.intervals import union
from gputrace.model.options import Window
from gputrace.model.results import CauseNode
from gputrace.model.time_class import CLASSES, IDLE_CAUSES
from gputrace.report.palette import LOOKS, SEVERITIES
from gputrace.report.tui.screen import KEYS, parse_filter, parse_ranks
from gputrace.report.tui.state import Viewport
from gputrace.report.tui.timeline import round_step
from gputrace.report.wording import label, moment
from gputrace.sanitize import clean

MOVES: Final = st.lists(
    st.one_of(
        st.tuples(st.just("zoom"), st.floats(0.01, 100), st.integers(0, 10**9)),
        st.tuples(st.just("pan"), st.floats(-3, 3), st.just(0)),
        st.tuples(st.just("fit"), st.integers(0, 10**9), st.integers(0, 10**9)),
    ),
    max_size=20,
)


@pytest.mark.parametrize("style", SEVERITIES.values())
def test_a_verdict_can_be_read_where_colours_are_greys(style: str) -> None:
    color = Style.parse(style).color
    if color is not None:
        red, green, blue = color.get_truecolor()
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue > 150


@given(MOVES)
def test_the_window_never_leaves_the_run_and_never_gets_too_short(
    moves: list[tuple[str, float, int]],
) -> None:
    view = Viewport(0, 10**9, 0, 10**9)
    for what, amount, moment_ in moves:
        if what == "zoom":
            view = view.zoom(amount, moment_)
        elif what == "pan":
            view = view.pan(amount)
        else:
            view = view.fit(*sorted((int(amount), moment_)))
        assert 0 <= view.start < view.end <= 10**9
        assert view.length >= view.shortest


def test_zoom_keeps_the_anchor_in_its_place() -> None:
    view = Viewport(0, 1_000_000, 0, 10_000_000).zoom(0.5, 250_000)
    assert (view.start, view.end) == (125_000, 625_000)


def test_what_is_in_view_is_revealed_without_a_move() -> None:
    view = Viewport(0, 1_000_000, 0, 10_000_000)
    assert view.reveal(10, 20) is view
    assert view.reveal(5_000_000, 5_000_100).length == view.length
    assert view.reveal(2_000_000, 8_000_000).length >= 6_000_000


@pytest.mark.parametrize(
    ("ns", "step", "text"),
    [
        (28_654_690_870, 5_000_000, "28.655s"),
        (1_999_999_700, 1_000, "2.000000s"),
        (1_500_000_000, 500_000_000, "1.5s"),
        (3_000_000_000, 1_000_000_000, "3s"),
        (-1_500_000, 1_000, "-0.001500s"),
        (7, 1, "0.000000007s"),
    ],
)
def test_moments_have_the_decimals_that_the_ruler_needs(ns: int, step: int, text: str) -> None:
    assert moment(ns, step) == text


@given(st.integers(1, 10**15))
def test_the_ruler_is_divided_in_round_steps(least: int) -> None:
    step = round_step(least)
    assert least <= step <= max(2.5 * least, 1)
    assert re.fullmatch("[125]0*", str(step))


@given(st.text(max_size=600))
def test_what_is_drawn_has_no_control_characters_and_one_line(text: str) -> None:
    drawn = clean(text, 100)
    assert len(drawn) <= 100
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in drawn)
    assert "\u202e" not in drawn


def test_a_name_of_ten_thousand_letters_is_cut() -> None:
    assert clean("x" * 10_000) == "x" * 399 + "…"
    assert len(label("y" * 100_000)) == 80


def test_escape_sequences_are_shown_and_not_obeyed() -> None:
    assert "\x1b" not in label("\x1b[2Jkernel")
    assert label("[bold]kernel[/bold]") == "[bold]kernel[/bold]"


# How people see who lack one kind of cone: Machado, Oliveira and Fernandes, 2009.
VISIONS: Final = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
JUST_APART: Final = 20
"""Of CIE 1976's difference, of which 2.3 is just noticeable side by side."""


def seen(color: str, vision: NDArray[np.float64]) -> NDArray[np.float64]:
    """A colour in CIE Lab, as seen with a vision."""
    rgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = (
        np.cbrt(part) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in to_xyz @ np.clip(vision @ linear, 0, 1) / np.array([0.9505, 1, 1.089])
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_classes_are_told_apart_with_any_colour_vision(vision: str) -> None:
    for one, other in combinations(CLASSES, 2):
        colors = (seen(LOOKS[name].color, VISIONS[vision]) for name in (one, other))
        assert np.linalg.norm(np.subtract(*colors)) > JUST_APART, (one, other)


def test_every_class_has_a_colour_of_16_and_a_letter_of_its_own() -> None:
    assert len({LOOKS[name].basic for name in CLASSES}) == len(CLASSES)
    assert len({LOOKS[name].letter for name in CLASSES}) == len(CLASSES)


def table() -> GapTable:
    """Four gaps: two of each of two lanes, of 10, 40, 30 and 20 ns."""
    feeding, launch = IDLE_CAUSES.index("data_feeding"), IDLE_CAUSES.index("launch")
    return GapTable(
        lane=np.array([0, 0, 1, 1], np.int16),
        start=np.array([0, 100, 0, 100]),
        end=np.array([10, 140, 30, 120]),
        cause=np.array([feeding, launch, feeding, launch], np.int8),
        step=np.array([0, 1, -1, 1], np.int32),
        steady=np.array([False, True, False, True]),
        between=np.array([True, False, False, False]),
    )


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", [0, 1, 2, 3]),
        ("gpu=0", [0, 1]),
        ("cause=data", [0, 2]),
        ("cause=launch gpu=1", [3]),
        ("step=1", [1, 3]),
        ("step=0:2", [0, 1, 3]),
        ("len>20ns", [1, 2, 3]),
        ("len > 30ns", [1, 2]),
    ],
)
def test_gaps_are_filtered_by_what_is_typed(text: str, rows: list[int]) -> None:
    chosen = parse_filter(text, ["gpu 0", "gpu 1"])
    assert chosen.rows(table()).tolist() == rows


@pytest.mark.parametrize("text", ["colour=red", "cause=hunger", "gpu=7", "len>long", "step=x"])
def test_a_filter_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_filter(text, ["gpu 0", "gpu 1"])


CAUSES: Final = (
    CauseNode("host", "", "host"),
    CauseNode("launch-bound", "host", "launch overhead"),
    CauseNode("garbage-collection", "host", "garbage collection"),
    CauseNode("data", "", "input"),
    CauseNode("data-feeding", "data", "waiting for the next batch"),
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("why=garbage", [1]),
        ("why=host", [1, 3]),
        ("why=data,launch gpu=0", [0]),
        ("why=data,garbage", [0, 1, 2]),
    ],
)
def test_gaps_are_filtered_by_what_most_of_them_is_charged_to(text: str, rows: list[int]) -> None:
    def lane(**times: list[tuple[int, int]]) -> tuple[SceneLane, int]:
        names = tuple(name.replace("_", "-") for name in times)
        lost = Layers(names, tuple(union(*zip(*each, strict=True)) for each in times.values()))
        return SceneLane(0, True, 0, "", Window(1_000, 1_200), NOTHING, lost=lost), 1_000

    lanes = [
        lane(data_feeding=[(1_000, 1_010)], launch_bound=[(1_100, 1_115)],
             garbage_collection=[(1_115, 1_140)]),
        lane(data_feeding=[(1_000, 1_030)], launch_bound=[(1_100, 1_120)]),
    ]  # fmt: skip
    chosen = parse_filter(text, ["gpu 0", "gpu 1"], CAUSES)
    assert chosen.rows(table(), lanes).tolist() == rows


def test_a_cause_that_nobody_knows_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="'hunger' is not a cause; choose from host, launch-bound"):
        parse_filter("why=hunger", ["gpu 0"], CAUSES)


def test_gaps_of_steady_steps_and_between_batches() -> None:
    assert GapFilter(steady=True).rows(table()).tolist() == [1, 3]
    assert GapFilter(between=True).rows(table()).tolist() == [0]


def test_gaps_come_largest_first_and_in_any_other_order() -> None:
    rows = np.arange(4)
    assert order(table(), rows).tolist() == [1, 2, 3, 0]
    assert order(table(), rows, "start", descending=False).tolist() == [2, 0, 1, 3]
    for by in SORTS:
        assert sorted(order(table(), rows, by).tolist()) == [0, 1, 2, 3]


def test_the_gap_under_a_moment_is_found() -> None:
    gaps = table()
    assert [gaps.find(0, at) for at in (5, 10, 100, 139, 140)] == [0, None, 1, 1, None]
    assert [gaps.find(1, at) for at in (29, 110)] == [2, 3]
    assert gaps.find(2, 5) is None
    assert join([]).find(0, 5) is None


def test_ranks_are_typed_as_ranges() -> None:
    assert parse_ranks("0,2-3", range(4)) == frozenset({0, 2, 3})
    assert parse_ranks("", range(4)) is None
    for wrong in ("x", "9", "1-"):
        with pytest.raises(ValueError, match=r"rank"):
            parse_ranks(wrong, range(4))


def test_no_key_does_two_things() -> None:
    keys = [name for key in KEYS for name in key.keys.split(",")]
    assert len(keys) == len(set(keys))
