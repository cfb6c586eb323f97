"""Accelerate: phases with what it does around torch's calls."""

from __future__ import annotations

from typing import Final

from tests.helpers.programs import Program, phases

ACCELERATE: Final = {
    "accelerate/accelerator.py": """
class Accelerator:
    def backward(self, loss): return loss
    def clip_grad_norm_(self, parameters, most): return most
    def step(self): return "stepped"
""",
    "accelerate/optimizer.py": """
class AcceleratedOptimizer:
    def __init__(self, optimizer): self.optimizer = optimizer
    def step(self): return self.optimizer.step()
""",
}


def test_phases_include_what_accelerate_does_around_torchs_calls(program: Program) -> None:
    program.write(ACCELERATE)
    out = program.quietly(
        "from accelerate.accelerator import Accelerator\n"
        "from accelerate.optimizer import AcceleratedOptimizer\n"
        "accelerator = Accelerator()\n"
        "print(accelerator.backward(1), accelerator.clip_grad_norm_([], 2))\n"
        "print(AcceleratedOptimizer(accelerator).step())\n"
    )
    assert out == "1 2\nstepped\n"
    assert phases(program.events()) == ["backward", "gradient clipping", "optimizer"]
