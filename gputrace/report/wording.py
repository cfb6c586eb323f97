"""Sentences and labels of reports: verdicts, findings, notes; names of GPUs and kernels; times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple

from gputrace.model.kernels import LongestLaunch
from gputrace.model.names import short
from gputrace.model.results import TURNS, Analysis, Breakdown, Finding, Gap, GpuTotals, Step
from gputrace.model.time_class import BY_ID
from gputrace.sanitize import LONGEST, clean, cut
from gputrace.units import format_count, format_ids, format_ns, format_pair, format_steps

if TYPE_CHECKING:
    from gputrace.analyzers.timeline_model import SceneLane

_HIDDEN_SHARE: Final = 0.01
"""Share of the time above which data loading that no GPU waits for is mentioned."""


_UNEXPLAINED: Final = ("other_idle_ns", "total_ns")
"""Time that no finding explains where a recorder causes it itself, and all time."""
_FEWEST_KERNELS: Final = 10
_SHORTEST_NS: Final = 1_000_000
"""Kernels, and nanoseconds, below both of which a recording without steps is too short to judge,
unless the host was recorded for much longer.
"""


def too_short(analysis: Analysis) -> str:
    """Return how little was recorded, ``one kernel, 50.0 µs``; empty if it is enough to judge."""
    kernels = sum(gpu.kernels for gpu in analysis.gpus)
    is_little = 0 < kernels < _FEWEST_KERNELS and analysis.span_ns < _SHORTEST_NS
    is_known = any(finding.id == "low-utilization" for finding in analysis.findings)
    if not is_little or is_known or any(row.steps for row in analysis.breakdown):
        return ""
    count = "one kernel" if kernels == 1 else f"{kernels} kernels"
    return f"{count}, {format_ns(analysis.span_ns)}"


def shown_findings(analysis: Analysis) -> tuple[Finding, ...]:
    """Return the findings to show: of a recording too short to judge, those without a cost."""
    is_short = bool(too_short(analysis))
    return tuple(each for each in analysis.findings if not (is_short and each.impact_ns))


def verdict(analysis: Analysis) -> str:
    """Return the first finding's message as a sentence."""
    if little := too_short(analysis):
        return f"Too short to judge: {little}."
    if analysis.findings:
        return f"{capital(analysis.findings[0].message)}."
    if not analysis.breakdown:
        return "No verdict: how much the GPUs work was not measured."
    idle, whole = (sum(getattr(row, of) for row in analysis.breakdown) for of in _UNEXPLAINED)
    if 2 * idle > whole:
        return "No verdict: the trace does not say when the GPUs were idle (see the notes)."
    return "Nothing stands out: no class of time is worth a change."


