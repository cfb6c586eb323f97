"""Choice of what to do about the causes that a recording charges with lost time: the cures to try,
and recipes, which are changes of the source where no cure takes a cause away.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.analyzers.findings import CHEAPER_KERNELS_SAVE
from gputrace.model.results import Analysis, LedgerRow
from gputrace.trials import statements
from gputrace.trials.cures import Candidate, Setting, Value, all_cures, combine, lacking
from gputrace.trials.patch import Edit
from gputrace.trials.runs import Measured

_LEAST: Final = 0.01
"""Minimum part of a step that the causes of a cure take for it to be tried."""
_MOST_WORKERS: Final = 16
_LATE: Final = "late-host"


@dataclass(frozen=True, slots=True)
class Charges:
    """Parts of a step that causes of lost time take, and phases of the host where it has no GPU."""

    causes: Mapping[str, float]
    phases: Mapping[str, float]

    def of(self, candidate: Candidate) -> float:
        """Return the part of a step that the causes take which a candidate may cure."""
        cures = [setting.cure for setting in candidate.settings]
        causes = {id: self.causes.get(id, 0.0) for cure in cures for id in cure.findings}
        phases = sum(self.phases.get(name, 0.0) for cure in cures for name in cure.phases)
        return min(sum(causes.values()) + phases, 1.0)


def charge(analysis: Analysis) -> Charges:
    """Return what the ledger of lost time charges, or else the costs of findings.

    What others lose to a late host is charged to what makes it late. Of computation, an eighth: so
    much is taken to be saved by cheaper kernels. Where no GPU was
    recorded, the host's phases are all of the step.
    """
    step_ns = analysis.steps.mean_ns or math.inf
    causes = {finding.id: finding.impact_ns / step_ns for finding in analysis.findings}
    causes["compute-bound"] = CHEAPER_KERNELS_SAVE * causes.get("compute-bound", 0.0)
    if analysis.ledger:
        total_ns = sum(row.total_ns for row in analysis.breakdown)
        charged: dict[str, float] = defaultdict(float)
        for row in analysis.ledger:
            for cause, part in _of_late(row, analysis.ledger).items():
                charged[cause] += part * row.ns / max(total_ns, 1)
        return Charges({**causes, _LATE: 0.0, **charged}, {})
    rows = [(phase.name, phase.host_ns) for rank in analysis.step_phases for phase in rank.phases]
    all_ns = sum(rank.step_ns for rank in analysis.step_phases)
    phases = {name: ns / max(all_ns, 1) for name, ns in rows}
    computing = phases.get("forward", 0.0) + phases.get("backward", 0.0)
    return Charges(causes | {"compute-bound": CHEAPER_KERNELS_SAVE * computing}, phases)


def _of_late(row: LedgerRow, ledger: Sequence[LedgerRow]) -> dict[str, float]:
    """Return the parts of a row by cause: where others wait for a late host, by what delays that.

    These are the causes of the idle time of its own GPU; it is its own cause where there are none.
    """
    own: dict[str, float] = defaultdict(float)
    for each in ledger if row.cause == _LATE else ():
        if each.rank == row.rank and each.of == "idle" and each.cause != _LATE:
            own[each.cause] += each.ns
    total = sum(own.values())
    return {cause: ns / total for cause, ns in own.items()} if total else {row.cause: 1.0}


def choose(
    analysis: Analysis, pilot: Measured, cores: int | None = None
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the cures of the causes that take most of a step, the largest first, and why others of
    these causes are left out, by name.

    Args:
        analysis: of the recording.
        pilot: the recorded run, which says what the program has.
        cores: of this machine, which bound the workers to try; None to ask it.
    """
    charges, chosen, left_out = charge(analysis), list[Candidate](), dict[str, str]()
    there = {
        "gpu": bool(pilot.gpu),
        "ranks": pilot.ranks > 1,
        "workers": any(loader.workers for loader in analysis.loader),
        "unpinned": not analysis.loader or not all(each.pins_memory for each in analysis.loader),
    }
    has = pilot.has.union(word for word, is_so in there.items() if is_so)
    better = next((loader.better for loader in analysis.loader if loader.better), None)
    # Of workers: one per core, half as many, and the predicted number.
    most = min(max(cores or os.cpu_count() or 1, 4), _MOST_WORKERS)
    numbers = sorted({most, max(most // 2, 2), (better and better.workers) or most})
    present = {
        "workers": {loader.workers for loader in analysis.loader},
        "threads": {pilot.threads},
    }
    for cure in all_cures().values():
        if cure.frameworks and not set(cure.frameworks).intersection(pilot.versions):
            continue
        if charges.of(Candidate((Setting(cure, cure.value or 0),))) < _LEAST:
            continue
        if why := lacking(cure, has):
            left_out[cure.id] = why.partition("; ")[0]
            continue
        values: Sequence[Value | None] = [cure.value]
        if cure.id == "workers":
            values = numbers
        elif cure.takes == "FILE:LINE":
            values = find_needless(analysis, pilot.main)
        candidates = [Candidate((Setting(cure, value),)) for value in values if value is not None]
        for candidate in candidates:
            if candidate.settings[0].value in present.get(cure.id, ()):
                left_out[str(candidate)] = "it has as many"
            else:
                chosen.append(candidate)
    # Only what is pinned is copied without waiting.
    pair = [each for each in chosen if str(each) in ("pinned", "non-blocking")]
    if len(pair) > 1:
        chosen = [each for each in chosen if each not in pair] + [combine(pair)]
    return sorted(chosen, key=charges.of, reverse=True), left_out


def describe(left_out: Mapping[str, str]) -> list[str]:
    """Return the line that says what is left out, and why; none if nothing is."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, why in left_out.items():
        names[why].append(name)
    whys = "; ".join(f"{', '.join(names[why])} ({why})" for why in names)
    return [f"left out: {whys}"] if whys else []


_LEAST_FOR_RECIPE: Final = 0.05
"""Minimum part of a step that a cause takes for a recipe."""
_MOST_SHOWN: Final = 3
_PLACE: Final = re.compile(r"(.*):(\d+) (\S+)")
"""Line of a ledger's row: end of the file's path, number, function."""
_UNCHANGEABLE: Final = ("warmup", "recorder-overhead", "idle-unexplained")
"""Causes that are once, ours or unknown: a change of the source does not help the steps."""
_THINNED: Final = ("host-work", "sync-bound", "checkpoint-stall")
"""Causes whose work can be done in some steps only, at the line where most of it is."""


def find_recipes(analysis: Analysis, main: str, cured: Collection[str] = ()) -> list[str]:
    """Return what to change in the source for the causes that take most of a step, in words, with
    the changed lines where the change is mechanical; nothing of it is proven.

    These are the causes that no cure is for, and those whose line is known. The words are the
    finding's advice.

    Args:
        analysis: of a recording of the program.
        main: path of the program.
        cured: causes that a cure has been proven to shorten.
    """
    recipes = list[str]()
    causes = {cause.id for cause in analysis.causes}.difference(cured, _UNCHANGEABLE)
    curable = {finding for cure in all_cures().values() for finding in cure.findings}
    step_ns = analysis.steps.mean_ns or math.inf
    for finding in sorted(analysis.findings, key=lambda each: -each.impact_ns):
        lines = Counter[str]()
        for row in analysis.ledger:
            if row.cause == finding.id and row.line is not None:
                lines[row.line] += row.ns
        share, line = finding.impact_ns / step_ns, max(lines, key=lambda at: lines[at], default="")
        wanted = finding.id in causes and finding.advice and share >= _LEAST_FOR_RECIPE
        if wanted and (line or finding.id not in curable):
            at = f" at {line.rpartition(' ')[0]}" if line else ""
            edit = _edit(finding.id, line, Path(main))
            changed = f" ({'; '.join(edit.lines)})" if edit else ""
            recipes.append(
                f"{finding.id} takes {share:.0%} of a step{at}: {finding.advice}{changed}"
            )
    return recipes[:_MOST_SHOWN]


def _edit(cause: str, line: str, main: Path) -> Edit | None:
    """Return the change of the file that a line is in; None if it is not mechanical."""
    if cause not in (*_THINNED, "garbage-collection") or (found := _find(line, main)) is None:
        return None
    path, source, number, function = found
    edits: set[statements.TextEdit]
    if cause == "garbage-collection":
        edits = statements.remove(source, number, "collect")
    else:
        # In a function, the calls of which can be fewer.
        places = [(number, ""), *((at, function) for at in source.calls(function))]
        changes = (statements.run_every(source, at, call) for at, call in places)
        edits = next(filter(None, changes), set())
    return Edit(path, source.data.decode(), source.edited(edits)) if edits else None


def _find(line: str, main: Path) -> tuple[Path, statements.Source, int, str] | None:
    """Return the file that a ledger's line is in, its text, the number, and the function's name."""
    match = _PLACE.fullmatch(line)
    if match is None:
        return None
    folders = (main.parents[len(Path(match[1]).parts) - 1 :][:1], [main.parent, Path.cwd()])
    paths = (folder / match[1] for some in folders for folder in some)
    path = next((path for path in paths if path.is_file()), None)
    try:
        source = statements.Source(path.read_bytes().decode()) if path else None
    except (OSError, ValueError, SyntaxError):
        return None
    return (path, source, int(match[2]), match[3].rpartition(".")[2]) if path and source else None


def find_needless(analysis: Analysis, main: str) -> list[str]:
    """Return the statements in which causes of lost time are that the training can go without, as
    ``train.py:14`` or ``train.py:14-16``, from the current folder; those that take most first.
    """
    charged = Counter[str]()
    for row in analysis.ledger:
        if row.cause in _THINNED and row.line is not None:
            charged[row.line] += row.ns
    # Without a GPU there is no ledger; the findings have the lines.
    for finding in () if analysis.ledger else analysis.findings:
        if finding.id in _THINNED and (at := finding.evidence.get("line")):
            charged[str(at)] += finding.impact_ns
    places, here = Counter[str](), Path.cwd()
    for line, ns in charged.items():
        # A function of another file may be called by the program's.
        calls = f"{Path(main).name}:0 {line.partition(' ')[2]}"
        for path, source, number, function in filter(
            None, (_find(at, Path(main)) for at in (line, calls))
        ):
            if group := statements.needless_statements(source, number, function):
                name = path.relative_to(here) if path.is_relative_to(here) else path
                lines = "-".join(
                    str(at) for at in dict.fromkeys(each.lineno for each in (group[0], group[-1]))
                )
                places[f"{name}:{lines}"] += ns
                break
    return [place for place, _ in places.most_common(_MOST_SHOWN)]
