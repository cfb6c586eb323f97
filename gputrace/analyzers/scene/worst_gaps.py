"""The largest gaps with what ran around them, told without reading the trace again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gputrace.analyzers.results import Analysis, Gap
from gputrace.analyzers.scene.gap_detail import finding_of, operation_at
from gputrace.analyzers.scene.scene import Scene, SceneLane
from gputrace.traces.trace import Window


@dataclass(frozen=True, slots=True)
class WorstGap:
    """A gap that a page shows in full."""

    gap: Gap
    lane: int
    """Which of the lanes has it."""
    in_steps: bool
    """Whether it lies in the measured steps."""
    by_cause: Mapping[str, int]
    """Nanoseconds by cause, the longest first."""
    before: str
    """The name of the operation that ended where it begins; nothing where none did."""
    after: str
    """Of the one that starts where it ends."""
    others: Mapping[str, int]
    """Nanoseconds of all other lanes during it by class, the longest first."""
    finding: str
    """The id of the finding that it is a part of; nothing where there is none."""

    @property
    def itself(self) -> Window:
        """The gap with a microsecond on either side."""
        return Window(self.gap.start_ns - 1_000, self.gap.end_ns + 1_000)

    @property
    def around(self) -> Window:
        """The gap with half its length, or a millisecond, on either side."""
        margin = max(self.gap.length_ns // 2, 10**6)
        return Window(self.gap.start_ns - margin, self.gap.end_ns + margin)


def worst_gaps(scene: Scene, analysis: Analysis) -> tuple[WorstGap, ...]:
    """Those of the measured steps, then those of the whole run that are not among them."""
    gaps = analysis.gaps
    rest = [gap for gap in gaps.largest if gap not in gaps.largest_in_steps]
    places = {(lane.gpu, lane.rank): at for at, lane in enumerate(scene.lanes)}
    return tuple(
        _describe(scene, analysis, gap, places[gap.gpu, gap.rank], in_steps)
        for in_steps, some in ((True, gaps.largest_in_steps), (False, rest))
        for gap in some
    )


def _describe(scene: Scene, analysis: Analysis, gap: Gap, place: int, in_steps: bool) -> WorstGap:
    finding = finding_of(gap, analysis)
    return WorstGap(
        gap,
        place,
        in_steps,
        _shares([scene.lanes[place]], gap),
        *_neighbours(scene, place, gap),
        _shares([lane for at, lane in enumerate(scene.lanes) if at != place], gap),
        "" if finding is None else finding.id,
    )


def _neighbours(scene: Scene, place: int, gap: Gap) -> tuple[str, str]:
    """Names of the operations before and after a gap."""
    own = scene.lanes[place].operations
    if own is None:
        return "", ""
    before = int(np.searchsorted(own.reach, gap.start_ns))
    after = int(np.searchsorted(own.start, gap.end_ns))
    ended = before < len(own) and own.end[before] == gap.start_ns
    return (
        operation_at(scene, own, before).name if ended else "",
        operation_at(scene, own, after).name if after < len(own) else "",
    )


def _shares(lanes: Sequence[SceneLane], gap: Gap) -> Mapping[str, int]:
    """Nanoseconds of some lanes during a gap."""
    edges = [gap.start_ns, gap.end_ns]
    total: Counter[str] = Counter()
    for lane in lanes:
        shares = lane.layers.split(edges)[0].tolist()
        total.update(dict(zip(lane.layers.classes, shares, strict=True)))
    return _longest_first(total)


def _longest_first(shares: Mapping[str, int]) -> dict[str, int]:
    """What there is some of."""
    return {name: shares[name] for name in sorted(shares, key=lambda n: -shares[n]) if shares[name]}
