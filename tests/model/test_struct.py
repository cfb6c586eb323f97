"""Columns of results: their formats, and what they show of what is not known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest

from gputrace.model.struct import Column, limited, share

ROW: Final = SimpleNamespace(
    wait_ns=1_500_000, sent_bytes=2_000_000, count=12_345, ratio=0.98765, name="a", none=None, no=""
)


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        (Column("", "wait_ns"), "1.50 ms"),
        (Column("", "sent_bytes"), "2 MB"),
        (Column("", "count"), "12,345"),
        (Column("", "ratio"), "0.988"),
        (Column("", "name"), "a"),
        (Column("", "ratio", "{:.0%}"), "99%"),
        (Column("", "count", lambda count: f"{count} of them"), "12345 of them"),
        (Column("", lambda row: row.count / 2), "6,172"),
    ],
)
def test_the_format_of_a_cell_follows_from_the_unit_the_type_or_the_column(
    column: Column, cell: str
) -> None:
    assert column.cell(ROW) == cell


@pytest.mark.parametrize("name", ["none", "no"])
def test_what_is_unknown_is_a_dash_or_what_the_column_says(name: str) -> None:
    assert Column("", name, "{:.0%}").cell(ROW) == "–"
    assert Column("", name, unknown="?").cell(ROW) == "?"


@pytest.mark.parametrize(
    ("used", "most", "cell"),
    [(3 * 2**29, 80 * 2**30, "1.5/80 GiB"), (3 * 2**29, None, "1.5 GiB"), (None, None, "–")],
)
def test_a_limit_stands_beside_its_value(used: Any, most: Any, cell: str) -> None:
    column = Column("", limited("used", "most", "GiB", 2**30))
    assert column.cell(SimpleNamespace(used=used, most=most)) == cell


def test_a_share_is_of_another_field() -> None:
    assert Column("", share("wait_ns", "sent_bytes")).cell(ROW) == "75.0%"
