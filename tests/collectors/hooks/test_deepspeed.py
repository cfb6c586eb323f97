"""DeepSpeed: steps of its engine, and their phases."""

from __future__ import annotations

from typing import Final

from tests.helpers.programs import Program, event_names, phases

DEEPSPEED: Final = {
    "deepspeed/runtime/engine.py": """
class DeepSpeedEngine:
    def forward(self, batch): return batch
    def backward(self, loss): return loss
    def clip_fp32_gradients(self): pass
    def _take_model_step(self): self.clip_fp32_gradients()
    def step(self): self._take_model_step()
""",
}


def test_the_engines_calls_are_phases_and_its_steps_count(program: Program) -> None:
    program.write(DEEPSPEED)
    out = program.quietly(
        "from deepspeed.runtime.engine import DeepSpeedEngine\n"
        "engine = DeepSpeedEngine()\n"
        "print(engine.backward(engine.forward(1)), engine.step())\n"
    )
    assert out == "1 None\n"
    events = program.events()
    assert phases(events) == ["forward", "backward", "gradient clipping", "optimizer"]
    assert event_names(events, "step") == ["deepspeed.DeepSpeedEngine.step"]
