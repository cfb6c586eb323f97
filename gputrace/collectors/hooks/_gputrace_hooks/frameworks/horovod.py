"""Horovod on torch (tried with 0.28): steps of its optimizers, which call torch's ``step`` within,
or once a parameter. With other frameworks, steps are the framework's. A step costs 2 µs.
"""

from typing import Any

from ..wrappers import around
from .torch import count_optimizer_steps, untimed_steps


def functions(module: Any) -> None:
    """Ignore the step with gradients of 0 that an optimizer without state makes to broadcast it."""

    @around(module, "broadcast_optimizer_state")
    def broadcast(original: Any, *args: Any, **keywords: Any) -> Any:
        untimed_steps.append(None)
        try:
            return original(*args, **keywords)
        finally:
            untimed_steps.pop()


PATCHES = [
    ("horovod.torch.functions", functions),
    ("horovod.torch.optimizer", count_optimizer_steps),
]
