"""Tools for agents. Those that read traces say what `gputrace analyze` and `compare` show, as
sentences with rows; others run the program that the person named: record it, try cures on it, have
the patch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gputrace.cli import options
from gputrace.cli.mcp.tool import Call, Said, cite, said, tool
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
    from gputrace.model.results import Gap, LedgerRow

_EVIDENCE: Final = 3
"""Most rows of the ledger that a sentence names, and most gaps of one cause."""
_WORDS: Final = ("message", "advice", "details")
"""Fields of a finding that its sentences tell."""
_NO_GPU: Final = "No GPU was recorded; `lines` says where the host spends its time."
_CHANGES: Final = 5
"""Most classes, lines or kernels that a comparison lists."""


def _verdict(report: Report) -> Iterator[Said]:
    """The reason why training is slow, what to do about it, and what that would save; then every
    other finding and the limits of the figures. Call this first. Each finding begins with its id in
    brackets: `causes` with that id has more of it, `lines` the places in the program.
    """
    from gputrace.report.wording import notes, verdict

    if not report.findings:
        rows = [cite(f"breakdown[{at}]", row) for at, row in enumerate(report.breakdown)]
        yield said(verdict(report), *rows)
    for number, finding in enumerate(report.findings):
        rows = [
            cite(f"breakdown[{at}]", row)
            for at, row in enumerate(report.breakdown)
            if (row.gpu in finding.gpus if finding.gpus else row.rank in finding.ranks)
        ]
        rows += [
            cite(f"what_if[{at}]", cure)
            for at, cure in enumerate(report.what_if)
            if cure.finding == finding.id
        ]
        yield _finding(report, number, *rows)
    for note in notes(report):
        yield said(note)


def _finding(report: Report, at: int, *rows: dict[str, Any]) -> Said:
    """Return a finding in sentences after its id, with its row and others."""
    from gputrace.report.wording import finding_text

    finding = report.findings[at]
    row = cite(f"findings[{at}]", finding, *_WORDS)
    return said(f"[{finding.id}] {finding_text(report, finding)}", row, *rows)


def _breakdown(report: Report) -> Iterator[Said]:
    """Time of a step on each GPU: classes that sum to the step (compute,
    communication, copies, and idle time by its cause). Times of a row are sums of its `steps`.
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
        text = ": ".join(filter(None, (capital(gpu_label(row, report)), whole, ", ".join(parts))))
        yield said(f"{text}.", cite(f"breakdown[{number}]", row))
    if not report.gpus:
        yield said(_NO_GPU)


def _gaps(report: Report, limit: int = 10) -> Iterator[Said]:
    """The longest intervals in which a GPU runs nothing, each with its cause, the id of that in
    brackets, and the evidence. `step` explains the step of one.
    """
    from gputrace.report.wording import capital

    gaps = report.gaps
    where = "largest_in_steps" if gaps.largest_in_steps else "largest"
    total = {k: v for k, v in cite("gaps", gaps).items() if not k.startswith("largest")}
    count = format_count(gaps.count, "gap")
    yield said(f"The whole trace has {count}, {format_ns(gaps.total_ns)}.", total)
    if gaps.hint:
        yield said(f"{capital(gaps.hint)}.")
    for number in range(min(limit, len(getattr(gaps, where)))):
        yield _gap(report, where, number)


def _gap(report: Report, where: str, at: int) -> Said:
    """Return a gap of a list of them, with its cause."""
    from gputrace.report.wording import capital, gap_cause, gpu_label

    gap: Gap = getattr(report.gaps, where)[at]
    start = (gap.start_ns - report.origin_ns) / 1e9
    step = "" if gap.step is None else f" in step {gap.step}"
    cause = gap_cause(gap, report) + "".join(f" [{each}]" for each in list(gap.charges)[:1])
    text = f"{gpu_label(gap, report)} idles {format_ns(gap.length_ns)}{step}, from {start:.6f} s"
    evidence = f": {gap.evidence}" if gap.evidence else ""
    row = cite(f"gaps.{where}[{at}]", gap, "evidence")
    return said(f"{capital(text)}; {cause}{evidence}.", row)


