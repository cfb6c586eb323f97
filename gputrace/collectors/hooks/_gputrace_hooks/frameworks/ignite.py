"""PyTorch Ignite (tried with 0.5): iterations of a trainer as steps, its epochs, and validation.

Events of its engines say when these begin and end. An engine is a trainer once an optimizer has
stepped in one of its iterations, which count from there on, also where gradients are accumulated;
a run of another engine within its run is validation. An iteration costs a step, and each event one
more call.
"""

from typing import Any
from weakref import WeakKeyDictionary

from .. import steps
from ..host_file import time_ns
from ..recorder import ANNOTATION, record, thread_id, word
from ..steps import LOOP, OPTIMIZER, step_ended
from ..wrappers import around


class _Engine:
    """State of an engine: whether it trains, and when its epoch began."""

    def __init__(self) -> None:
        self.trains = False
        self.optimizer_calls = self.epoch_began = 0


def engines(module: Any) -> None:
    """Follow the runs and the events of engines, the end of an iteration after its handlers."""
    iteration, epoch, validation = map(
        word, ("ignite.Engine.run", "ignite epoch", "ignite validation")
    )
    running: list[int] = []
    all_known: Any = WeakKeyDictionary()

    @around(module.Engine, "run")
    def run(original: Any, self: Any, *args: Any, **keywords: Any) -> Any:
        start, thread = time_ns(), thread_id()
        is_nested = thread in running
        running.append(thread)
        try:
            return original(self, *args, **keywords)
        finally:
            running.remove(thread)
            if is_nested:
                record(start, time_ns(), validation, ANNOTATION)

    @around(module.Engine, "_fire_event")
    def fire_event(original: Any, self: Any, event: Any, *args: Any, **keywords: Any) -> None:
        name, known = getattr(event, "name", ""), all_known.setdefault(self, _Engine())
        if name == "EPOCH_STARTED":
            known.epoch_began = time_ns()
        elif name == "EPOCH_COMPLETED" and known.trains:
            record(known.epoch_began, time_ns(), epoch, ANNOTATION)
        elif name == "ITERATION_STARTED":
            known.optimizer_calls = steps.calls(OPTIMIZER)
        original(self, event, *args, **keywords)
        if name == "ITERATION_COMPLETED":
            known.trains = known.trains or steps.calls(OPTIMIZER) > known.optimizer_calls
            if known.trains:
                step_ended(iteration, LOOP, engines)


PATCHES = [("ignite.engine.engine", engines)]
