"""All that gputrace does with a trace, and what must be true of what it says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np

import gputrace
from gputrace.api import Report
from gputrace.model.events import COLUMN_TYPES, GPU_KINDS
from gputrace.model.trace import DERIVED, Trace
from gputrace.readers.open import open_traces
from gputrace.report import FORMATS

GLANCE, LOOK, GAZE = range(3)
"""How much is done: the rows are read; also analyzed and shown; also drawn and exported."""
_COLUMNS: Final = (*COLUMN_TYPES, *DERIVED)
_CLASSES: Final = ("compute_ns", "communication_ns", "h2d_ns", "other_copy_ns", "memset_ns")
_IDLE: Final = (
    "recorder_ns", "data_feeding_ns", "sync_ns", "alloc_ns", "launch_ns", "other_idle_ns",
)  # fmt: skip
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f]")
"""What JSON never has, and other texts should not."""
_FORMS: Final = ("perfetto", "trace", "csv", "parquet", "speedscope", "cpuprofile")


def look(paths: tuple[Path, ...], depth: int, out: Path) -> str:
    """Looks at the traces of a run; what is written goes into ``out``."""
    with open_traces(paths) as trace:
        about = glance(trace)
    if depth >= LOOK:
        about += f" {_analyze(paths)}"
    if depth >= GAZE:
        _draw(paths, out)
    return about


def glance(trace: Trace) -> str:
    """Reads every row of every kind, every name and every card."""
    events = trace.events(trace.kinds, _COLUMNS)
    assert bool((events.end >= events.start).all())
    names = trace.names(np.unique(events.name))
    on_gpu = np.isin(events.kind, GPU_KINDS)
    pairs = zip(events.process[on_gpu].tolist(), events.device[on_gpu].tolist(), strict=True)
    for process, device in set(pairs):
        trace.device(process, device)
        trace.coverage(process)
    nvml, session = trace.nvml, trace.session
    counted = sorted({int(kind) for kind in np.unique(events.kind)})
    said = len(trace.quality.notes), len(trace.quality.warnings), bool(trace.quality.dropped)
    known = len(nvml.cards), len(nvml.links), len(nvml.samples) > 0, session.epoch_ns is None
    return f"{trace.source} {counted} {said} {known} {len(trace.processes)} {bool(names)}"


def _analyze(paths: tuple[Path, ...]) -> str:
    with gputrace.open(*paths) as opened:
        report = opened.analyze()
    check(report)
    return f"{[finding.id for finding in report.findings]} {report.steps.kind}"


def check(report: Report) -> None:
    """The sums that must agree, and forms that other programs can read."""
    for gpu in report.gpus:
        assert _sum(gpu, (*_CLASSES, "idle_ns")) == gpu.span_ns
    for row in report.breakdown:
        if row.gpu is not None:
            assert _sum(row, (*_CLASSES, *_IDLE)) == row.total_ns
    for form in FORMATS:
        text = report.render(form)
        text.encode()
        if form != "csv":
            odd = _CONTROL.search(text)
            assert odd is None, f"a control character {odd[0]!r} in {form}"
        if form == "json":
            json.loads(text, parse_constant=_no_number)


def _sum(row: Any, names: tuple[str, ...]) -> int:
    return sum(getattr(row, name) for name in names)


def _no_number(word: str) -> None:
    raise AssertionError(f"{word} in JSON")


def _draw(paths: tuple[Path, ...], out: Path) -> None:
    """The page and every export; a form that a trace does not have is refused."""
    from gputrace.errors import UsageError

    with gputrace.open(*paths, keep_going=True) as opened:
        opened.report(out / "report.html", force=True)
        for form in _FORMS:
            target = out / f"export-{form}"
            shutil.rmtree(target, ignore_errors=True)
            try:
                opened.export(form, target, redact=form != "csv", force=True)
            except UsageError:
                continue
