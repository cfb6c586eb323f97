"""Reads a report of Nsight Compute in a process of its own, with NVIDIA's package ncu-report.

That is native code, and the one inside Nsight Compute 2025.3 has been seen to crash the Python that
loaded it. Prints JSON: for each launch its name and [value, unit] by the metrics asked for, or an
object with the error.

    python -m gputrace.collectors.ncu_reader REPORT METRIC…
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any


def main(report: str, *metrics: str) -> None:
    """Prints what the report says of these metrics; those that it lacks are left out."""
    try:
        context = import_module("ncu_report").load_report(report)
        found: Any = [_measured(action, metrics) for action in _actions(context)]
    except Exception as error:  # Whatever NVIDIA's package raises.
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")


def _actions(context: Any) -> Iterator[Any]:
    for i in range(context.num_ranges()):
        one = context.range_by_idx(i)
        yield from (one.action_by_idx(j) for j in range(one.num_actions()))


def _measured(action: Any, metrics: Sequence[str]) -> tuple[str, dict[str, tuple[float, str]]]:
    there = set(action.metric_names())
    found = {name: action.metric_by_name(name) for name in metrics if name in there}
    figures = {name: (float(one.as_double()), str(one.unit())) for name, one in found.items()}
    return str(action.name()), figures


if __name__ == "__main__":
    main(*sys.argv[1:])
