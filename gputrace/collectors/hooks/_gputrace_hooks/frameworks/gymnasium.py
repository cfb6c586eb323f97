"""Gymnasium (tried with 1.4): rollouts, in which a policy acts in environments between updates.

A rollout goes on with each step of an environment, and what comes before it: the policy's choice of
an action. The first after an update does not count, so that an update after each step has no
rollouts; nor does any before the first update. A step of an environment costs 0.5 µs.
"""

from typing import Any

from .. import steps
from ..host_file import time_ns
from ..recorder import PHASE, record, word
from ..wrappers import around

_LONGEST_NS = 50_000_000
"""A rollout is recorded in parts of about this length, so that a recording may end within it."""


class _Rollout:
    """The rollout that goes on in a process: one of its threads acts."""

    def __init__(self) -> None:
        self.what = word("rollout")
        self.updates = 0
        self.begun = self.ended = 0

    def acted(self) -> None:
        """Note the end of a step of an environment."""
        now, updates = time_ns(), steps.ended()
        if updates != self.updates or now - self.begun > _LONGEST_NS:
            if self.ended > self.begun > 0:
                record(self.begun, self.ended, self.what, PHASE, now)
            self.begun = now if updates != self.updates else self.ended
            self.updates = updates
        self.ended = now


def environments(*classes: str) -> Any:
    """Return a hook that extends the rollout by each call of the classes' ``step``."""

    def hook(module: Any) -> None:
        for name in classes:

            @around(getattr(module, name, None), "step")
            def step(original: Any, self: Any, *args: Any, **keywords: Any) -> Any:
                result = original(self, *args, **keywords)
                if steps.ended():
                    _rollout.acted()
                return result

    return hook


_rollout = _Rollout()

PATCHES = [
    # What `gymnasium.make` returns holds the first of these; others run in processes of their own.
    ("gymnasium.wrappers.common", environments("OrderEnforcing")),
    ("gymnasium.wrappers.order_enforcing", environments("OrderEnforcing")),
    ("gymnasium.vector.async_vector_env", environments("AsyncVectorEnv")),
]
