"""Tools for agents. Those that read traces say what `gputrace analyze` and `compare` show, as
sentences with rows; others run the program that the person named: record it, try cures on it, have
the patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from gputrace.cli import options
from gputrace.cli.mcp.tool import Said, cite, said, tool
from gputrace.errors import InputError, UsageError
from gputrace.sanitize import clean
from gputrace.units import (
    format_bytes,
    format_change,
    format_count,
    format_ns,
    format_share,
    format_times,
)

if TYPE_CHECKING:
    from gputrace.api import Report
    from gputrace.model.comparison import Comparison
    from gputrace.model.results import LedgerRow
    from gputrace.trials.cures import Candidate
    from gputrace.trials.outcome import Outcome

_EVIDENCE: Final = 3
"""Most rows of the ledger that a sentence names."""


def _verdict(report: Report) -> Iterator[Said]:
    """The reason why training is slow, what to do about it, and what that would save; then every
    other finding and the limits of the figures. Call this first.
    """
    from gputrace.report.wording import finding_text, notes, verdict

    if not report.findings:
        rows = [cite(f"breakdown[{at}]", row) for at, row in enumerate(report.breakdown)]
        yield said(verdict(report), *rows)
    for number, finding in enumerate(report.findings):
        rows = [cite(f"findings[{number}]", finding)]
        rows += [
            cite(f"breakdown[{at}]", row)
            for at, row in enumerate(report.breakdown)
            if (row.gpu in finding.gpus if finding.gpus else row.rank in finding.ranks)
        ]
        rows += [
            cite(f"what_if[{at}]", cure)
            for at, cure in enumerate(report.what_if)
            if cure.finding == finding.id
        ]
        yield said(finding_text(report, finding), *rows)
    for note in notes(report):
        yield said(note)


def _breakdown(report: Report) -> Iterator[Said]:
    """Time of a step on each GPU: classes that sum to the step (compute,
    communication, copies, and idle time by its cause).
    """
    from gputrace.report.tables import CLASS_NAMES
    from gputrace.report.wording import capital, gpu_label

    labels = CLASS_NAMES if report.gpus else {"host_data": "waiting for data"}
    for number, row in enumerate(report.breakdown):
        turns = row.steps or 1
        parts = [
            f"{label} {format_ns(row.of(name) / turns)} "
            f"({format_share(row.of(name), row.total_ns)})"
            for name, label in labels.items()
            if row.of(name)
        ]
        took = format_ns(row.total_ns / turns)
        whole = f"a step takes {took} (mean of {row.steps})" if row.steps else f"{took} recorded"
        text = f"{capital(gpu_label(row, report))}: {whole}: {', '.join(parts)}."
        yield said(text, cite(f"breakdown[{number}]", row))


def _gaps(report: Report, limit: int = 10) -> Iterator[Said]:
    """The longest intervals in which a GPU runs nothing, each with its cause and the evidence."""
    from gputrace.report.wording import capital, gap_cause, gpu_label

    gaps = report.gaps
    where = "largest_in_steps" if gaps.largest_in_steps else "largest"
    total = {k: v for k, v in cite("gaps", gaps).items() if not k.startswith("largest")}
    count = format_count(gaps.count, "gap")
    yield said(f"The whole trace has {count}, {format_ns(gaps.total_ns)}.", total)
    if gaps.hint:
        yield said(f"{capital(gaps.hint)}.")
    for number, gap in enumerate(getattr(gaps, where)[:limit]):
        start = (gap.start_ns - report.origin_ns) / 1e9
        step = "" if gap.step is None else f" in step {gap.step}"
        cause = gap_cause(gap, report)
        text = (
            f"{gpu_label(gap, report)} idles {format_ns(gap.length_ns)}{step}, from {start:.6f} s"
        )
        evidence = f": {gap.evidence}" if gap.evidence else ""
        yield said(f"{capital(text)}; {cause}{evidence}.", cite(f"gaps.{where}[{number}]", gap))


def _kernels(report: Report, limit: int = 10) -> Iterator[Said]:
    """The kernels that take most time, with launches, durations, and use of the tensor cores."""
    kernels = report.kernels
    if kernels is None:
        yield said("No kernel ran in the measured part.")
        return
    for number, use in enumerate(kernels.top[:limit]):
        tensor = {"yes": ", on tensor cores", "no": ", not on tensor cores"}
        yield said(
            f"{clean(use.short)} takes {use.share:.1%} of the measured time of the GPUs: "
            f"{format_count(use.count, 'call')}, {format_ns(use.median_ns)} each (median), "
            f"{format_ns(use.max_ns)} the longest"
            f"{tensor.get(use.tensor_cores or '', '')}.",
            cite(f"kernels.top[{number}]", use),
        )


def _what_if(report: Report) -> Iterator[Said]:
    """Predicted length of a step without one cause each, by replaying the recorded steps."""
    if not report.what_if:
        yield said("Nothing is predicted: no known cure would save over 1% of a step.")
    for number, cure in enumerate(report.what_if):
        rows = [cite(f"what_if[{number}]", cure)]
        rows += [
            cite(f"findings[{at}]", finding)
            for at, finding in enumerate(report.findings)
            if finding.id == cure.finding
        ]
        now, then, low, high = map(
            format_ns, (cure.now_ns, cure.step_ns, cure.low_ns, cure.high_ns)
        )
        beyond = f"; that includes {cure.beyond}" if cure.beyond else ""
        yield said(
            f"{cure.what}: a step of {now} would take {then} ({low} to {high}), if "
            f"{cure.assumption}{beyond}.",
            *rows,
        )


def _compare(before: list[str], after: list[str]) -> Iterator[Said]:
    """Changes between two runs beyond the noise of their steps: verdict, classes of time,
    kernels, findings.
    """
    import gputrace
    from gputrace.report.comparison import notes, verdict
    from gputrace.report.wording import capital

    for name, paths in (("before", before), ("after", after)):
        if len(paths) > 1:
            raise UsageError(f"{name}: give a file, or the folder of a run's files")
    comparison = gputrace.compare(before[0], after[0])
    rows = [cite(f"runs[{at}]", run) for at, run in enumerate(comparison.runs)]
    pair, scaling = comparison.pair, comparison.scaling
    if pair is not None and pair.step is not None:
        rows.append(cite("pair.step", pair.step))
    if scaling is not None:
        rows += [cite(f"scaling.rows[{at}]", row) for at, row in enumerate(scaling.rows)]
    yield said(verdict(comparison), *rows)
    if pair is not None:
        yield from _changes(comparison)
    for kind, note in notes(comparison):
        if kind in ("kernels", "note"):
            yield said(capital(note if kind == "note" else f"kernels: {note}"))


def _changes(comparison: Comparison) -> Iterator[Said]:
    """Yield what changed beyond the noise: classes, kernels, findings."""
    from gputrace.report.comparison import NAMES
    from gputrace.report.wording import capital

    pair = comparison.pair
    assert pair is not None
    named: Iterable[tuple[str, str, Sequence[Any]]] = (
        ("classes", "{}", [(NAMES[row.name], row) for row in pair.classes]),
        ("kernels", "kernel {}", [(clean(row.name), row) for row in pair.kernels]),
    )
    for table, form, rows in named:
        changed = [(at, name, row) for at, (name, row) in enumerate(rows) if row.changed]
        for at, name, row in changed[:10]:
            more = "more" if row.difference_ns > 0 else "less"
            yield said(
                f"{capital(form.format(name))}: {format_ns(row.a_ns)} a {comparison.unit} before, "
                f"{format_ns(row.b_ns)} after, {format_ns(abs(row.difference_ns))} {more}.",
                cite(f"pair.{table}[{at}]", row),
            )
    for at, finding in enumerate(pair.findings):
        text = f"The finding {finding.id} has {finding.status}: {finding.message}."
        yield said(text, cite(f"pair.findings[{at}]", finding))


def _recordings(folder: Path, limit: int = 10) -> Iterator[Said]:
    """The traces in the folder and the folders in it, the newest first."""
    from gputrace.readers.open import trace_files_in

    found: list[Path] = []
    for each in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        if not each.name.startswith(".") and not each.is_symlink():
            with suppress(InputError):
                found += [path for path in trace_files_in(each) if not path.is_symlink()]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for number, path in enumerate(found[:limit]):
        state, name = path.stat(), str(path.relative_to(folder))
        row = {"path": name, "bytes": state.st_size, "modified_ns": state.st_mtime_ns}
        text = f"{name}: {format_bytes(state.st_size)}."
        yield said(text, cite(f"recordings[{number}]", row))
    if not found:
        yield said("No trace is here; `gputrace record -- python train.py` makes one.")


def _causes(report: Report, cause: str | None = None, limit: int = 5) -> Iterator[Said]:
    """Causes of lost time, the largest first, each with its rows of the ledger, the line of the
    program, and the names of cures to try. With `cause`, the id of one: all of its rows, and
    what each cure does.
    """
    from gputrace.report.wording import capital

    charged: dict[str, list[tuple[int, LedgerRow]]] = {}
    for at, row in enumerate(report.ledger):
        charged.setdefault(row.cause, []).append((at, row))
    sums = {cause: sum(row.ns for _, row in rows) for cause, rows in charged.items()}
    whole_ns = sum(row.total_ns for row in report.breakdown)
    turns = sum(row.steps or 1 for row in report.breakdown)
    named = [cause] if cause in charged else []
    for name in named or sorted(sums, key=lambda name: -sums[name])[:limit]:
        rows = sorted(charged[name], key=lambda each: -each[1].ns)
        largest = rows[0][1]
        share = format_share(sums[name], whole_ns)
        lost = f"{format_ns(sums[name] / turns)} a step and GPU ({share})"
        at_line = f", most at {largest.line}" if largest.line else ""
        evidence = f" ({largest.evidence})" if largest.evidence else ""
        yield said(
            f"{capital(report.cause_label(name))} [{name}]: {lost}{at_line}{evidence}."
            f"{_cures_for(name, bool(named))}",
            *(cite(f"ledger[{at}]", row) for at, row in rows[: None if named else _EVIDENCE]),
        )
    for at, finding in enumerate(report.findings):
        if not charged and finding.impact_ns and cause in (None, finding.id):
            cures = _cures_for(finding.id, cause is not None)
            text = f"{capital(finding.message)} [{finding.id}].{cures}"
            yield said(text, cite(f"findings[{at}]", finding))


def _cures_for(cause: str, described: bool) -> str:
    """Return the cures that may be tried for a cause, as a sentence after a space, if any."""
    from gputrace.trials.cures import all_cures

    cures = []
    for cure in all_cures().values():
        if cause in cure.findings:
            about = [cure.what] * described + ["changes numerics"] * cure.numerics
            takes, more = f"={cure.takes}" * bool(cure.takes), f" ({'; '.join(about)})"
            cures.append(f"{cure.id}{takes}{more * bool(about)}")
    return f" To try: {', '.join(cures)}." if cures else ""


def _slow_steps(report: Report, limit: int = 10) -> Iterator[Said]:
    """The longest measured steps, against the median."""
    from gputrace.report.wording import gpu_label

    median_ns = report.steps.p50_ns
    if not median_ns:
        yield said(f"No steps were measured: {report.steps.reason}.")
        return
    longest: dict[int, int] = {}
    lengths = [step.end_ns - step.start_ns for step in report.step_list]
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if report.step_list[at].phase == "steady":
            longest.setdefault(report.step_list[at].step, at)
    for at in list(longest.values())[:limit]:
        step, ns = report.step_list[at], lengths[at]
        yield said(
            f"Step {step.step} takes {format_ns(ns)} on {gpu_label(step, report)}, "
            f"{format_times(ns / median_ns)} the median of {format_ns(median_ns)}.",
            cite(f"step_list[{at}]", step),
        )


def _step(
    trace: list[str], number: int, steps: str | None = None, time: str | None = None
) -> Iterator[Said]:
    """Explanation of one step's length: its causes, longest gap and kernels against those of the
    median step. The addresses are those of the JSON of `analyze --step`.
    """
    import gputrace
    from gputrace.report import Limits
    from gputrace.report.step import document

    with gputrace.open(*trace, windows=time is not None) as opened:
        result = opened.explain_step(number, steps=steps, time=time)
    report, first = document(result, Limits()), result.gpus[0]
    parts = [cite(f"gpus[0].parts[{at}]", each) for at, each in enumerate(first.parts)]
    yield said(report.head[0].text, *parts)
    gap = [cite("gpus[0].longest_gap", first.longest_gap)] if first.longest_gap else []
    for note in report.notes:
        yield said(note.text, *gap)
    for at, kernel in enumerate(first.kernels):
        text = f"{clean(kernel.name)}: {format_change(kernel.more_ns)}, all launches together."
        yield said(text, cite(f"gpus[0].kernels[{at}]", kernel))


def _ranks(report: Report) -> Iterator[Said]:
    """Time of each rank's step by class, which rank the others wait for, and why."""
    yield from _breakdown(report)
    held: dict[int, list[tuple[int, LedgerRow]]] = {}
    for at, lost in enumerate(report.ledger):
        if lost.rank != lost.paid_by:
            held.setdefault(lost.rank, []).append((at, lost))
    for rank, rows in sorted(held.items(), key=lambda each: -sum(lost.ns for _, lost in each[1])):
        rows.sort(key=lambda each: -each[1].ns)
        ns = sum(lost.ns for _, lost in rows) / (report.breakdown[0].steps or 1)
        why = report.cause_label(rows[0][1].cause)
        text = f"Others wait {format_ns(ns)} a step in all for rank {rank}; its main cause: {why}."
        yield said(text, *(cite(f"ledger[{at}]", lost) for at, lost in rows[:_EVIDENCE]))


