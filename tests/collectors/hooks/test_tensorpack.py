"""tensorpack: steps of its trainers, and waits of those that are fed."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.programs import Program, event_names

TENSORPACK: Final = {
    "tensorpack/callbacks/group.py": """
class Callbacks:
    def __init__(self, *calls): self.calls = calls
    def trigger_step(self):
        for call in self.calls: call()
""",
    "tensorpack/input_source/input_source.py": """
class FeedInput:
    class _FeedCallback:
        def _before_run(self, context): return context
class EnqueueThread:
    def run(self): return "ran"
""",
}

FED: Final = """
from tensorpack.callbacks.group import Callbacks
from tensorpack.input_source.input_source import EnqueueThread, FeedInput
feed = FeedInput._FeedCallback()
"""


def test_a_step_counts_even_if_a_callback_ends_the_training(program: Program) -> None:
    program.write(TENSORPACK)
    program.quietly(
        FED + "steps = iter('ab')\ncallbacks = Callbacks(lambda: next(steps))\n"
        "try:\n    while True: callbacks.trigger_step()\nexcept StopIteration: pass\n"
    )
    assert event_names(program.events(), "step") == ["tensorpack.Trainer.run_step"] * 3


@pytest.mark.parametrize(("queue", "waits"), [("", 2), ("print(EnqueueThread().run());", 0)])
def test_waits_are_recorded_unless_a_queue_feeds_the_steps(
    program: Program, queue: str, waits: int
) -> None:
    program.write(TENSORPACK)
    out = program.quietly(FED + queue + "print(feed._before_run(1), feed._before_run(2))")
    assert out == "ran\n" * bool(queue) + "1 2\n"
    assert len(program.events().records["data_wait"]) == waits
