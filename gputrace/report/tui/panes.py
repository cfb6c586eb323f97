"""Findings, kernels and steps of a trace, as the browser shows them in place of the gaps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from rich.text import Text

from gputrace.analyzers.timeline_model.cells import stack
from gputrace.model.results import Analysis, Step
from gputrace.model.time_class import CLASSES
from gputrace.report.palette import SEVERITIES, Palette
from gputrace.report.tables import capital, finding_text, kernels_table
from gputrace.report.text import (
    BESIDE_NAMES,
    open_console,
    print_table,
    room_for_names,
    without_blanks,
)
from gputrace.report.tui.timeline import bar_rows
from gputrace.sanitize import sentence
from gputrace.units import format_count, format_ns, format_ranges

_MOST_KERNELS: Final = 50
_SCALE: Final = 9
"""Columns left of the bars, for the length of the longest step."""
_WIDEST: Final = 6
"""Maximum columns of a step."""


def findings_pane(analysis: Analysis, width: int, height: int, palette: Palette) -> Text:
    """List all findings with their advice, the most important first."""
    del width, height, palette
    text = Text()
    for finding in analysis.findings:
        text.append(f"{finding.id} ", SEVERITIES[finding.severity] or "bold")
        text.append(f"{sentence(finding_text(analysis, finding))}\n")
        text.append(f"  {sentence(capital(finding.advice))}.\n", "dim")
    return text or Text("Nothing stands out: no class of time is worth a change.")


def kernels_pane(analysis: Analysis, width: int, height: int, palette: Palette) -> Text:
    """Tabulate the kernels that take most time."""
    del height, palette
    table = kernels_table(analysis, _MOST_KERNELS, room_for_names(width, BESIDE_NAMES))
    if table is None:
        return Text("No kernels were recorded.")
    console = open_console(width, color=False)
    print_table(console, table)
    return Text(without_blanks(console))


def steps_pane(analysis: Analysis, width: int, height: int, palette: Palette) -> Text:
    """Draw the steady steps as bars of the classes of time, each the mean of its GPUs."""
    steps = [step for step in analysis.step_list if step.phase == "steady"]
    if not steps:
        return Text("No steps were found.")
    names = CLASSES if analysis.gpus else ("host_data", "host_rest")
    numbers, index = np.unique([step.step for step in steps], return_inverse=True)
    room = max(width - _SCALE - 1, 1)
    columns = min(len(numbers), room)
    column = index * columns // len(numbers)
    shares = np.zeros((columns, len(names)), np.int64)
    np.add.at(shares, column, [[_time(step, name) for name in names] for step in steps])
    shares //= np.bincount(column)[:, None]
    lengths = shares.sum(axis=1)
    each = min(max(room // columns, 1), _WIDEST)
    longest = np.full(columns, max(int(lengths.max()), 1))
    bars = bar_rows(stack(shares, longest, max(height - 2, 1)), (*names, ""), palette, each)
    over = format_count(len(numbers), "steady step")
    gpus = f", mean of {len(analysis.gpus)} GPUs" if len(analysis.gpus) > 1 else ""
    text = Text(f"{over}{gpus}; the longest takes {format_ns(int(longest[0]))}\n", "bold")
    for place, row in enumerate(bars):
        text.append(f"{format_ns(int(longest[0])) if not place else '':>{_SCALE - 1}} ")
        for segment in row.segments():
            text.append(segment.text, segment.style)
        text.append("\n")
    first, last = (format_ranges([int(number)]) for number in numbers[[0, -1]])
    between = " " * max(columns * each - len(first) - len(last), 1)
    return text.append(" " * _SCALE + (f"{first}{between}{last}" if first != last else first))


def _time(step: Step, name: str) -> int:
    if name == "host_rest":
        return step.end_ns - step.start_ns - (step.host_data_ns or 0)
    return getattr(step, f"{name}_ns") or 0


PANES: Final[Mapping[str, Callable[[Analysis, int, int, Palette], Text]]] = {
    "findings": findings_pane,
    "kernels": kernels_pane,
    "steps": steps_pane,
}
"""Panes beside the list of gaps, by name."""
