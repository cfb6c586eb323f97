"""One document in every format: each has all of its lines and tables."""

from __future__ import annotations

from typing import Final

import pytest

from gputrace.model.struct import Column
from gputrace.report import Document, Line, Table, markdown_html, present, tabulate, text

FIRST: Final = Table("First", ("", "time"), (("gpu 0", "1 ms"),))
LATER: Final = Table("Later", ("", "size"), (("gpu 1", "2 MB"),))
REPORT: Final = Document(
    head=(
        Line("It is slow.", "bold red", below=(Line("less.", name="What to do"),)),
        Line("Two runs."),
    ),
    lead=(Line("/tmp/a.sqlite", "dim", "A"),),
    tables=(FIRST,),
    findings=(Line("The host is late.", "yellow", "late-host", (Line("Rank 1 is last."),)),),
    sections={"links": (LATER,)},
    notes=(Line("One file.", "dim", "note"), Line("gone.", "green", "appeared")),
)


def test_text_has_a_document_in_the_order_in_which_it_is_read() -> None:
    assert text.render(REPORT).splitlines() == [
        *("It is slow.", "  What to do: less.", "Two runs.", "  A: /tmp/a.sqlite", ""),
        *("First", "        time", "  gpu 0 1 ms", ""),
        *("late-host: The host is late.", "  Rank 1 is last.", ""),
        *("Later", "        size", "  gpu 1 2 MB", ""),
        *("note: One file.", "appeared: gone."),
    ]


def test_markdown_has_findings_as_a_list_of_sentences() -> None:
    assert markdown_html.render_markdown(REPORT).split("\n\n") == [
        *("**It is slow.**", "- What to do: less.", "Two runs.", "- A: /tmp/a.sqlite"),
        *("#### First", "|  | time |\n| :-- | --: |\n| gpu 0 | 1 ms |"),
        "- `late-host`: The host is late.\n  - Rank 1 is last.\n- One file.\n- appeared: gone.",
        *("#### Later", "|  | size |\n| :-- | --: |\n| gpu 1 | 2 MB |\n"),
    ]


@pytest.mark.parametrize(
    "said",
    ["It is slow.", "What to do: less.", "late-host: The host is late.", "Rank 1", "2 MB", "gone."],
)
def test_a_notebook_has_all_of_a_document(said: str) -> None:
    assert said in markdown_html.render_html(REPORT)


def test_a_table_of_objects_ends_with_the_rows_given() -> None:
    columns = (Column("", str), Column("twice", lambda number: 2 * number))
    made = tabulate("Numbers", columns, [1, 2], [("all", "6")])
    assert made.rows == (("1", "2"), ("2", "4"), ("all", "6"))


def test_tables_that_say_nothing_are_not_present() -> None:
    empty = tabulate("Nothing", (Column("", "name"),), ())
    silent = Table("Silent", ("", "wait"), (("gpu 0", "–"),))
    assert present((None, empty, silent, FIRST)) == (FIRST,)
