"""Whether recordings agree with what the recorded scripts say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gputrace.bench.answer import Check
from gputrace.bench.groups import Group
from gputrace.bench.results import RunResult
from gputrace.bench.settings import LAUNCHERS

MOST_APART: Final = 0.05
"""By how much recorded waits for data may differ from the script's own clock."""
SLACK_S: Final = 100e-6
"""By how much each wait may differ besides: on a busy machine, so much lies between the two."""


def check_groups(groups: Sequence[Group]) -> tuple[Check, ...]:
    """A row for each configuration that was to be recorded: its run that agrees least."""
    rows = []
    for group in groups:
        own = [check_run(group.label, run) for run in group.runs if run.recorded]
        if own:
            rows.append(max(own, key=_badness))
    return tuple(rows)


def _badness(check: Check) -> tuple[int, float]:
    """What failed first, then what was skipped, then by how much the waits differ."""
    return {False: 2, None: 1, True: 0}[check.ok], abs(check.difference or 0.0)


def check_run(label: str, run: RunResult) -> Check:
    """One run beside its recording."""
    if run.state != "done":
        ok = None if run.state == "skipped" else False
        return Check(label, ok, run.reason, None, {}, None, None, None)
    told, found = run.told or {}, run.measure
    steps, script = told.get("steps"), told.get("data_wait_s")
    recorded = None if found is None else found.data_waits_ns
    recorded_s = recorded / 1e9 if recorded is not None else None
    reason = _reason(run, steps, script, recorded_s)
    return Check(
        label=label,
        ok=not reason,
        reason=reason,
        steps_run=steps,
        steps_found=found.steps if found is not None else {},
        wait_script_s=script,
        wait_recorded_s=recorded_s,
        difference=recorded_s / script - 1 if script and recorded_s is not None else None,
    )


def _reason(run: RunResult, steps: int | None, script: float | None, recorded: float | None) -> str:
    """What does not hold; nothing where all does."""
    found, ranks = run.measure, _ranks(run)
    if found is None:
        return "was not measured"
    if found.problem:
        return found.problem
    if ranks is not None and len(found.steps) != ranks:
        return f"{len(found.steps)} of {ranks} ranks were found"
    if steps is None or any(count != steps for count in found.steps.values()):
        return f"{_span(found.steps.values())} steps were found, {steps} were run"
    if script is not None and recorded is None:
        return "no wait for data was recorded"
    return _waits_apart(script, recorded, (run.told or {}).get("data_waits") or 0)


def _waits_apart(script: float | None, recorded: float | None, waits: int) -> str:
    if script is None or recorded is None:
        return ""
    if abs(recorded - script) <= max(MOST_APART * script, SLACK_S * waits):
        return ""
    return f"waits for data differ by over {MOST_APART:.0%}"


def _ranks(run: RunResult) -> int | None:
    """Processes of the run, where its placement has one for each GPU."""
    told = run.told or {}
    return int(told["gpus"]) if told.get("update") in LAUNCHERS and "gpus" in told else None


def _span(counts: object) -> str:
    """``20`` or ``19 to 20``."""
    known = sorted(set(counts))  # type: ignore[call-overload]
    if not known:
        return "no"
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"
