"""transformers: forward passes and clipping of its Trainer, and generation."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.programs import Program, phases

TRANSFORMERS: Final = {
    "transformers/trainer.py": """
class Trainer:
    def __init__(self, scale=2): self.scale = scale
    def compute_loss(self, batch): return self.scale * batch
    def _clip_grad_norm(self, most): return most
""",
}


OWN: Final = "\nclass Own(Trainer):\n    def compute_loss(self, batch): return self.scale * batch"


@pytest.mark.parametrize(("cls", "own"), [("Trainer", ""), ("Own", OWN)])
def test_forward_passes_and_clipping_of_a_trainer_are_timed(
    program: Program, cls: str, own: str
) -> None:
    program.write(TRANSFORMERS)
    out = program.quietly(
        f"from transformers.trainer import Trainer{own}\n"
        f"trainer = {cls}(scale=2)\n"
        "print(trainer.compute_loss(21), trainer._clip_grad_norm(3))\n"
    )
    assert out == "42 3\n"
    assert phases(program.events()) == ["forward", "gradient clipping"]


def test_generation_is_timed(program: Program) -> None:
    mixin = "class GenerationMixin:\n    def generate(self, prompt): return prompt * 2\n"
    program.write({"transformers/generation/utils.py": mixin})
    out = program.quietly(
        "from transformers.generation.utils import GenerationMixin\n"
        "print(GenerationMixin().generate(21))\n"
    )
    assert out == "42\n"
    assert phases(program.events()) == ["generate"]
