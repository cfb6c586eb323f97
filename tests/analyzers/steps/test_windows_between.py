"""Time between epochs: what the host does between two steps is no step, and told by what it is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gputrace.analyzers.steps.windows import Between
from gputrace.model.intervals import union

STEP, WAIT, PASS = 20_000, 1_500, 3_000


class Host:
    """Thread that trains: micro-batches that make a step, and what it does between epochs."""

    def __init__(self, micro: int) -> None:
        self.now, self.micro = 0, micro
        self.waits: list[tuple[int, int]] = []
        self.passes: list[tuple[int, int]] = []
        self.starts: list[tuple[int, int]] = []
        self.saves: list[tuple[int, int]] = []
        self.marks = [0]
        self.true: list[int] = []
        """When each step begins."""

    def spend(self, time: int, into: list[tuple[int, int]] | None = None) -> None:
        if into is not None:
            into.append((self.now, self.now + time))
        self.now += time

    def train(self, steps: int, starting: int) -> None:
        for step in range(steps):
            self.true.append(self.now)
            if step == 0 and starting:
                self.spend(starting, self.starts)
            for _ in range(self.micro):
                self.spend(WAIT, self.waits)
                self.spend(PASS, self.passes)
                self.spend(STEP // self.micro)
            self.marks.append(self.now)

    def validate(self, batches: int) -> None:
        """A loader says that it has no more, at the end of the epoch and of the validation."""
        self.spend(WAIT, self.waits)
        for _ in range(batches):
            self.spend(WAIT // 3, self.waits)
            self.spend(PASS, self.passes)
        if batches:
            self.spend(WAIT, self.waits)

    def between(self) -> Between:
        calls = [np.array(rows, np.int64).reshape(-1, 2).T for rows in self._calls()]
        return Between(*(union(*rows) for rows in calls))

    def _calls(self) -> tuple[list[tuple[int, int]], ...]:
        return self.waits, self.passes, self.starts, self.saves


@given(
    epochs=st.integers(2, 5),
    steps=st.integers(4, 12),
    batches=st.integers(0, 30),
    saving=st.sampled_from([10, 30_000, 400_000]),
    starting=st.sampled_from([0, 5_000]),
    micro=st.integers(1, 3),
    timed=st.booleans(),
)
def test_steps_have_their_length_whatever_comes_between_epochs(
    epochs: int, steps: int, batches: int, saving: int, starting: int, micro: int, timed: bool
) -> None:
    """A validation, a checkpoint that may be recorded, and the start of the loader's workers, which
    is the step's.
    """
    host = Host(micro)
    planted: list[tuple[int, int, int]] = []
    for epoch in range(epochs):
        if epoch:
            begin = host.now
            host.validate(batches)
            until = host.now
            host.spend(saving, host.saves if timed else None)
            planted.append((begin, until, host.now))
        host.train(steps, starting if epoch else 0)
    edges, between = np.array(host.marks), host.between()
    begins = between.begins(edges[:-1], edges[1:])
    expected = edges[:-1].copy()
    for step, (start, until, end) in zip(range(steps, len(begins), steps), planted, strict=True):
        if end - start > (STEP + micro * (WAIT + PASS)) / 2:
            expected[step] = host.true[step]
            rest = until if batches else start
            saves = timed and 2 * saving > end - rest
            found = [(i.phase, i.start, i.end) for i in between.interludes(step - 1, start, end)]
            assert found == [
                *[("validation", start, until)] * bool(batches),
                ("checkpoint" if saves else "between", rest, end),
            ]
    assert begins.tolist() == expected.tolist()
