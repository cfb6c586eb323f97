"""Two runs side by side: steps, classes, kernels, GPUs and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from gputrace.analyzers.compare.kernels import KernelUse
from gputrace.analyzers.compare.loop import NAMES, Key
from gputrace.analyzers.compare.noise import ABSENT, Mean, difference, ratio
from gputrace.analyzers.compare.results import (
    Change,
    ClassChange,
    FindingChange,
    GpuPair,
    KernelChange,
    Pair,
    Worst,
)
from gputrace.analyzers.compare.run import Run
from gputrace.analyzers.results import Breakdown, Finding

MATTERS: Final = 0.01
"""Part of a step from which a difference of a step or class counts as one: two recordings of one
program differ by about as much."""
KERNEL_MATTERS: Final = 0.001
"""Part of a step from which a difference of a kernel does."""
OF_ITS_OWN: Final = 0.02
"""Part of its own time by which a kernel must differ besides."""


def compare_pair(a: Run, b: Run, unit: str, work: tuple[float, str]) -> Pair:
    """B against A, in a unit that both have."""
    step = change(*lengths(a, b), MATTERS) if unit != "span" else None
    speed = ratio(*lengths(a, b)) if step is not None else None
    return Pair(
        step=step,
        speed_up=step.a_ns / max(step.b_ns, 1) * work[0] if step is not None else None,
        speed_up_low=speed.low * work[0] if speed is not None else None,
        speed_up_high=speed.high * work[0] if speed is not None else None,
        work_ratio=work[0],
        work_source=work[1],
        classes=tuple(_classes(a, b, unit)),
        kernels=tuple(_kernels(a, b, unit)),
        gpus=tuple(_gpus(a, b)),
        findings=tuple(_findings(a, b)),
    )


def lengths(a: Run, b: Run) -> tuple[Mean, Mean]:
    """The steps of both, which they must have."""
    assert a.loop is not None
    assert b.loop is not None
    return a.loop.length, b.loop.length


def change(
    a: Mean, b: Mean, matters: float, rows: int = 1, step: float = 0, own: float = 0
) -> Change:
    """A figure in both; it must differ by a part of the step (or of itself), and of its own."""
    bounds = difference(a, b, rows)
    far = abs(b.value - a.value)
    enough = far >= matters * (step or a.value) and far >= own * max(a.value, b.value) and far > 0
    return Change(
        round(a.value),
        round(b.value),
        round(b.value - a.value),
        round(bounds.low) if bounds is not None else None,
        round(bounds.high) if bounds is not None else None,
        None if bounds is None else enough and (bounds.low > 0 or bounds.high < 0),
    )


def _fields(of: Change) -> dict[str, int | bool | None]:
    return {name: getattr(of, name) for name in Change.__dataclass_fields__}


def _classes(a: Run, b: Run, unit: str) -> Iterator[ClassChange]:
    """Every class that both know, and of which one has some."""
    first, second = classes_of(a, unit), classes_of(b, unit)
    whole = _whole(a, unit), _whole(b, unit)
    names = [n for n in NAMES if n in first and n in second]
    some = [n for n in names if first[n].value or second[n].value]
    for name in some:
        both = change(first[name], second[name], MATTERS, len(some), whole[0])
        worst = [_worst(run, name) if unit != "span" else None for run in (a, b)]
        yield ClassChange(
            **_fields(both),  # type: ignore[arg-type]
            name=name,
            a_share=first[name].value / whole[0],
            b_share=second[name].value / whole[1],
            a_worst=worst[0],
            b_worst=worst[1],
        )


def classes_of(run: Run, unit: str) -> dict[str, Mean]:
    """The classes of a step, or of the whole span, whose errors nobody knows."""
    if unit != "span" and run.loop is not None:
        return dict(run.loop.classes)
    return {name: Mean(value, None, 0) for name, value in run.span.items()}


def _whole(run: Run, unit: str) -> float:
    if unit != "span" and run.loop is not None:
        return max(run.loop.length.value, 1)
    return max(sum(run.span.values()), 1)


def _worst(run: Run, name: str) -> Worst | None:
    """The GPU that has most of a class; None where there is only one."""
    rows = run.loop.of_gpu if run.loop is not None else {}
    if len(rows) < 2:
        return None
    (gpu, rank), row = max(rows.items(), key=lambda item: item[1][name])
    return Worst(gpu, rank, round(row[name]))


def _kernels(a: Run, b: Run, unit: str) -> list[KernelChange]:
    """All kernels by how much their time differs."""
    uses = [
        {use.name: use for use in (run.kernels_of_span if unit == "span" else run.kernels)}
        for run in (a, b)
    ]
    names = sorted(uses[0].keys() | uses[1].keys())
    step = _whole(a, unit)
    rows = [_kernel(name, uses[0].get(name), uses[1].get(name), len(names), step) for name in names]
    return sorted(rows, key=lambda row: (-abs(row.difference_ns), row.name))


def _kernel(
    name: str, a: KernelUse | None, b: KernelUse | None, rows: int, step: float
) -> KernelChange:
    known = a or b
    assert known is not None
    totals = (a.total if a else ABSENT), (b.total if b else ABSENT)
    return KernelChange(
        **_fields(change(*totals, KERNEL_MATTERS, rows, step, OF_ITS_OWN)),  # type: ignore[arg-type]
        name=name,
        communication=known.communication,
        status="both" if a and b else "gone" if a else "new",
        a_count=round(a.count, 3) if a else 0.0,
        b_count=round(b.count, 3) if b else 0.0,
        a_median_ns=round(a.median_ns) if a else None,
        b_median_ns=round(b.median_ns) if b else None,
    )


def _gpus(a: Run, b: Run) -> Iterator[GpuPair]:
    rows = [_by_key(run) for run in (a, b)]
    for gpu, rank in dict.fromkeys([*rows[0], *rows[1]]):
        yield GpuPair(gpu, rank, rows[0].get((gpu, rank)), rows[1].get((gpu, rank)))


def _by_key(run: Run) -> dict[Key, Breakdown]:
    return {(row.gpu, row.rank): row for row in run.analysis.breakdown}


def _findings(a: Run, b: Run) -> Iterator[FindingChange]:
    """Those that came, then those that went, then those that stayed, the most severe first."""
    first, second = ({f.id: f for f in run.analysis.findings} for run in (a, b))
    status: dict[str, Callable[[str], bool]] = {
        "appeared": lambda id: id not in first,
        "gone": lambda id: id not in second,
        "stayed": lambda id: id in first and id in second,
    }
    for word, holds in status.items():
        for id in filter(holds, dict.fromkeys([*second, *first])):
            yield _finding(id, word, first.get(id), second.get(id))


def _finding(id: str, status: str, a: Finding | None, b: Finding | None) -> FindingChange:
    known = b or a
    assert known is not None
    return FindingChange(
        id=id,
        status=status,
        a_severity=a.severity if a is not None else None,
        b_severity=b.severity if b is not None else None,
        a_impact_ns=a.impact_ns if a is not None else None,
        b_impact_ns=b.impact_ns if b is not None else None,
        message=known.message,
    )