def _kernels(report: Report, limit: int = 10) -> Iterator[Said]:
    """The kernels that take most time, with launches, durations, and use of the tensor cores."""
    kernels = report.kernels
    if kernels is None:
        yield said("No kernel ran in the measured part." if report.gpus else _NO_GPU)
        return
    for number, use in enumerate(kernels.top[:limit]):
        tensor = {"yes": ", on tensor cores", "no": ", not on tensor cores"}
        yield said(
            f"{clean(use.short)} takes {use.share:.1%} of the measured time of the GPUs: "
            f"{format_count(use.count, 'call')}, {format_ns(use.median_ns)} each (median), "
            f"{format_ns(use.max_ns)} the longest"
            f"{tensor.get(use.tensor_cores or '', '')}.",
            cite(f"kernels.top[{number}]", use, "name"),
        )


def _what_if(report: Report) -> Iterator[Said]:
    """Predicted length of a step without one cause each, by replaying the recorded steps."""
    yield from _predictions(report)
    if not report.what_if:
        yield said(
            "Nothing is predicted: these steps cannot be replayed as they were recorded, or no "
            "known cure would save over 1% of one. What each cause costs is in `causes`."
        )


def _predictions(report: Report, cause: str | None = None) -> Iterator[Said]:
    """Yield the predicted steps without one cause, or without each."""
    for number, cure in enumerate(report.what_if):
        if cause not in (None, cure.finding):
            continue
        now, then, low, high = map(
            format_ns, (cure.now_ns, cure.step_ns, cure.low_ns, cure.high_ns)
        )
        beyond = f"; that includes {cure.beyond}" if cure.beyond else ""
        against = f" (against [{cure.finding}])" if cure.finding else ""
        yield said(
            f"{cure.what}{against}: a step of {now} would take {then} ({low} to {high}), if "
            f"{cure.assumption}{beyond}.",
            cite(f"what_if[{number}]", cure, "what", "assumption", "beyond"),
        )


def _compare(before: list[str], after: list[str]) -> Iterator[Said]:
    """Changes between two runs beyond the noise of their steps: verdict, classes of time,
    findings, lines of the program, kernels.
    """
    import gputrace
    from gputrace.report.comparison import notes, verdict
    from gputrace.report.wording import capital

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
    """Yield what changed beyond the noise: classes, findings, lines, kernels."""
    from gputrace.report.comparison import NAMES, finding_notes
    from gputrace.report.wording import capital, label

    pair, unit = comparison.pair, comparison.unit
    assert pair is not None

    def changed(address: str, name: str, row: Any) -> Said:
        more = "more" if row.difference_ns > 0 else "less"
        return said(
            f"{capital(name)}: {format_ns(row.a_ns)} a {unit} before, {format_ns(row.b_ns)} after, "
            f"{format_ns(abs(row.difference_ns))} {more}.",
            cite(address, row, "name", "line"),
        )

    classes = [(at, row) for at, row in enumerate(pair.classes) if row.changed]
    kernels = [(at, row) for at, row in enumerate(pair.kernels) if row.changed]
    for at, row in classes:
        yield changed(f"pair.classes[{at}]", NAMES[row.name], row)
    for at, heading, text in finding_notes(comparison):
        came = cite(f"pair.findings[{at}]", pair.findings[at], "message")
        yield said(f"{heading.capitalize()}: {text}", came)
    for at, line in enumerate(pair.lines[:_CHANGES]):
        yield changed(f"pair.lines[{at}]", f"the host at {clean(line.line)}", line)
    for at, kernel in kernels[:_CHANGES]:
        yield changed(f"pair.kernels[{at}]", f"kernel {label(kernel.name)}", kernel)


