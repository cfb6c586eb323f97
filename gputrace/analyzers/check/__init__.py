"""Gates for continuous integration: figures of a run that must keep their limits."""

from __future__ import annotations

from collections.abc import Iterable

from gputrace.analyzers.check.baseline import gate_slowdown
from gputrace.analyzers.check.gates import FIGURES, gate, gate_findings
from gputrace.analyzers.check.results import SCHEMA_VERSION, Asked, Check, Gate, Limit
from gputrace.analyzers.compare import Run
from gputrace.analyzers.findings import HOST_RULES, RULES
from gputrace.analyzers.findings.severities import SEVERITIES
from gputrace.errors import UsageError
from gputrace.plugins import names

__all__ = ["FIGURES", "SEVERITIES", "Asked", "Check", "Gate", "Limit", "check", "check_words"]


def check_words(fail_on: Iterable[str]) -> None:
    """Raises UsageError for what is neither a severity nor a finding: it would never fail."""
    ids = {rule.__name__.replace("_", "-") for rule in (*RULES, *HOST_RULES)}
    ids |= set(names("analyzers"))
    for word in fail_on:
        if word not in ids and word not in SEVERITIES:
            known = ", ".join((*SEVERITIES, *sorted(ids)))
            raise UsageError(f"{word!r} is no finding and no severity; there are {known}")


def check(run: Run, asked: Asked, baseline: Run | None = None) -> Check:
    """Every gate asked for; the baseline is there where a slow-down is limited."""
    gates = [gate(run, limit) for limit in asked.limits]
    if asked.max_slowdown is not None and baseline is not None:
        gates.append(gate_slowdown(run, baseline, asked.max_slowdown))
    gates += [gate_findings(run.analysis, word) for word in asked.fail_on]
    return Check(
        SCHEMA_VERSION,
        run.analysis.paths,
        baseline.analysis.paths if baseline is not None else None,
        all(gate.passed for gate in gates),
        tuple(gates),
    )
