"""PyTorch Lightning (tried with 2.6, as ``lightning`` and as ``pytorch_lightning``): forward and
backward passes, clipping and the optimizer's step, with what Lightning and its callbacks do around
torch's own calls. Its steps are the optimizers' (``torch``). A call costs 0.8 µs.
"""

from ..wrappers import phases

PATCHES = [
    (f"{package}.{module}", hook)
    for package in ("lightning.pytorch", "pytorch_lightning")
    for module, hook in (
        # What Lightning has the optimizer call: not a part of the optimizer's step.
        ("loops.optimization.automatic", phases("Closure", closure="other")),
        ("plugins.precision.precision", phases("Precision", clip_gradients="gradient clipping")),
        (
            "strategies.strategy",
            phases(
                "Strategy",
                training_step="forward",
                backward="backward",
                optimizer_step="optimizer",
            ),
        ),
    )
]
