"""The replay of a graph in stretches, against its definition, one item after another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gputrace.analyzers.whatif import CURES, Effect
from gputrace.analyzers.whatif.graph import LONG_AGO, NONE, Graph, replay
from tests.test_whatif import MS, PLANTED, graph_of, written


def by_definition(g: Graph) -> list[int]:
    """When each item ends, by what `Graph` says of its columns."""
    began, ended, returned = [0] * len(g), [0] * len(g), [0] * len(g)
    thread, stream = dict.fromkeys(g.thread.tolist(), 0), dict.fromkeys(g.stream.tolist(), LONG_AGO)
    missing = np.bincount(g.group[g.group >= 0], minlength=1)
    for i in g.order.tolist():
        at, on = int(g.thread[i]), int(g.stream[i])
        begin = thread[at] + int(g.gap[i]) if at >= 0 else 0
        if at >= 0 and g.hand[i] >= 0:
            begin = max(begin, returned[g.hand[i]] + int(g.hand_lag[i]))
        if on >= 0:
            causes = [ended[j] + lag for j, lag in g.after.get(i, ())]
            earliest = [begin + int(g.latency[i]), stream[on] + int(g.spacing[i])]
            began[i] = max(earliest + causes) + int(g.residual[i])
            together = np.flatnonzero(g.group == g.group[i]) if g.group[i] >= 0 else [i]
            missing[g.group[i]] -= g.group[i] >= 0
            if g.group[i] < 0 or not missing[g.group[i]]:
                for j in together:
                    ended[j] = max(began[k] for k in together) + int(g.ns[j])
                    stream[int(g.stream[j])] = ended[j]
        if at >= 0:
            done = max([begin + int(g.own[i]), *(ended[j] + lag for j, lag in g.waits.get(i, ()))])
            place = began[g.slot[i]] if g.slot[i] >= 0 else LONG_AGO
            returned[i] = thread[at] = max(done, place)
            ended[i] = returned[i] if on < 0 else ended[i]
    return ended


@pytest.mark.parametrize("planted", PLANTED)
def test_a_replay_in_stretches_is_that_of_one_item_after_another(
    planted: str, tmp_path: Path
) -> None:
    graph = graph_of(written(PLANTED[planted], tmp_path))
    for cure in CURES:
        changed = cure.change(graph, Effect.LIKELY)
        if changed is not None:
            assert replay(changed).tolist() == by_definition(changed)


@pytest.mark.parametrize("places", [20, 700])
def test_launches_wait_for_a_place_in_a_full_queue(places: int, tmp_path: Path) -> None:
    """A host that could not run ahead during long kernels is late for the short ones after them.

    With places within what would be one stretch, and further back.
    """
    graph = graph_of(written(PLANTED["sync"], tmp_path))
    launches = np.flatnonzero((graph.thread >= 0) & (graph.stream >= 0))
    length, slot = np.full(len(graph), 100), np.full(len(graph), NONE)
    length[launches[:100]] = 1 * MS
    slot[launches[places:]] = launches[:-places]
    free = graph.changed(waits={}, ns=length)
    queued = free.changed(slot=slot)
    assert replay(queued).tolist() == by_definition(queued)
    assert replay(queued)[-1] > replay(free)[-1] + 1 * MS
