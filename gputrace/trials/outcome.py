"""Outcome of a trial: an answer for each cure, the patch, and notes on what limits them."""

from __future__ import annotations

import math
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Final

from gputrace.collectors.masking import masked
from gputrace.model.results import Analysis
from gputrace.trials.choice import describe
from gputrace.trials.history import History, Row
from gputrace.trials.ledger import Entry
from gputrace.trials.patch import Patch, make_patch
from gputrace.trials.race import settled, sharing, why_not_tried
from gputrace.trials.recipes import find_recipes
from gputrace.trials.runs import Measured
from gputrace.trials.statistics import (
    FEWEST,
    LOOKS,
    MOST,
    Verdict,
    losses_differ,
    turn_losses_differ,
)
from gputrace.units import format_times

_RESTLESS: Final = 0.1
"""Minimum scatter of steps without cures, from round to round, for a note."""
_MOSTLY: Final = 0.9
"""Part of the steps' gain that a whole run has after the number of steps that the note names."""
_SHORT: Final = 500
"""Maximum number of steps that no note names: few trainings are shorter."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers of a trial. Times are in nanoseconds; ratios are of steps with a cure to without."""

    command: tuple[str, ...]
    warmup: int
    steps: int
    """Steps measured in each run without turns."""
    runs: int
    seconds: float
    bare_ns: float | None
    """Mean step without cures."""
    findings: tuple[str, ...]
    """Ids of the recording's findings, the most important first; empty without a recording."""
    rows: tuple[Entry, ...]
    """Answer for each cure, in the order tried; the best ones together come last."""
    best: str | None
    """Fastest proven cure that changes no results, or was asked for."""
    patch: Patch | None
    """Changes that build it into the program."""
    notes: tuple[str, ...]
    interrupted: bool = False


def conclude(
    history: History,
    analysis: Analysis | None,
    runs: int,
    spent_s: float,
    interrupted: bool,
) -> Outcome:
    """Return the outcome of a trial that is over."""
    request, winners, pilot = history.request, history.winners(), history.pilot
    program = request.name or shlex.join(masked(request.command))
    last = history.bare[-1] if history.bare else pilot
    losses = [run.losses for run in history.bare]
    patch = None
    notes = list(dict.fromkeys(history.notes))
    if winners:
        main = next(run.main for run in (*history.bare, pilot) if run)
        best = winners[0]
        words = () if request.name else request.command
        patch = make_patch(best.candidate, best.changes, main, words)
        notes += describe_payoff(best, history.start_s)
    if analysis is not None and pilot is not None:
        cured = {id for row in winners for s in row.candidate.settings for id in s.cure.findings}
        notes += find_recipes(analysis, pilot.main, cured)
    for row in (row for row in history.rows if row.starts):
        gains = ", ".join(format_times(1 / ratio) for ratio in row.starts)
        notes.append(f"{row.candidate} gained {gains} in {len(row.starts)} starts of the program")
    has_begun = pilot is not None and not interrupted
    waiting = [row for row in history.rows if pilot and not row.over and not row.cured]
    whys = {str(row.candidate): why for row in waiting if (why := why_not_tried(history, row))}
    notes += describe(history.left_out | whys)
    if not history.rows and has_begun and not history.left_out:
        notes.append("no cause that a cure takes away takes 1% of a step")
    if not winners and has_begun and request.candidates is None:
        notes.append("more can be tried by name: `gputrace try --list` lists all")
    still_open = [row for row in history.rows if row.verdict == Verdict.OPEN]
    done = settled(history.rows)
    left = [row for row in still_open if not row.over and row not in done]
    left = [row for row in left if str(row.candidate) not in whys]
    if left and has_begun and not history.notes:
        notes.append(describe_rest(left, last, spent_s))
    notes += describe_scatter([row for row in still_open if row.ratio])
    failed = next((run for run in history.unchanged if run.failure), None)
    if failed is not None:
        notes.append(
            f"the program also fails without cures, after {failed.made} steps; those before "
            f"count: {failed.failure}"
        )
    if any(not run.ended for run in history.unchanged):
        notes.append("the program went on after its last step and was ended by a signal")
    bare = [run.step_ns for run in history.bare]
    bare = bare or [step for row in history.rows for step in row.bare]
    return Outcome(
        command=(request.name,) if request.name else request.command,
        warmup=history.warmup,
        steps=history.bare[-1].steps if history.bare else history.steps,
        runs=runs,
        seconds=spent_s,
        bare_ns=sum(bare) / len(bare) if bare else None,
        findings=tuple(finding.id for finding in analysis.findings) if analysis else (),
        rows=tuple(answer(row, program, last, losses) for row in history.rows),
        best=str(winners[0].candidate) if winners else None,
        patch=patch,
        notes=tuple(notes),
        interrupted=interrupted,
    )


