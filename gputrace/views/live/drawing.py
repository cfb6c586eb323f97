"""A recording at one moment as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from rich.style import Style
from rich.text import Text

from gputrace.analyzers.intervals import Times
from gputrace.analyzers.results import CLASSES, Analysis, Breakdown
from gputrace.analyzers.scene.curves import Curve
from gputrace.cleaning import clean
from gputrace.views.live.now import CardNow, Now, Pace
from gputrace.views.palette import LEVELS, SEVERITIES, Palette
from gputrace.views.tables import gpu_label, verdict
from gputrace.views.words import duration

CURVE_NS: Final = 60_000_000_000
"""How much of the past the curves show."""
_MOST_RANKS: Final = 16
_LABEL: Final = 14
_BOLD: Final = Style(bold=True)
_DIM: Final = Style(dim=True)
_STATES: Final = {
    "running": "recording",
    "ending": "the program has ended; its trace is being made",
    "ended": "ended; Enter opens the trace",
    "cut": "the recorder was killed; `gputrace recover` makes a trace of what is there",
}
_UNITS: Final = {
    "utilization": ("use", 1.0, "%"),
    "power": ("power", 1e3, "W"),
    "smClock": ("clock", 1.0, "MHz"),
    "memoryUsed": ("memory", float(1 << 30), "GiB"),
    "temperature": ("heat", 1.0, "°C"),
}
_DRAWN: Final = ("utilization", "power", "smClock")
_LEAST_CELLS: Final = 4
_VALUE: Final = 18
"""Columns of a curve's name and value."""


def headline(now: Now) -> Text:
    """The verdict on the last steps, or why there is none."""
    if now.analysis is None:
        return Text(clean(now.why_not) or "reading …", no_wrap=True, overflow="ellipsis")
    found = now.analysis.findings
    style = SEVERITIES[found[0].severity] if found else "green"
    return Text(clean(verdict(now.analysis)), style, no_wrap=True, overflow="ellipsis")


def status(now: Now) -> Text:
    """How the recording goes."""
    rate = now.bytes / max(now.elapsed_ns, 1) * 1e9
    parts = [
        clean(now.name, 40),
        _STATES[now.state],
        duration(now.elapsed_ns),
        f"{now.bytes / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s",
        f"processes: {now.processes}",
    ]
    if now.state in ("ended", "cut"):
        parts = parts[:2]
    return Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")


def body(now: Now, palette: Palette, width: int) -> Text:
    """Steps, shares and curves, a line each; ``width`` columns at most."""
    lines = [*_paces(now, width), *_shares(now, palette, width), *_cards(now.cards, now, width)]
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _paces(now: Now, width: int) -> Iterator[Text]:
    yield Text("Steps", _BOLD)
    if not now.paces:
        yield from _inferred(now.analysis)
    for pace in now.paces[:_MOST_RANKS]:
        yield _pace(pace, width)
    if len(now.paces) > _MOST_RANKS:
        yield Text(f"  and {len(now.paces) - _MOST_RANKS} ranks more", _DIM)
    yield Text()


def _pace(pace: Pace, width: int) -> Text:
    speed = "" if pace.per_second is None else f"{pace.per_second:,.2f} a second"
    line = Text(f"  {f'rank {pace.rank}':{_LABEL - 2}}")
    line.append(f"step {pace.number:<8,} {speed:>16}   ")
    line.append(f"last {duration(pace.lengths[-1]):>9}   ")
    line.append(f"mean of {len(pace.lengths)} {duration(pace.mean_ns):>9}   ")
    room = width - line.cell_len
    if room > _LEAST_CELLS:
        top = float(max(pace.lengths)) or 1.0
        line.append(_levels([length / top for length in pace.lengths[-room:]]), _DIM)
    return line


def _inferred(analysis: Analysis | None) -> Iterator[Text]:
    steps = analysis.steps if analysis else None
    if steps is None or not steps.mean_ns:
        yield Text("  none seen yet", _DIM)
        return
    told = f"  {1e9 / steps.mean_ns:,.2f} a second, mean of {steps.steady_count} "
    yield Text(f"{told}{duration(steps.mean_ns)} ({steps.kind}, found by: {steps.source})")