def _recordings(folder: Path = Path(), limit: int = 10) -> Iterator[Said]:
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
    """Causes of lost time, the largest first, each with its rows of the ledger (`ns`: in all
    measured steps), the line of the program, and the names of cures to try. With `cause`, all of
    one cause or finding: also what its end would save, what each cure does, and its longest gaps.
    """
    from gputrace.report.wording import capital

    charged: dict[str, list[tuple[int, LedgerRow]]] = {}
    for at, row in enumerate(report.ledger):
        charged.setdefault(row.cause, []).append((at, row))
    if cause is not None:
        yield from _all_of(report, cause, charged)
        return
    sums = {name: sum(row.ns for _, row in rows) for name, rows in charged.items()}
    for name in sorted(sums, key=lambda name: -sums[name])[:limit]:
        yield _lost_to(report, name, charged[name], _cures_for(report, name, False), _EVIDENCE)
    for at, finding in enumerate(report.findings):
        if not charged and finding.impact_ns:
            text = (
                f"[{finding.id}] {capital(finding.message)}.{_cures_for(report, finding.id, False)}"
            )
            yield said(text, cite(f"findings[{at}]", finding, *_WORDS))


def _lost_to(
    report: Report, cause: str, charged: list[tuple[int, LedgerRow]], more: str, most: int | None
) -> Said:
    """Return what a cause costs, with at most so many of its rows of the ledger."""
    from gputrace.report.wording import capital

    rows = sorted(charged, key=lambda each: -each[1].ns)
    lost_ns, largest = sum(row.ns for _, row in rows), rows[0][1]
    share = format_share(lost_ns, sum(row.total_ns for row in report.breakdown))
    lost = format_ns(lost_ns / sum(row.steps or 1 for row in report.breakdown))
    at_line = f", most at {largest.line}" if largest.line else ""
    evidence = f" ({largest.evidence})" if largest.evidence else ""
    return said(
        f"{capital(report.cause_label(cause))} [{cause}]: {lost} a step and GPU ({share})"
        f"{at_line}{evidence}.{more}",
        *(cite(f"ledger[{at}]", row, "cause", "path") for at, row in rows[:most]),
    )


def _all_of(
    report: Report, cause: str, charged: Mapping[str, list[tuple[int, LedgerRow]]]
) -> Iterator[Said]:
    """Yield what is known of a cause or finding by its id; raises UsageError if it is none here."""
    found = [at for at, finding in enumerate(report.findings) if finding.id == cause]
    known = {**charged, **{finding.id: [] for finding in report.findings}}
    if cause not in known:
        names = ", ".join(known) or "none"
        raise UsageError(f"cause: nothing is lost to {cause!r} here; the ids are {names}")
    for at in found:
        yield _finding(report, at)
    if cause in charged:
        yield _lost_to(report, cause, charged[cause], "", None)
    yield from _predictions(report, cause)
    if cures := _cures_for(report, cause, True):
        yield said(cures[1:])
    gaps = report.gaps.largest_in_steps
    of_it = [at for at, gap in enumerate(gaps) if next(iter(gap.charges), "") == cause]
    for at in of_it[:_EVIDENCE]:
        yield _gap(report, "largest_in_steps", at)


