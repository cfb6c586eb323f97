"""What a page shows: an analysis, and its timeline reduced to what a file can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gputrace.analyzers.analysis import analyze
from gputrace.analyzers.findings import Facts
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.options import Options
from gputrace.analyzers.results import Analysis
from gputrace.analyzers.scene.runs import Runs, Tiled, reduce, tile
from gputrace.analyzers.scene.scene import Scene, full_scene
from gputrace.analyzers.scene.worst_gaps import WorstGap, worst_gaps
from gputrace.errors import InputError
from gputrace.traces.trace import Progress, Trace, Window

MOST_RUNS: Final = 400_000
"""Of a file's timeline: some 2.7 MB of text if nothing about them can be packed."""


LONGEST_NS: Final = 100 * 86_400 * 10**9
"""What is drawn at most: a run holds four seconds, so that a longer one would be too many."""


@dataclass(frozen=True)
class Material:
    """All that a page is made of."""

    analysis: Analysis
    scene: Scene
    gaps: tuple[WorstGap, ...]
    lanes: tuple[Tiled, ...]
    """All runs of each lane of the scene, over the scene's span."""
    runs: tuple[Runs, ...]
    """Those, reduced to what a file can hold."""

    @property
    def whole(self) -> bool:
        """Whether nothing had to be reduced."""
        return all(own.whole for own in self.runs)

    def runs_around(self, start: int, end: int, most: int = MOST_RUNS) -> tuple[Runs, ...]:
        """The lanes with a window in full detail; with exact shares where that is too much.

        Around the window they are coarse.
        """
        span = self.scene.span
        window = Window(max(start, span.start), min(end, span.end))
        return reduce(self.lanes, span, most, [window], between=window)


@dataclass
class _Watched:
    """Keeps the facts of an analysis."""

    facts: list[Facts] = field(default_factory=list)

    def operations_read(self, operations: Sequence[GpuOperations]) -> None:
        pass

    def facts_found(self, facts: Facts) -> None:
        self.facts.append(facts)


def read_scene(trace: Trace, options: Options, progress: Progress | None = None) -> Scene:
    """Analyzes a trace for its timeline; raises what `analyze` raises."""
    watched = _Watched()
    analysis = analyze(trace, options, progress, watched)
    return full_scene(watched.facts[0], analysis)


def gather(scene: Scene, most: int = MOST_RUNS) -> Material:
    """Reduces the timeline of a scene that has its analysis.

    Raises InputError where the rows lie so far apart that their times must be wrong.
    """
    analysis = scene.analysis
    assert analysis is not None
    _check_span(scene)
    gaps = worst_gaps(scene, analysis)
    lanes = tuple(tile(lane.layers, scene.span) for lane in scene.lanes)
    matter = [*(gap.itself for gap in gaps), *(gap.around for gap in gaps)]
    return Material(analysis, scene, gaps, lanes, reduce(lanes, scene.span, most, matter))


def _check_span(scene: Scene) -> None:
    apart = scene.span.end - scene.span.start
    if apart > LONGEST_NS:
        days = f"its rows lie {apart / 86_400e9:,.0f} days apart"
        raise InputError(scene.title, f"{days}, too far to be drawn; give a part (--time)")


def file_name(analysis: Analysis) -> str:
    """What a page calls the trace."""
    more = len(analysis.paths) - 1
    return Path(analysis.path).name + (f" and {more} more" if more else "")
