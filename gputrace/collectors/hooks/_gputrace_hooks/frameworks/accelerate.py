"""Hugging Face's Accelerate (tried with 1.15): its backward pass, clipping and optimizer's step.

They hold what Accelerate does around torch's own calls; it looks for packages at each step. Each
call costs 0.8 µs.
"""

from ..wrappers import phases

PATCHES = [
    (
        "accelerate.accelerator",
        phases("Accelerator", backward="backward", clip_grad_norm_="gradient clipping"),
    ),
    ("accelerate.optimizer", phases("AcceleratedOptimizer", step="optimizer")),
]