def _lines(report: Report, limit: int = 8) -> Iterator[Said]:
    """Places in the program: the lines where the host spends a step, by samples of it; phases of
    the step; and modules whose kernels take longest, with the lines that call them.
    """
    from gputrace.report.wording import capital, loop_name

    turn = loop_name(report)[1] if report.steps.count else "the whole time"
    sampled = sorted(enumerate(report.host_lines), key=lambda each: -each[1].share)
    for at, line in sampled[:limit]:
        yield said(
            f"Rank {line.rank} is at {clean(line.line)} for {format_ns(line.step_ns)} of {turn} "
            f"({line.share:.1%}, {format_count(line.samples, 'sample')}).",
            cite(f"host_lines[{at}]", line, "line"),
        )
    for at, row in enumerate(report.step_phases):
        met = [(n, phase) for n, phase in enumerate(row.phases) if phase.host_ns or phase.idle_ns]
        parts = [f"{phase.name} {format_ns(phase.host_ns)}" for _, phase in met]
        yield said(
            f"{capital(turn)} of rank {row.rank}, on the host: {', '.join(parts)}.",
            *(cite(f"step_phases[{at}].phases[{n}]", phase) for n, phase in met),
        )
    spent = [use.forward_ns + use.backward_ns for use in report.modules]
    own = {(use.rank, use.path): ns for use, ns in zip(report.modules, spent, strict=True)}
    for use, ns in zip(report.modules, spent, strict=True):
        around = use.rank, use.path.rpartition("/")[0]
        if use.path and around in own and around[1]:
            own[around] -= ns
    most = sorted(enumerate(report.modules), key=lambda each: -own[each[1].rank, each[1].path])
    for at, use in most[:limit]:
        place = f", called at {clean(use.line)}" if use.line else ""
        backward = f", {format_ns(use.backward_ns)} of it backward" if use.backward_ns else ""
        yield said(
            f"{clean(use.path) or 'What no module launched'} on rank {use.rank}: kernels of "
            f"{format_ns(spent[at])} in {turn}{backward}{place}.",
            cite(f"modules[{at}]", use, "path", "line"),
        )
    if not (report.host_lines or report.step_phases or report.modules):
        yield said(
            "No lines of the host, phases of a step or modules were recorded: "
            "`gputrace record --python` names lines, its hooks the rest."
        )


def _cures_for(report: Report, cause: str, described: bool) -> str:
    """Return the cures that may be tried for a cause, the largest predicted gain first, as a
    sentence after a space, if any; not those for other frameworks, which come last where it is
    unknown, nor those that need several ranks or a GPU where there are none.
    """
    from gputrace.trials.cures import Candidate, Setting, all_cures, predict

    there = {"gpu": report.gpus, "ranks": len({row.rank for row in report.breakdown}) > 1}
    lacks = {word for word, is_there in there.items() if not is_there}
    mine = "torch" if report.framework in ("pytorch", "") else report.framework
    cures: list[tuple[bool, float, str]] = []
    for cure in all_cures().values():
        elsewhere = bool(cure.frameworks) and mine not in cure.frameworks
        is_for_others = elsewhere and bool(report.framework)
        if cause not in cure.findings or is_for_others or lacks.intersection(cure.needs.split()):
            continue
        alone = None if cure.value is None else Candidate((Setting(cure, cure.value),))
        predicted = alone and predict(alone, report)
        ratio = predicted.ratio if predicted else 1.0
        about = [cure.what] * described + ["changes numerics"] * cure.numerics
        if elsewhere:
            about.append(f"for {' or '.join(cure.frameworks)}")
        if described and predicted and ratio < 1:
            bounds = (predicted.ratio, predicted.low or ratio, predicted.high or ratio)
            then, low, high = (format_ns(each * (report.steps.mean_ns or 0)) for each in bounds)
            about.append(f"predicted: {then} a step" + f", {low} to {high}" * (low != high))
        takes, more = f"={cure.takes}" * bool(cure.takes), f" ({'; '.join(about)})"
        cures.append((elsewhere, ratio, f"{cure.id}{takes}{more * bool(about)}"))
    named = [text for *_, text in sorted(cures, key=lambda each: each[:2])]
    return f" To try: {', '.join(named)}." if named else ""


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
    trace: list[str],
    number: int | None = None,
    steps: str | None = None,
    time: str | None = None,
) -> Iterator[Said]:
    """Explanation of one step's length, else of the slowest: its causes, longest gap and kernels
    against those of the median step. The addresses are those of the JSON of `analyze --step`.
    """
    import gputrace
    from gputrace.report import Limits
    from gputrace.report.step import document

    with gputrace.open(*trace, windows=time is not None) as opened:
        result = opened.explain_step(
            "slowest" if number is None else number, steps=steps, time=time
        )
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
        *(_verdict, _causes, _lines, _breakdown, _gaps, _slow_steps, _step, _ranks, _kernels),
        *(_memory, _what_if, _compare, _recordings),
    )
)
"""Tools that only read."""


_LONGEST_S: Final = 600.0
"""Longest time of a recording."""
_WARMUP: Final = 10
"""Steps of a recording to pass first."""


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
        yield said(f"{note.rstrip('.')}.")


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
