"""DeepSpeed (tried with stand-ins): steps of its engine, and their phases.

The engine's passes are in C++ in part; its own calls are timed, at 0.8 µs each.
"""

from ..steps import LOOP
from ..wrappers import marks_steps, phases

PATCHES = [
    # It may step its optimizer several times for one step of the model.
    (
        "deepspeed.runtime.engine",
        marks_steps("DeepSpeedEngine", "_take_model_step", "deepspeed.DeepSpeedEngine.step", LOOP),
    ),
    (
        "deepspeed.runtime.engine",
        phases(
            "DeepSpeedEngine",
            forward="forward",
            backward="backward",
            clip_fp32_gradients="gradient clipping",
            step="optimizer",
        ),
    ),
]