def explain(analysis: Analysis, finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield what stands below a finding's sentence, each with its label: what the trace shows, the
    gain to expect from a cure, and what to do.
    """
    for detail in finding.details:
        yield "", f"{capital(detail)}."
    if gain := expected_gain(analysis, finding):
        yield "Expected gain", f"{gain}."
    if finding.advice:
        yield "What to do", f"{finding.advice}."


def finding_text(analysis: Analysis, finding: Finding) -> str:
    """Return a finding as sentences: its message, what the trace shows, gain and advice."""
    below = (f"{name}: {text}" if name else text for name, text in explain(analysis, finding))
    return " ".join([f"{capital(finding.message)}.", *below])


def capital(text: str) -> str:
    """Return a text with the capital letter of a sentence's beginning, unless a name begins it."""
    return re.sub(r"^(gpu(?= \d)|[a-z](?=[a-z'-]* ))", lambda begin: begin[0].upper(), text)


def gpu_name(gpu: int | None, rank: int, known: bool, ranked: bool) -> str:
    """Return ``gpu 3``, or ``device 3`` for an unknown card; with its rank if ``ranked``."""
    if gpu is None:
        return f"rank {rank}"
    name = f"{'gpu' if known else 'device'} {gpu}" if gpu >= 0 else "unknown device"
    return f"{name} rank {rank}" if ranked else name


def needs_ranks(rows: Sequence[GpuTotals] | Sequence[SceneLane]) -> bool:
    """Return true if labels of GPUs need ranks: there are several, numbered unlike the GPUs."""
    return len({row.rank for row in rows}) > 1 and any(row.gpu != row.rank for row in rows)


def gpu_label(row: Breakdown | Gap | GpuTotals | LongestLaunch | Step, analysis: Analysis) -> str:
    """Return the name of a GPU; with the rank where it differs."""
    known = all(t.gpu_known for t in analysis.gpus if (t.gpu, t.rank) == (row.gpu, row.rank))
    ranked = row.gpu is not None and row.gpu >= 0 and needs_ranks(analysis.gpus)
    return gpu_name(row.gpu, row.rank, known, ranked)


def card_name(gpu: int, analysis: Analysis) -> str:
    """Return the name of a card, whichever rank runs on it."""
    return gpu_name(gpu, 0, all(t.gpu_known for t in analysis.gpus if t.gpu == gpu), ranked=False)


def notes(analysis: Analysis) -> Iterator[str]:
    """Yield the caveats of the figures, a line each."""
    if len(analysis.paths) > 1 and analysis.gpus:
        ranks: dict[str, set[int]] = {}
        for total in analysis.gpus:
            ranks.setdefault(total.host, set()).add(total.rank)
        by_host = {host: format_ids("rank", sorted(ids)) for host, ids in ranks.items()}
        unnamed = by_host.pop("", "")
        # A host without a name has that of its first file.
        files = {PurePath(path).stem for path in analysis.paths}
        of = {host: f"the host of {host}" if host in files else host for host in by_host}
        clauses = [f"{of[host]} has {ids}" for host, ids in by_host.items()]
        clauses += [f"no host is named for {unnamed}"] if unnamed else []
        count = f" of {format_count(len(by_host), 'host')}" if by_host else ""
        yield f"{len(analysis.paths)} files{count}: {'; '.join(clauses)}."
    if any(not total.gpu_known for total in analysis.gpus):
        yield (
            "The trace does not identify the physical cards; they are numbered as their process "
            "sees them."
        )
    yield from _loader_note(analysis)
    steps = analysis.steps
    if not analysis.gpus and steps.p50_ns is not None and steps.p95_ns is not None:
        p50, p95 = format_ns(steps.p50_ns), format_ns(steps.p95_ns)
        yield f"Steps are {steps.reason}: p50 {p50}, p95 {p95}."
    for reason, rows in analysis.dropped_rows.items():
        yield f"{format_count(rows, 'row')} left out: {reason}."
    gaps = analysis.gaps
    if gaps.largest_in_steps and gaps.largest[0].length_ns > gaps.largest_in_steps[0].length_ns:
        longest = gaps.largest[0]
        if longest.step is not None and longest.step < steps.warmup_count:
            length, every = format_ns(longest.length_ns), f"--steps 0:{steps.count}"
            yield f"The warm-up, left out here, has longer gaps, up to {length} ({every})."
    if gaps.hint:
        yield f"{capital(gaps.hint)}."
    yield from (f"{capital(warning)}." for warning in analysis.warnings)


def _loader_note(analysis: Analysis) -> Iterator[str]:
    """Note data loading that no GPU waits for: no loss yet, but the next potential bottleneck."""
    rows = [row for row in analysis.breakdown if row.host_data_ns is not None and row.steps]
    if not rows or not analysis.gpus:
        return
    steps = sum(row.steps for row in rows)
    host = sum(row.host_data_ns or 0 for row in rows)
    waited = sum(row.of("data_feeding") for row in rows)
    if host - waited > _HIDDEN_SHARE * sum(row.total_ns for row in rows):
        a_turn = loop_name(analysis)[1]
        yield (
            f"The host waits for data for {format_ns(host / steps)} {a_turn}, the "
            f"{'GPU' if len(rows) == 1 else 'GPUs'} for "
            f"{format_ns(waited / steps) if waited else 'none'} of that."
        )


class RunPart(NamedTuple):
    """A stretch of the run, in nanoseconds of the trace's clock."""

    name: str
    start: int
    end: int


_NAMES: Final = {"warmup": "warm-up", "steady": "measured", "between": "between steps"}
_LEAST_PART: Final = 0.005
"""Share of the run below which the time between two steps is not worth a part of its own."""


def run_parts(analysis: Analysis) -> tuple[RunPart, ...]:
    """Return the parts of the run on its first rank with steps, in order: what came before the
    first step, warm-up, measured steps, validation, checkpoints; none where nothing lies between
    steps.
    """
    rank = min((step.rank for step in analysis.step_list), default=None)
    named = {"warmup", "epoch"}
    found = {(s.start_ns, s.end_ns, s.phase) for s in analysis.step_list if s.rank == rank}
    found |= {
        (phase.start_ns, phase.end_ns, phase.phase)
        for phase in analysis.phases
        if phase.rank == rank and phase.phase not in named
    }
    if all(phase.phase in named for phase in analysis.phases):
        return ()
    first = min([*(gpu.start_ns for gpu in analysis.gpus), min(found)[0]])
    at, last = min(analysis.origin_ns, first), first + analysis.span_ns
    whole, parts = last - at, list[RunPart]()
    least = _LEAST_PART * whole
    for start, end, phase in sorted(found):
        name, begin = _NAMES.get(phase, phase), start if start - at >= least else at
        if begin > at:
            parts.append(RunPart("between steps" if parts else "before the first step", at, begin))
        elif parts and parts[-1].name == name:
            begin = parts.pop().start
        parts.append(RunPart(name, begin, max(at, end)))
        at = parts[-1].end
    if last - at >= least:
        parts.append(RunPart("after the last step", at, last))
    return tuple(parts)


def describe_numbers(analysis: Analysis) -> str:
    """Return which steps of the program the numbered ones are, where its own count differs from
    theirs, as after a start within the run; else nothing.
    """
    numbers = {step.step: step.number for step in analysis.step_list if step.number is not None}
    if all(number == step for step, number in numbers.items()):
        return ""
    ours, theirs = format_steps(sorted(numbers)), format_steps(sorted(numbers.values()))
    return f"Steps {ours} here are the program's steps {theirs}."


def gap_cause(gap: Gap, analysis: Analysis) -> str:
    """Return the cause that the ledger charges most of a gap to, in its words; without a ledger,
    the class of most of it.
    """
    for cause in gap.charges:
        return analysis.cause_label(cause)
    return BY_ID[gap.cause].label.removeprefix("idle: ")


def describe_parts(parts: Sequence[RunPart]) -> str:
    """Return how long a run was in its parts of each name, in order of the first."""
    lengths: dict[str, list[int]] = {}
    for part in parts:
        lengths.setdefault(part.name, []).append(part.end - part.start)
    return ", ".join(
        f"{name} {format_ns(sum(each))}" + (f" (in {len(each)} parts)" if len(each) > 1 else "")
        for name, each in lengths.items()
    )


def loop_name(analysis: Analysis) -> tuple[str, str]:
    """Return the name of one turn of the detected loop, without and with its article."""
    turn = TURNS.get(analysis.steps.kind, "iteration")
    return turn, f"{'an' if turn[0] == 'i' else 'a'} {turn}"


def kernel_labels(names: Sequence[str], longest: int) -> list[str]:
    """Shorten names of kernels to what people call them; different names stay different."""
    # Its patterns take as long to compile as a cached answer to be shown.
    from gputrace.analyzers.kernel_names import short_name

    labels = labels_of({name: short_name(name) for name in names}, longest)
    return [labels[name] for name in names]


def labels_of(shorts: Mapping[str, str], longest: int) -> dict[str, str]:
    """Return labels of at most ``longest`` characters for names, given short ones.

    Longer ones are cut in the middle, as their ends distinguish them; different names stay
    different.
    """
    labels = {name: cut_middle(short, longest) for name, short in shorts.items()}
    return labels | _distinct(labels, shorts, longest)


def _distinct(labels: Mapping[str, str], short: Mapping[str, str], longest: int) -> dict[str, str]:
    """Return labels that show where names part, for those that have the same label."""
    apart: dict[str, str] = {}
    for label in set(labels.values()):
        names = [name for name in labels if labels[name] == label]
        if len(names) == 1:
            continue
        shorts = [short[name] for name in names]
        texts = shorts if len(set(shorts)) == len(names) else names
        ends = zip(min(texts), max(texts), strict=False)
        shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], ends))
        word = re.split(r"[\W_]", shared)[-1]
        start = len(shared) - (len(word) if len(word) < longest // 4 else 0)
        head = shorts[0][: longest // 2]
        if texts is shorts:
            head = head[:start]
        parted = {
            name: cut(f"{head}…{text[start:]}", longest)
            for name, text in zip(names, texts, strict=True)
        }
        apart |= parted | _distinct(parted, short, longest)
    return apart


def cut_middle(name: str, longest: int) -> str:
    """Cut a name that is longer, so that its beginning and its end are left."""
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[len(name) - (longest - head - 1) :]}"


_WAITS: Final = (
    *("data-feeding", "host-blocked", "gil-wait", "garbage-collection"),
    *("cpu-throttled", "cpu-starved", "host-work", "checkpoint-stall", "loader-restart"),
)
"""Findings on time in which a host without a GPU does not train, and may overlap nothing."""
_COSTS: Final = ("cost_ns", "touched_ns")
"""Evidence that a finding's sentence shows instead of its mean cost."""


_AT_TOP: Final = 0.9
"""Part of the range of a gain, from its lower end, above which the prediction is at the upper one.
"""


def expected_gain(analysis: Analysis, finding: Finding) -> str:
    """Return what a cure is predicted to gain, ``25.1 ms a step, likely 17.0 to 32.0 ms``, or the
    range alone where the prediction is at its upper end; empty if unknown. Without a GPU, what the
    program waits for is the most that it gains.

    Among findings with the same id only the first gets it: the prediction covers all of them.
    """
    cures = [cure for cure in analysis.what_if if cure.finding == finding.id]
    first = next(known for known in analysis.findings if known.id == finding.id)
    turn = loop_name(analysis)[1]
    if not analysis.gpus and finding.id in _WAITS and finding.severity != "low":
        if not analysis.steps.count:
            return ""
        before = analysis.findings[: analysis.findings.index(finding)]
        shared = any(each.id in _WAITS and each.severity != "low" for each in before)
        overlaps = ", of which some may be in the gain above" if shared else ""
        return f"up to {format_ns(finding.impact_ns)} {turn}{overlaps}"
    if not cures or first is not finding:
        return ""
    cure = cures[0]
    least, most = (cure.now_ns - bound for bound in (cure.high_ns, cure.low_ns))
    gain = cure.gain_ns if least > 0 else most
    text = f"{'' if least > 0 else 'up to '}{format_ns(gain)} {turn}"
    if least > 0 and format_ns(least) != format_ns(most):
        likely = format_pair(least, "to", most)
        # No more than all that is lost is gained: near that, the point is no middle of the range.
        is_at_top = gain - least > _AT_TOP * (most - least)
        text = f"{likely} {turn}" if is_at_top else f"{text}, likely {likely}"
    text += f", with {cure.what}" if len(cures) > 1 else ""
    costs = (int(finding.evidence.get(name) or 0) for name in _COSTS)
    cost = max(finding.impact_ns, *costs)
    if cure.beyond and gain > cost and format_ns(gain) != format_ns(cost):
        text += f" (more than the loss: includes {cure.beyond})"
    return text


@lru_cache(maxsize=4096)
def label(name: str) -> str:
    """Return a kernel's short name, each character one column wide."""
    text = short(name) if len(name) < 10 * LONGEST else name
    text = clean(text, 80)
    if text.isascii():
        return text
    from rich.cells import cell_len

    return "".join(c if cell_len(c) == 1 else "·" for c in text)


def moment(ns: int, step_ns: int = 1_000) -> str:
    """Format a time, ``28.6547s``, rounded to the decimals that resolve ``step_ns`` nanoseconds."""
    decimals = min(max(0, 10 - len(str(max(step_ns, 1)))), 9)
    sign, size = ("-", -ns) if ns < 0 else ("", ns)
    whole, below = divmod((2 * size * 10**decimals + 10**9) // (2 * 10**9), 10**decimals)
    return f"{sign}{whole}.{below:0{decimals}d}s" if decimals else f"{sign}{whole}s"
