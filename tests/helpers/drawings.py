"""The drawings of docs/definitions.md: small traces, and what gputrace makes of every moment.

Each is a trace that is written, opened and analyzed. The upper lanes show its rows; in the lowest
lanes every stretch between two moments is what the analysis of that window says it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import gputrace
from gputrace.api import OpenTrace
from gputrace.model.time_class import CLASSES
from gputrace.report.palette import LOOKS
from tests.helpers.exports import D2D, NVTX, PUSH_POP_RANGE, Export, global_id
from tests.helpers.handmade import US, Run, train

ALL_REDUCE: Final = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
LEFT, WIDTH, LANE, GAP, TOP = 130, 720, 26, 8, 14
PLAIN: Final = "#8a8f98"
WHITE_ON: Final = {"memset", "launch", "other_idle", "compute", "alloc"}
STYLE: Final = """\
  <style>
    text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
    .ground { fill: #ffffff }
    .edge { stroke: #8a8f98; stroke-dasharray: 2 3 }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #1a1c1e }
      text { fill: #e3e6ea }
    }
    text.on { fill: #16161c; text-anchor: middle }
    text.pale { fill: #ffffff; text-anchor: middle }
  </style>"""

Bar = tuple[float, float, str, str]
"""From when to when, in microseconds; a class, or nothing; what is written on it."""


@dataclass
class Drawing:
    """Lanes of bars below each other, on one axis of microseconds."""

    title: str
    lanes: list[tuple[str, list[Bar]]] = field(default_factory=list)
    edges: Sequence[float] = ()
    """Moments that a dashed line marks in all lanes."""

    def svg(self) -> str:
        """The drawing, in light or dark as the page is."""
        last = max(end for _, bars in self.lanes for _, end, _, _ in bars)
        first = min(start for _, bars in self.lanes for start, _, _, _ in bars)
        scale = (WIDTH - LEFT - 14) / (last - first)
        height = TOP + len(self.lanes) * (LANE + GAP) + 8
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"  <title>{self.title}</title>",
            STYLE,
            f'  <rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>',
        ]
        for row, (name, bars) in enumerate(self.lanes):
            y = TOP + row * (LANE + GAP)
            lines.append(f'  <text x="10" y="{y + 17}">{name}</text>')
            for start, end, sort, label in bars:
                x, wide = LEFT + (start - first) * scale, (end - start) * scale
                lines += _bar(x, y, wide, sort, label)
        for edge in self.edges:
            x = LEFT + (edge - first) * scale
            line = f'x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 4}"'
            lines.append(f'  <line class="edge" {line}/>')
        return "\n".join([*lines, "</svg>", ""])


def _bar(x: float, y: int, wide: float, sort: str, label: str) -> Iterator[str]:
    color = LOOKS[sort].color if sort else PLAIN
    yield (
        f'  <rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{LANE}" fill="{color}"'
        f' stroke="#16161c" stroke-width="0.5"><title>{label}</title></rect>'
    )
    if len(label) * 7.2 < wide:
        style = "pale" if sort in WHITE_ON else "on"
        yield f'  <text class="{style}" x="{x + wide / 2:.1f}" y="{y + 17}">{label}</text>'


def told(trace: OpenTrace, moments: Sequence[int], gpu: int = 0) -> list[Bar]:
    """Return the class of a GPU's time between each two moments, by the analysis of that window."""
    bars: list[Bar] = []
    for start, end in pairwise(sorted({*moments})):
        report = trace.analyze(time=(start, end), gaps=0)
        row = next(row for row in report.breakdown if row.gpu == gpu)
        (sort,) = [name for name in CLASSES if row.of(name)]
        assert row.of(sort) == end - start
        if bars and bars[-1][2] == sort:
            start = round(bars.pop()[0] * US)
        bars.append((start / US, end / US, sort, LOOKS[sort].short))
    return bars


def classes(folder: Path) -> Drawing:
    """Which class wins where operations overlap."""
    export, copy, reduce = Export(), (0, 30), (60, 115)
    kernels, memset, inside = [(20, 80), (125, 150), (190, 215)], (150, 172), (100, 135)
    for start, end in kernels:
        export.kernel(start * US, end * US)
    export.copy(copy[0] * US, copy[1] * US, streamId=14)
    export.copy(inside[0] * US, inside[1] * US, D2D, streamId=15)
    export.memset(memset[0] * US, memset[1] * US)
    export.kernel(reduce[0] * US, reduce[1] * US, ALL_REDUCE, streamId=20)
    spans = [*kernels, copy, inside, memset, reduce]
    with gputrace.open(export.write(folder / "classes.sqlite")) as trace:
        counts = told(trace, [moment * US for span in spans for moment in span])
    on_seven: list[Bar] = [*((*span, "", "kernel") for span in kernels), (*memset, "", "memset")]
    return Drawing(
        "Four streams whose operations overlap, and the one class of every moment",
        [
            ("stream 7", on_seven),
            ("stream 14", [(*copy, "", "H2D")]),
            ("stream 15", [(*inside, "", "copy D2D")]),
            ("stream 20", [(*reduce, "", "all-reduce")]),
            ("it counts as", counts),
        ],
    )


def causes(folder: Path) -> Drawing:
    """Why a GPU ran nothing, by what its feeding thread did."""
    export = Export()
    calls = [
        (2, 8, "cudaLaunchKernel", 1), (9, 62, "cudaStreamSynchronize", 0),
        (100, 106, "cudaMemcpyAsync", 2), (118, 124, "cudaLaunchKernel", 3),
        (126, 185, "cudaMalloc", 0), (197, 203, "cudaLaunchKernel", 4),
    ]  # fmt: skip
    for start, end, name, correlation in calls:
        export.call(start * US, end * US, name, correlation=correlation)
    kernels = [(12, 45, 1), (126, 165, 3), (208, 235, 4)]
    for start, end, correlation in kernels:
        export.kernel(start * US, end * US, correlationId=correlation)
    export.copy(109 * US, 114 * US, correlationId=2)
    batch: Bar = (62, 100, "", "next batch")
    values = {"eventType": PUSH_POP_RANGE, "globalTid": global_id(100, thread=100), "domainId": 0}
    export.add(NVTX, start=62 * US, end=100 * US, text="next batch", **values)
    moments = [12, 235, 109, 114, *(m for start, end, _ in kernels for m in (start, end))]
    moments += [m for start, end, _, _ in calls for m in (start, end)]
    with gputrace.open(export.write(folder / "causes.sqlite")) as trace:
        counts = told(trace, [moment * US for moment in moments if moment >= 12])
    shorter = {"cudaStreamSynchronize": "synchronize", "cudaMalloc": "cudaMalloc"}
    during: list[Bar] = [(start, end, "", shorter.get(name, "")) for start, end, name, _ in calls]
    ran: list[Bar] = [*((s, e, "", "kernel") for s, e, _ in kernels), (109, 114, "", "")]
    return Drawing(
        "A host thread and its GPU: each gap has the cause that the thread's calls prove",
        [
            ("host thread", [*during, batch]),
            ("gpu 0", ran),
            ("it counts as", counts),
        ],
    )  # fmt: skip


def waiting(folder: Path) -> Drawing:
    """Two ranks of an all-reduce, of which one comes late."""
    export = Export()
    late = {0: 40, 1: 95}
    for rank, start in late.items():
        export.kernel(0, start * US, pid=100 + rank, deviceId=rank)
        export.kernel(start * US, 130 * US, ALL_REDUCE, streamId=20, pid=100 + rank, deviceId=rank)
        export.kernel(130 * US, 160 * US, pid=100 + rank, deviceId=rank)
    with gputrace.open(export.write(folder / "waiting.sqlite")) as trace:
        rows = trace.analyze().breakdown
    lanes: list[tuple[str, list[Bar]]] = []
    for row, (rank, start) in zip(rows, late.items(), strict=True):
        lanes.append((f"gpu {rank}", [(0, start, "", "kernel"), (start, 130, "", "all-reduce"),
                                      (130, 160, "", "kernel")]))  # fmt: skip
        wait = (row.communication_wait_ns or 0) / US
        assert row.communication_ns == (130 - start) * US
        parts: list[Bar] = [(start, start + wait, "communication", "wait")] if wait else []
        lanes.append(("", [*parts, (start + wait, 130, "communication", "transfer")]))
    return Drawing(
        "GPU 0 waits in the all-reduce until GPU 1 comes; then both transfer", lanes, (95,)
    )


def steps(folder: Path) -> Drawing:
    """Where steps begin and end."""
    run = Run()
    train(run, steps=12, wait=400 * US, kernels=4)
    with gputrace.open(run.export.write(folder / "steps.sqlite")) as trace:
        chosen = trace.analyze().step_list[5:7]
        first, last = chosen[0].start_ns, chosen[-1].end_ns
        rows = [row for rows in run.export.rows.values() for row in rows if "start" in row]
        moments = {int(str(row[end])) for row in rows for end in ("start", "end")}
        counts = told(trace, [first, *(m for m in moments if first < m < last), last])
    shown: list[Bar] = [
        (step.start_ns / US, step.end_ns / US, "", f"step {step.step}") for step in chosen
    ]
    edges = [step.start_ns / US for step in chosen] + [chosen[-1].end_ns / US]
    return Drawing(
        "A step begins with the gap before its input copy, so that the wait for data is its own",
        [("steps", shown), ("gpu 0", counts)],
        edges,
    )


DRAWINGS: Final[dict[str, Callable[[Path], Drawing]]] = {
    "definitions-classes.svg": classes,
    "definitions-causes.svg": causes,
    "definitions-waiting.svg": waiting,
    "definitions-steps.svg": steps,
}


def draw(name: str) -> str:
    """One of `DRAWINGS`, as the text of its file."""
    with TemporaryDirectory() as folder:
        return DRAWINGS[name](Path(folder)).svg()
