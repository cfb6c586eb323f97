"""MosaicML's Composer (tried with 0.32): batches as steps, forward passes, validation and epochs.

Events of its engine say when these begin and end. All microbatches of a batch are one step; their
backward passes and the optimizer's step are torch's. A batch costs a step and a phase for each
microbatch, and each event one more call.
"""

from typing import Any

from ..host_file import time_ns
from ..recorder import ANNOTATION, PHASE, record, word
from ..steps import LOOP, step_ended
from ..wrappers import around, at_bounds

_SPANS = {
    "after_forward": ("before_forward", "forward", PHASE),
    "epoch_end": ("epoch_start", "composer epoch", ANNOTATION),
    "eval_end": ("eval_start", "composer validation", ANNOTATION),
}
"""By the event that ends something: the event that begins it, its name, and what it is."""
_BEGINNINGS = [first for first, _, _ in _SPANS.values()]


def events(module: Any) -> None:
    """Follow the events of the engine, the end of a batch after its callbacks."""
    batch = word("composer.Trainer.fit")
    begun: dict[str, int] = {}

    @around(module.Engine, "run_event")
    def run_event(original: Any, self: Any, event: Any) -> Any:
        name = getattr(event, "value", event)
        first, called, kind = _SPANS.get(name, ("", "", 0))
        if first in begun:
            record(begun.pop(first), time_ns(), word(called), kind)
        if kind == PHASE or name == "before_forward":
            for look in at_bounds:
                look()
        result = original(self, event)
        if name == "batch_end":
            step_ended(batch, LOOP, events)
        elif name in _BEGINNINGS:
            begun[name] = time_ns()
        return result


PATCHES = [("composer.core.engine", events)]