def _memory(report: Report) -> Iterator[Said]:
    """Memory: torch's allocator on each rank, with its peak and retries, and the cards."""
    for at, row in enumerate(report.allocators):
        peak = "" if row.peak_bytes is None else f", {format_bytes(row.peak_bytes)} at the peak"
        peak += f" in {row.peak_phase}" if peak and row.peak_phase else ""
        yield said(
            f"Rank {row.rank}: tensors take {format_bytes(row.allocated_bytes)} at the ends of "
            f"steps{peak}, and {format_bytes(row.reserved_bytes)} are reserved, of which "
            f"{format_bytes(row.split_bytes)} cannot be given back; "
            f"{format_count(row.segments, 'cudaMalloc')}, {format_count(row.retries, 'retry')}.",
            cite(f"allocators[{at}]", row),
        )
    for at, card in enumerate(report.cards):
        if card.memory_used_bytes is not None:
            of = f" of {format_bytes(card.memory_bytes)}" if card.memory_bytes else ""
            text = f"GPU {card.gpu} holds {format_bytes(card.memory_used_bytes)}{of} at most."
            yield said(text, cite(f"cards[{at}]", card))
    if not report.allocators and all(card.memory_used_bytes is None for card in report.cards):
        yield said("Neither torch's allocator nor the memory of cards was recorded.")