def answer(
    row: Row, program: str, run: Measured | None, losses: Sequence[Sequence[float]]
) -> Entry:
    """Return the answer for a row.

    Args:
        row: cures, with what was measured of them.
        program: name of the program, or its command line.
        run: last run of the program as it is.
        losses: losses of each run of the program as it is.
    """
    ratio, prediction = row.ratio, row.prediction
    so_far = row.so_far if row.cured and row.bare and not row.why else None
    return Entry(
        time_ns=time.time_ns(),
        program=program,
        host=socket.gethostname(),
        gpu=run.gpu if run else "",
        ranks=run.ranks if run else 0,
        versions=", ".join(f"{k} {v}" for k, v in run.versions.items()) if run else "",
        cure=str(row.candidate),
        verdict=str(row.verdict),
        why=row.why or ("" if row.ratio else f"fewer than {FEWEST} rounds in the budget"),
        ratio=ratio.ratio if ratio else so_far,
        low=ratio.low if ratio else None,
        high=ratio.high if ratio else None,
        rounds=len(row.cured),
        steps=run.steps if run else 0,
        bare_ns=sum(row.bare) / len(row.bare) if row.bare else None,
        predicted=prediction.ratio if prediction else None,
        predicted_low=prediction.low if prediction else None,
        predicted_high=prediction.high if prediction else None,
        numerics=row.candidate.numerics,
        loss_differs=(
            turn_losses_differ(row.turn_losses)
            if row.turn_losses
            else losses_differ(losses, row.losses)
        ),
    )


def describe_payoff(row: Row, start_s: float) -> list[str]:
    """Say how long a run must be to gain about as much as its steps, if that is long."""
    cured_ns = sum(row.cured) / len(row.cured)
    steps = 1e9 * _MOSTLY * start_s / ((1 - _MOSTLY) * cured_ns)
    if steps <= _SHORT:
        return []
    least = f"{round(steps, -2):,.0f}"
    return [f"The {start_s:.1f} s start-up matters only for runs under {least} steps."]


def describe_rest(rows: Sequence[Row], last: Measured | None, spent_s: float) -> str:
    """Say how much more time the next answer would take."""
    run_s = last.seconds if last else 0.0
    runs = sharing([row for row in rows if row.within])
    within_s = sum(max(row.seconds or run_s for row in run) for run in runs)
    whole = [row for row in rows if not row.within]
    each, more = within_s, 1
    if whole:
        each = run_s + sum(row.seconds or run_s for row in whole)
        rounds = min(len(row.cured) for row in whole)
        more = next((look for look in LOOKS if look > rounds), MOST) - rounds
    more_s = each * more + (within_s if whole else 0.0)
    minutes = math.ceil((spent_s + more_s) / 60)
    names = ", ".join(str(row.candidate) for row in rows)
    return f"undecided: {names}. One round takes {each:.0f} s; try --budget {minutes}min."


def describe_scatter(rows: Sequence[Row]) -> list[str]:
    """Say by how much steps without cures vary, if that hides what cures do."""
    scatter = max((stdev(map(math.log, row.bare)) for row in rows), default=0.0)
    if scatter < _RESTLESS:
        return []
    return [
        f"steps without cures vary by {100 * scatter:.0f}% from round to round, which hides small "
        "differences: is the machine busy with other work?"
    ]
