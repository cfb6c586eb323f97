"""The replay of a graph, by the C library and without, against its definition."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gputrace.analyzers.whatif.graph import REPLAYED, Graph, replay, walk
from gputrace.analyzers.whatif.optimizations import CURES, Effect
from gputrace.analyzers.whatif.step_rows import LONG_AGO, NONE
from tests.analyzers.whatif.test_whatif import MS, PLANTED, graph_of, written


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


def both_replays(graph: Graph) -> list[int]:
    """The replay by the C library, if there is any, which is that without it."""
    ended: list[int] = replay(graph).tolist()
    assert walk(graph).tolist() == ended
    return ended


@pytest.mark.parametrize("planted", PLANTED)
def test_a_replay_is_what_the_columns_of_a_graph_say(planted: str, tmp_path: Path) -> None:
    graph = graph_of(written(PLANTED[planted], tmp_path))
    for cure in CURES:
        changed = cure.change(graph, Effect.LIKELY)
        if changed is not None:
            assert both_replays(changed) == by_definition(changed)


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_so_it_is_of_any_graph(seed: int, items: int) -> None:
    draw = np.random.default_rng(seed)

    def earlier() -> NDArray[np.int64]:
        """An item before each, of none of some."""
        return np.where(draw.random(items) < 0.3, draw.integers(0, np.arange(items) + 1) - 1, NONE)

    def edges() -> dict[int, tuple[tuple[int, int], ...]]:
        causes = {int(i): draw.integers(0, i, 2) for i in np.flatnonzero(earlier() > 0)}
        return {i: tuple((int(j), i % 5) for j in some) for i, some in causes.items()}

    numbers = {name: draw.integers(0, 20, items) for name in REPLAYED}
    stream = draw.integers(-1, 3, items)
    lanes = {"order": np.arange(items), "thread": draw.integers(-1, 3, items), "stream": stream}
    lanes["group"] = np.where((stream >= 0) & (draw.random(items) < 0.2), items % 3, NONE)
    columns = numbers | lanes | {"hand": earlier(), "slot": earlier()}
    others = {field.name: np.zeros(items, np.int64) for field in fields(Graph)} | columns
    graph = Graph(**(others | {"waits": edges(), "after": edges()}))  # type: ignore[arg-type]
    assert both_replays(graph) == by_definition(graph)


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
    assert both_replays(queued) == by_definition(queued)
    assert replay(queued)[-1] > replay(free)[-1] + 1 * MS
