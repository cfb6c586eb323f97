"""What differs between runs: two side by side, or several by their number of GPUs.

Traces are read one at a time with `read_run`; `compare` takes what that leaves of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gputrace.analyzers.compare.pair import compare_pair
from gputrace.analyzers.compare.results import SCHEMA_VERSION, Comparison, RunSummary
from gputrace.analyzers.compare.run import Run, read_run
from gputrace.analyzers.compare.scaling import scale
from gputrace.analyzers.compare.units import common_unit
from gputrace.analyzers.compare.verdict import judge, tell_pair, tell_scaling
from gputrace.analyzers.compare.work import kernel_ns, work_ratio

__all__ = ["Comparison", "Run", "compare", "read_run", "with_batch"]


def with_batch(run: Run, per_gpu: float | None, of_all: float | None) -> Run:
    """The run, with the samples of a step as a person gives them, of a GPU or of all."""
    samples = of_all if per_gpu is None else per_gpu * len(run.keys)
    return replace(run, samples=samples)


def compare(runs: Sequence[Run]) -> Comparison:
    """What differs between two runs or more; the first of those with the fewest GPUs is A.

    Two with the same number of GPUs stay in the order given.
    """
    unit, reason = common_unit(runs)
    scales = len(runs) > 2 or len({len(run.keys) for run in runs}) > 1
    runs = sorted(runs, key=lambda run: len(run.keys)) if scales else runs
    warnings = list(_warnings(runs))
    scaling = scale(runs) if scales and unit != "span" else None
    pair, verdict = None, "scaling" if scaling else "unknown"
    if len(runs) == 2:
        ratio, source, doubt = work_ratio(*runs)
        warnings += [doubt] if doubt and scaling is None else []
        pair = compare_pair(runs[0], runs[1], unit, (ratio, source))
        verdict = verdict if scaling else judge(pair)
    summaries = tuple(_summary(run, unit) for run in runs)
    labels = [run.label for run in runs]
    if scaling is not None:
        message = tell_scaling(scaling, summaries, unit)
    elif pair is not None:
        message = tell_pair(verdict, pair, labels, unit)
    else:
        message = f"nothing to compare these runs by: {reason}"
    return Comparison(
        SCHEMA_VERSION, verdict, message, unit, reason, summaries, pair, scaling, tuple(warnings)
    )


def _summary(run: Run, unit: str) -> RunSummary:
    analysis, loop = run.analysis, run.loop
    steps = analysis.steps
    mean = round(loop.length.value) if loop is not None else None
    return RunSummary(
        label=run.label,
        paths=analysis.paths,
        source=analysis.source,
        gpus=sum(gpu is not None for gpu, _ in run.keys),
        ranks=len({rank for _, rank in run.keys}),
        gpu_names=tuple(sorted({gpu.name for gpu in analysis.gpus if gpu.name})),
        steps_kind=steps.kind,
        steps=len(loop.numbers) if loop is not None else 0,
        span_ns=analysis.span_ns,
        mean_ns=mean,
        p50_ns=steps.p50_ns if loop is not None else None,
        p95_ns=steps.p95_ns if loop is not None else None,
        kernels=round(sum(use.count for use in run.kernels), 3) if loop is not None else None,
        kernel_ns=round(kernel_ns(run)) if loop is not None else None,
        input_bytes=round(run.input_bytes) if run.input_bytes is not None else None,
        samples=run.samples,
        throughput=run.samples / mean * 1e9 if run.samples and mean else None,
    )


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    """What makes figures of these runs hard to compare."""
    cards = {name for run in runs for gpu in run.analysis.gpus if (name := gpu.name)}
    if len(cards) > 1:
        yield f"The runs are of different cards: {', '.join(sorted(cards))}"
    sources = sorted({run.analysis.source for run in runs})
    if len(sources) > 1:
        yield f"Different recorders ({', '.join(sources)}) name kernels and cost time differently"
    if any(not run.analysis.gpus for run in runs):
        yield "Nothing was recorded of the GPUs of some runs: ranks are counted instead"
    for run in runs:
        for finding in run.analysis.findings:
            if finding.id in ("recorder-overhead", "lost-records"):
                yield f"{run.label}: {finding.message}"
        few = len(run.loop.numbers) if run.loop is not None else None
        if few is not None and few < 10:
            yield f"{run.label}: only {few} steps are measured; bounds of so few are rough"
