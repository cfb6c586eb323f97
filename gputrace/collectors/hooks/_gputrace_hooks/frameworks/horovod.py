"""Horovod on torch (tried with 0.28): steps of its optimizers, which call torch's ``step`` within,
or once a parameter. With other frameworks, steps are the framework's. A step costs 2 µs.
"""

from functools import wraps
from typing import Any

from ..wrappers import ours, wrap
from .torch import own_optimizers, untimed_steps


def functions(module: Any) -> None:
    """Ignore the step with gradients of 0 that an optimizer without state makes to broadcast it."""

    def quiet(function: Any) -> Any:
        @wraps(function)
        def broadcast(*args: Any, **keywords: Any) -> Any:
            untimed_steps.append(None)
            try:
                return function(*args, **keywords)
            finally:
                untimed_steps.pop()

        return ours(broadcast)

    wrap(module, "broadcast_optimizer_state", quiet)


PATCHES = [
    ("horovod.torch.functions", functions),
    ("horovod.torch.optimizer", own_optimizers),
]
