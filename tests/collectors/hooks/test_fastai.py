"""fastai: steps of its optimizers."""

from __future__ import annotations

from tests.helpers.programs import Program, event_names, numbers


def test_a_step_of_an_optimizer_within_another_counts_once(torch: Program) -> None:
    """None of its classes is one of torch's."""
    torch.write(
        {
            "fastai/optimizer.py": """
class Optimizer:
    def step(self): return "stepped"
class Lookahead:
    def __init__(self, optimizer): self.optimizer = optimizer
    def step(self): return self.optimizer.step()
"""
        }
    )
    source = """
import torch.optim
from fastai.optimizer import Lookahead, Optimizer
optimizer = Lookahead(Optimizer())
for _ in range(3): print(optimizer.step())
"""
    assert torch.quietly(source) == "stepped\n" * 3
    assert numbers(torch.events(), "step") == [0, 1, 2]
    assert event_names(torch.events(), "phase").count("optimizer") >= 3
    assert all(mark.startswith("fastai.") for mark in event_names(torch.events(), "step"))
