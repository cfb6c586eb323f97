"""Hugging Face's transformers (tried with 5.24): forward passes and clipping of its Trainer, and
generation.

Steps, backward passes and waits are torch's and Accelerate's. A call costs 0.8 µs.
"""

from typing import Any

from ..wrappers import call_after, phase, phases


def forward_passes(module: Any) -> None:
    """Time the forward passes of a trainer, or those by which a subclass replaces them."""

    def time_loss(trainer: Any) -> None:
        for base in type(trainer).__mro__:
            if "compute_loss" in vars(base):
                phase(base, "compute_loss", "forward")
                return

    call_after(module.Trainer, "__init__", time_loss)


PATCHES = [
    ("transformers.generation.utils", phases("GenerationMixin", generate="generate")),
    ("transformers.trainer", phases("Trainer", _clip_grad_norm="gradient clipping")),
    ("transformers.trainer", forward_passes),
]
