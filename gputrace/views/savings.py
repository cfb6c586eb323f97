"""What curing a finding would save, in a sentence."""

from __future__ import annotations

from gputrace.analyzers.results import Analysis, Finding
from gputrace.units import format_ns


def savings(analysis: Analysis, finding: Finding) -> str:
    """After a space, a sentence on what curing a finding would save; nothing if unknown.

    Of several findings of one id, the first has it: the cure is of all of them.
    """
    cure = next((cure for cure in analysis.what_if if cure.finding == finding.id), None)
    first = next(known for known in analysis.findings if known.id == finding.id)
    if cure is None or first is not finding:
        return ""
    now = format_ns(cure.now_ns)
    least, most = (format_ns(cure.now_ns - bound) for bound in (cure.high_ns, cure.low_ns))
    if cure.high_ns >= cure.now_ns:
        return f" {cure.what} might save up to {most} of {now} a step."
    if least.split()[-1] == most.split()[-1]:
        least = least.split()[0]
    return (
        f" {cure.what} would save about {format_ns(cure.gain_ns)} of {now} a step "
        f"({least} to {most})."
    )