def _shares(now: Now, palette: Palette, width: int) -> Iterator[Text]:
    if now.analysis is None:
        return
    rows = now.analysis.breakdown
    steps = max((row.steps for row in rows), default=0)
    length = duration(now.window[1] - now.window[0])
    what = f"last {steps} steps" if steps else f"last {length}"
    ago = duration(max(now.time_ns - now.window[1], 0))
    title = Text("Time of the GPUs" if now.analysis.gpus else "Time of the ranks", _BOLD)
    title.append(f"   {what}, until {ago} ago", _DIM)
    yield title
    for row in rows[:_MOST_RANKS]:
        yield from _share(row, gpu_label(row, now.analysis), palette, width)
    if len(rows) > _MOST_RANKS:
        yield Text(f"  and {len(rows) - _MOST_RANKS} more", _DIM)
    yield Text()


def _share(row: Breakdown, label: str, palette: Palette, width: int) -> Iterator[Text]:
    line = Text(f"  {clean(label, _LABEL - 3):{_LABEL - 2}}")
    if row.compute_ns is None:
        told = f"waits for data {row.share('host_data'):.1%} of the time"
        yield line.append(told if row.host_data_ns is not None else "", "")
        return
    room = max(width - _LABEL, 8)
    for name, cells in zip(CLASSES, _cells([row.of(n) for n in CLASSES], room), strict=True):
        letter, style = palette.swatch(name)
        line.append(letter * cells, style)
    yield line
    shown = [n for n in sorted(CLASSES, key=lambda n: -row.of(n)) if row.share(n) >= 0.005]
    words = Text(" " * _LABEL)
    for name in shown:
        letter, style = palette.swatch(name)
        words.append(letter, style)
        words.append(f" {palette.look(name).short} {row.share(name):.1%}  ")
    yield words


def _cells(parts: Sequence[int], room: int) -> list[int]:
    """How many of ``room`` cells each part gets, all together exactly ``room``."""
    total = sum(parts)
    if not total:
        return [0] * len(parts)
    ends = [round(sum(parts[: at + 1]) * room / total) for at in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _cards(cards: Sequence[CardNow], now: Now, width: int) -> Iterator[Text]:
    if not cards:
        return
    title = Text("NVML", _BOLD)
    yield title.append(f"   last {duration(CURVE_NS)}", _DIM)
    others = [name for name in _UNITS if name not in _DRAWN]
    room = (width - _LABEL - 12 * len(others)) // len(_DRAWN) - _VALUE
    edges = np.linspace(now.time_ns - CURVE_NS, now.time_ns, max(room, 0) + 1).astype(np.int64)
    for card in cards:
        line = Text(f"  {f'gpu {card.gpu}':{_LABEL - 2}}")
        for name in _DRAWN:
            line.append(_drawn(name, card.curves.get(name), edges))
        for name in others:
            line.append(f"{_value(name, card.curves.get(name)):12}")
        yield line


def _drawn(name: str, curve: Curve | None, edges: Times) -> Text:
    """A curve and its latest value, as wide as any."""
    called, room = _UNITS[name][0], len(edges) - 1
    line = Text().append(f"{called} ", _DIM)
    if room > _LEAST_CELLS:
        line.append(_levels([math.nan] * room if curve is None else _filled(curve, edges)))
    return line.append(f" {_value(name, curve)}".ljust(_VALUE - len(called) - 1))


def _filled(curve: Curve, edges: Times) -> list[float]:
    shares: list[float] = (curve.means(edges) / curve.top).tolist()
    return shares


def _value(name: str, curve: Curve | None) -> str:
    """The latest one."""
    _, unit, sign = _UNITS[name]
    return "–" if curve is None else f"{curve.value[-1] / unit:,.0f} {sign}"


def _levels(shares: Sequence[float]) -> str:
    """A row of characters, each filled up to a share of 0 to 1; a blank where it is not known."""
    top = len(LEVELS) - 1
    # A share above nothing shows.
    return "".join(
        " " if share != share else LEVELS[min(max(round(share * top), 1 if share > 0 else 0), top)]
        for share in shares
    )


__all__ = ["CURVE_NS", "body", "headline", "status"]
