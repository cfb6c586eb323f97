"""The gaps: stretches in which a GPU runs nothing, largest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gputrace.analyzers.partition import Timeline
from gputrace.analyzers.results import IDLE_CAUSES, Gap, Gaps


def find_gaps(timelines: Sequence[Timeline], most: int) -> Gaps:
    """All gaps counted, and the ``most`` largest listed."""
    idle = [timeline.gaps for timeline in timelines]
    total = sum(gaps.total for gaps in idle)
    starts = np.concatenate([gaps.start for gaps in idle] or [np.empty(0, np.int64)])
    ends = np.concatenate([gaps.end for gaps in idle] or [np.empty(0, np.int64)])
    owner = np.repeat(np.arange(len(idle)), [len(gaps) for gaps in idle])
    order = np.lexsort((owner, starts, starts - ends))[: max(most, 0)]
    largest = tuple(_gap(timelines[owner[row]], int(starts[row]), int(ends[row])) for row in order)
    by_cause = dict.fromkeys(IDLE_CAUSES, 0) | {"other_idle": total}
    return Gaps(len(starts), total, by_cause, largest)


def _gap(timeline: Timeline, start: int, end: int) -> Gap:
    gpu = timeline.gpu
    return Gap(gpu.gpu, gpu.rank, None, start, end, "other_idle", "")
