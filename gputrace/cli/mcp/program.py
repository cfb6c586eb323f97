"""Tools that run the program which the person named: record it, try cures on it, have the patch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from gputrace.cli.mcp.tool import Said, cite, said, tool
from gputrace.errors import InputError, UsageError

if TYPE_CHECKING:
    from gputrace.trials.cures import Candidate
    from gputrace.trials.outcome import Outcome

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
    from gputrace.units import format_count, format_ns

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
    from gputrace.trials.report import document, format_answer
    from gputrace.trials.trial import Trial
    from gputrace.units import parse_duration

    named = read_candidates(",".join(cures))
    if not named:
        raise UsageError("cures: name each change that the person agrees to; `causes` has them")
    try:
        budget_s = parse_duration(budget) / 1e9
    except ValueError as error:
        raise UsageError(f"budget: {error}") from None
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
    from gputrace.units import format_count

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


TOOLS: Final = dict((tool(_record, runs=True), tool(_try, runs=True), tool(_apply)))
