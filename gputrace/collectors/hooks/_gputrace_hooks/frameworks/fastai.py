"""fastai (tried with stand-ins of version 2): steps of its optimizers, which are not torch's.

Backward passes and waits are torch's. A step costs 2 µs.
"""

from .torch import count_optimizer_steps

PATCHES = [("fastai.optimizer", count_optimizer_steps)]
