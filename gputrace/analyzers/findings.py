"""Findings: what costs time, in the order of severity and cost.

A rule looks at the breakdown of all GPUs and yields findings or nothing. To add one, write it
and put it in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gputrace.analyzers.results import Breakdown, Finding

_HIGH: Final = 0.20
_MEDIUM: Final = 0.05
"""Shares of the time from which a cost is called high and medium, as xprof calls input-bound."""

_SEVERITIES: Final = ("high", "medium", "low", "info")

Rule = Callable[[Sequence[Breakdown]], Iterator[Finding]]


def find(breakdown: Sequence[Breakdown]) -> tuple[Finding, ...]:
    """All findings, the most important first."""
    found = [finding for rule in RULES for finding in rule(breakdown)]
    found.sort(key=lambda finding: (_SEVERITIES.index(finding.severity), -finding.impact_ns))
    return tuple(found)


def _severity(share: float) -> str | None:
    if share >= _HIGH:
        return "high"
    return "medium" if share >= _MEDIUM else None


def _mean_share(rows: Sequence[Breakdown], name: str) -> float:
    total = sum(row.total_ns for row in rows)
    return sum(row.of(name) for row in rows) / total if total else 0.0


def _impact(rows: Sequence[Breakdown], name: str) -> int:
    """Mean cost of one GPU, per step where there are steps."""
    return sum(row.of(name) // max(row.steps, 1) for row in rows) // len(rows)


def _costly(
    rows: Sequence[Breakdown], name: str, id: str, message: str, advice: str
) -> Iterator[Finding]:
    """A finding where a class of time costs more than a little; message takes ``share``."""
    share = _mean_share(rows, name)
    severity = _severity(share)
    if severity is None:
        return
    yield Finding(
        id,
        severity,
        tuple(row.gpu for row in rows),
        tuple(sorted({row.rank for row in rows})),
        _impact(rows, name),
        message.format(share=f"{share:.0%}"),
        advice,
        {"share": round(share, 4)},
    )


def _h2d_exposed(rows: Sequence[Breakdown]) -> Iterator[Finding]:
    yield from _costly(
        rows,
        "h2d",
        "h2d-exposed",
        "{share} of the time goes to host-to-device copies with nothing running beside them",
        "copy the next batch while this one computes: pinned memory, non_blocking=True, a side "
        "stream; copy less (smaller types, decode on the GPU); keep weights on the GPU",
    )


def _communication_exposed(rows: Sequence[Breakdown]) -> Iterator[Finding]:
    yield from _costly(
        rows,
        "communication",
        "communication-exposed",
        "{share} of the time goes to communication with no computation beside it",
        "overlap it with the backward pass (bucket size, gradient_as_bucket_view), send less "
        "(bf16 gradients, accumulation), or look for a rank that comes late",
    )


def _idle_unexplained(rows: Sequence[Breakdown]) -> Iterator[Finding]:
    yield from _costly(
        rows,
        "other_idle",
        "idle-unexplained",
        "{share} of the time the GPU runs nothing, for reasons that the trace does not show",
        "record the host too (`gputrace record`, or `nsys profile -t cuda,nvtx,osrt`)",
    )


def _compute_bound(rows: Sequence[Breakdown]) -> Iterator[Finding]:
    share = _mean_share(rows, "compute")
    if share < 1 - _HIGH:
        return
    yield Finding(
        "compute-bound",
        "info",
        tuple(row.gpu for row in rows),
        tuple(sorted({row.rank for row in rows})),
        _impact(rows, "compute"),
        f"{share:.0%} of the time the GPU computes: it is the limit",
        "make the kernels cheaper: mixed precision, channels_last, torch.compile, fused optimizer",
        {"share": round(share, 4)},
    )


RULES: Final[tuple[Rule, ...]] = (
    _h2d_exposed,
    _communication_exposed,
    _idle_unexplained,
    _compute_bound,
)