READING: Final = dict(
    tool(function)
    for function in (
        *(_verdict, _causes, _breakdown, _gaps, _slow_steps, _step, _ranks, _kernels, _memory),
        *(_what_if, _compare, _recordings),
    )
)
"""Tools that only read."""


_BETWEEN_S: Final = 1.0
"""Minimum seconds between two messages of progress."""
_LONGEST_S: Final = 600.0
"""Longest time of a recording."""
_WARMUP: Final = 10
"""Steps of a recording to pass first."""


@dataclass(slots=True)
class Program:
    """Program that the person named, and the trials of it so far."""

    words: tuple[str, ...]
    folder: Path
    """Folder that it runs in."""
    trials: dict[str, Outcome] = field(default_factory=dict)
    """Trials by the name that the agent has for them."""


class InputRequired(Exception):
    """Input that a call needs from the person, as the protocol's ``inputRequests``."""


@dataclass(slots=True)
class Call:
    """Call of a tool that runs the program."""

    program: Program
    parameters: Mapping[str, Any]
    """Parameters of the request."""
    stopped: Callable[[], bool]
    """True once the agent has cancelled it, or is gone."""
    write: Callable[[object], None]
    shown_s: float = -_BETWEEN_S
    began: float = field(default_factory=monotonic)

    def show(self, total_s: float, what: str) -> None:
        """Say how far the call is, if that is asked for; raises KeyboardInterrupt once it is to
        end.
        """
        if self.stopped():
            raise KeyboardInterrupt
        spent_s, token = monotonic() - self.began, self._meta.get("progressToken")
        if token is not None and spent_s >= self.shown_s + _BETWEEN_S:
            self.shown_s = spent_s
            state = {"progressToken": token, "progress": spent_s, "total": total_s, "message": what}
            self.write({"jsonrpc": "2.0", "method": "notifications/progress", "params": state})

    @property
    def _meta(self) -> Mapping[str, Any]:
        meta = self.parameters.get("_meta")
        return meta if isinstance(meta, dict) else {}

    def agreed(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the changes that the person agrees to: of an agent that can show a form, those
        ticked in it, else all that it named.

        Raises InputRequired where the form is to be shown first.
        """
        match self._meta:
            case {"io.modelcontextprotocol/clientCapabilities": {"elicitation": dict(modes)}}:
                if modes and "form" not in modes:
                    return candidates
            case _:
                return candidates
        match self.parameters.get("inputResponses"):
            case {"consent": {"action": "accept", "content": dict(ticks)}}:
                return [each for each in candidates if ticks.get(str(each)) is True]
            case {"consent": _}:
                return []
        form = {
            "message": "Run the program several times to try these changes in it? Its files stay.",
            "requestedSchema": {"type": "object", "properties": dict(map(_box, candidates))},
        }
        raise InputRequired({"consent": {"method": "elicitation/create", "params": form}})


def _box(candidate: Candidate) -> tuple[str, dict[str, str]]:
    about = [
        f"{each.cure.what}{', which changes numerics' * each.cure.numerics}"
        for each in candidate.settings
    ]
    return str(candidate), {"type": "boolean", "description": "; ".join(about)}


def _record(call: Call, target: Path, measure: int = 40) -> Iterator[Said]:
    """Run the program for some steps and record them, and name the cures that may help. It runs in
    its folder and may rewrite its outputs, such as checkpoints.
    """
    import gputrace
    from gputrace.studies.runner import Failed
    from gputrace.trials import runs
    from gputrace.trials.choice import choose
    from gputrace.trials.cures import Candidate

    if target.exists() or not target.parent.is_dir():
        raise UsageError(f"target: {target} is there already, or its folder is not; name another")
    name, steps = str(target.relative_to(call.program.folder)), format_count(measure, "step")
    program = runs.Program(
        call.program.words,
        timeout_s=_LONGEST_S,
        tick=lambda: call.show(_LONGEST_S, f"recording {steps}"),
    )
    try:
        run = program.run(Candidate(), _WARMUP, measure, target)
    except Failed as error:
        raise InputError(name, f"the program did not make these steps: {error}") from None
    with gputrace.open(target) as opened:
        chosen, _ = choose(opened.analyze(), run)
    cures = [str(each) for each in chosen]
    row = {"path": name, "step_ns": run.step_ns, "steps": run.steps, "seconds": run.seconds}
    to_try = f" To `try`, the most promising first: {', '.join(cures)}." if cures else ""
    yield said(
        f"Recorded {name}: {format_count(run.steps, 'step')} of {format_ns(run.step_ns)} after "
        f"{_WARMUP} that were passed. Next: `verdict` and `causes` of it.{to_try}",
        cite("recording", row | {"cures": cures}),
    )


def _try(
    call: Call,
    cures: list[str],
    trace: list[str] | None = None,
    budget: str = "90s",
    copy: bool = False,
) -> Iterator[Said]:
    """Apply cures to the running program, measure what each gains, and keep the best. Files of the
    program are not changed, but each run may rewrite its outputs. Ask the person about each cure,
    and name only what they agree to.
    """
    from gputrace.report.text import limits
    from gputrace.trials.cures import read_candidates
    from gputrace.trials.history import Request
    from gputrace.trials.outcome import document, format_answer
    from gputrace.trials.trial import Trial

    named = read_candidates(",".join(cures))
    if not named:
        raise UsageError("cures: name each change that the person agrees to; `causes` has them")
    budget_s = options.read_duration(budget, "budget: ") / 1e9
    program, candidates = call.program, call.agreed(named)
    if not candidates:
        raise UsageError("nothing was tried: the person agrees to none of these changes")
    request = Request(
        program.words,
        candidates=tuple(candidates),
        recording=None if trace is None else Path(trace[0]),
        budget_s=budget_s,
        workdir=program.folder if copy else None,
    )

    def progress(run: int, label: str, spent_s: float, budget_s: float, gains: str) -> None:
        call.show(budget_s, f"run {run}, {label}{f'; so far {gains}' if gains else ''}")

    outcome = Trial(request, progress).run()
    if outcome.interrupted:
        raise KeyboardInterrupt
    name = f"trial-{len(program.trials) + 1}"
    program.trials[name] = outcome
    report = document(outcome, limits(80))
    verdict = f"{report.head[0].text.rstrip('.')}. This is {name}"
    patch = "; `apply` has its patch" if outcome.patch else ""
    yield said(f"{verdict}{patch}.")
    for at, row in enumerate(outcome.rows):
        yield said(f"{row.cure}: {format_answer(row)}.", cite(f"rows[{at}]", row))
    for note in outcome.notes:
        yield said(f"{note}.")


def _apply(call: Call, trial: str) -> Iterator[Said]:
    """The patch for the best cures of a trial. It writes nothing: the caller does."""
    outcome = call.program.trials.get(trial)
    if outcome is None or outcome.patch is None:
        known = [name for name, each in call.program.trials.items() if each.patch]
        raise UsageError(f"trial: has no patch; these have one: {', '.join(known) or 'none'}")
    patch = outcome.patch
    if patch.edits:
        yield said(
            f"{outcome.best} for good: {format_count(len(patch.edits), 'file')} to change; nothing "
            "is written yet. Show the diff to the person, write it (`patch -p1` in the folder), "
            "and measure again.",
            cite("patch", {"diff": patch.diff}),
        )
    for line in patch.by_hand:
        yield said(f"By hand: {line}.")


RUNNING: Final = dict((tool(_record, runs=True), tool(_try, runs=True), tool(_apply)))
"""Tools that run the program."""
