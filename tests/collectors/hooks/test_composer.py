"""Composer: batches as steps, forward passes, validation and epochs."""

from __future__ import annotations

from typing import Final

from tests.helpers.programs import LOOP, Program, event_names, numbers, phases

COMPOSER: Final = {
    "composer/core/engine.py": """
from enum import Enum
names = "epoch_start before_forward after_forward batch_end epoch_end eval_start eval_end"
Event = Enum("Event", {name.upper(): name for name in names.split()})
class Engine:
    def run_event(self, event): return {event.value: "trace"}
"""
}
TRAINS: Final = """
from composer.core.engine import Engine, Event
engine, optimizer = Engine(), Optimizer()
engine.run_event(Event.EPOCH_START)
for batch in range(3):
    for microbatch in range(2):
        engine.run_event(Event.BEFORE_FORWARD)
        engine.run_event(Event.AFTER_FORWARD)
    optimizer.step()
    print(engine.run_event(Event.BATCH_END))
engine.run_event(Event.EVAL_START)
engine.run_event(Event.EVAL_END)
engine.run_event(Event.EPOCH_END)
"""


def test_a_batch_is_a_step_with_a_forward_pass_for_each_microbatch(torch: Program) -> None:
    torch.write(COMPOSER)
    assert torch.quietly(LOOP + TRAINS) == "{'batch_end': 'trace'}\n" * 3
    events = torch.events()
    marks = [mark for mark in event_names(events, "step") if "composer" in mark]
    assert marks == ["composer.Trainer.fit"] * 3
    assert numbers(events, "step") == [0, 1, 2]
    assert phases(events).count("forward") == 6


def test_epochs_and_validation_are_annotated(torch: Program) -> None:
    torch.write(COMPOSER)
    torch.quietly(LOOP + TRAINS)
    ranges = ["composer validation", "composer epoch"]
    assert event_names(torch.events(), "annotation") == ranges
