"""PyTorch Ignite: iterations of a trainer as steps, its epochs, and validation."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.programs import LOOP, Program, event_names

IGNITE: Final = {
    "ignite/engine/engine.py": """
from enum import Enum
Events = Enum("Events", "EPOCH_STARTED EPOCH_COMPLETED ITERATION_STARTED ITERATION_COMPLETED")
class Engine:
    def __init__(self, process, **handlers): self.process, self.handlers = process, handlers
    def _fire_event(self, event): self.handlers.get(event.name, lambda engine: None)(self)
    def run(self, data, max_epochs=1):
        for _ in range(max_epochs):
            self._fire_event(Events.EPOCH_STARTED)
            for batch in data:
                self._fire_event(Events.ITERATION_STARTED)
                self.process(self, batch)
                self._fire_event(Events.ITERATION_COMPLETED)
            self._fire_event(Events.EPOCH_COMPLETED)
        return "state"
"""
}
TRAINS: Final = """
from ignite.engine.engine import Engine
optimizer = Optimizer()
evaluator = Engine(lambda engine, batch: None)
def process(engine, batch):
    if batch in {batches}: optimizer.step()
trainer = Engine(process, EPOCH_COMPLETED=lambda engine: evaluator.run(range(3)))
evaluator.run(range(4))
print(trainer.run(range(6), max_epochs=2))
"""


@pytest.mark.parametrize(("batches", "steps"), [(range(6), 12), ((1, 3, 5), 11), ((), 0)])
def test_iterations_of_an_engine_are_steps_once_an_optimizer_has_stepped_in_one(
    torch: Program, batches: object, steps: int
) -> None:
    """Also where gradients of two iterations are accumulated; an evaluator's are none."""
    torch.write(IGNITE)
    assert torch.quietly(LOOP + TRAINS.format(batches=batches)) == "state\n"
    marks = [mark for mark in event_names(torch.events(), "step") if "ignite" in mark]
    assert marks == ["ignite.Engine.run"] * steps


def test_epochs_and_validation_are_annotated(torch: Program) -> None:
    torch.write(IGNITE)
    torch.quietly(LOOP + TRAINS.format(batches=range(6)))
    ranges = ["ignite epoch", "ignite validation"] * 2
    assert event_names(torch.events(), "annotation") == ranges
