"""Gymnasium: rollouts, in which a policy acts in environments between updates."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import pytest

from gputrace.collectors.spool.host_events import HostEvents
from tests.helpers.programs import LOOP, Program, phases

ENVIRONMENTS: Final = {
    "gymnasium/wrappers/common.py": """
import time
class OrderEnforcing:
    def step(self, action): time.sleep(0.002); return action + 1
""",
    "gymnasium/vector/async_vector_env.py": """
import time
class AsyncVectorEnv:
    def step(self, action): time.sleep(0.002); return action + 1
""",
}
ACTS: Final = """
import time
from {module} import {name}
optimizer, environment = Optimizer(), {name}()
for _ in range({turns}):
    for _ in range({acts}):
        time.sleep(0.001)
        seen = environment.step(1)
    for _ in range(3):
        optimizer.step()
environment.step(1), environment.step(1)
print(seen)
"""


def rollouts_of(events: HostEvents) -> list[tuple[int, int]]:
    """Return when the rollouts of a process began and ended."""
    return [
        (int(row["start"]), int(row["end"]))
        for row, name in zip(events.records["phase"], phases(events), strict=True)
        if name == "rollout"
    ]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("gymnasium.wrappers.common", "OrderEnforcing"),
        ("gymnasium.vector.async_vector_env", "AsyncVectorEnv"),
    ],
)
def test_rollouts_last_from_the_first_act_after_an_update_to_the_last(
    torch: Program, module: str, name: str
) -> None:
    torch.write(ENVIRONMENTS)
    assert torch.quietly(LOOP + ACTS.format(module=module, name=name, turns=4, acts=6)) == "2\n"
    rollouts = rollouts_of(torch.events())
    # None before the first update; what policies take between two acts is a part of them.
    assert len(rollouts) == 3
    assert all(end - start >= 5 * 3_000_000 for start, end in rollouts)


def test_an_update_after_each_act_has_no_rollouts(torch: Program) -> None:
    torch.write(ENVIRONMENTS)
    program = ACTS.format(
        module="gymnasium.wrappers.common", name="OrderEnforcing", turns=5, acts=1
    )
    assert torch.quietly(LOOP + program) == "2\n"
    assert "rollout" not in phases(torch.events())


def test_long_rollouts_are_recorded_in_parts(torch: Program) -> None:
    torch.write(ENVIRONMENTS)
    program = ACTS.format(
        module="gymnasium.wrappers.common", name="OrderEnforcing", turns=2, acts=60
    )
    assert torch.quietly(LOOP + program) == "2\n"
    rollouts = rollouts_of(torch.events())
    assert len(rollouts) >= 3
    assert all(end == start for (_, end), (start, _) in pairwise(rollouts))
