"""TRL: phases of reinforcement learning between its updates."""

from __future__ import annotations

from typing import Final

from tests.helpers.programs import LOOP, Program, event_names

TRL: Final = {
    "trl/extras/profiling.py": """
class ProfilingContext:
    def __init__(self, name): self.name = name
    def __enter__(self): return self
    def __exit__(self, kind, error, frames): return False
""",
    "trl/trainer/grpo_trainer.py": """
from trl.extras.profiling import ProfilingContext
class GRPOTrainer:
    def _generate(self, prompts):
        with ProfilingContext("GRPOTrainer.sync_weights"): pass
        with ProfilingContext("GRPOTrainer.vLLM.generate"): return [1]
    def _calculate_rewards(self, answers): return sum(answers)
    def _get_per_token_logps_and_entropies(self, answers): return answers
""",
}
TRAINS: Final = """
from trl.trainer.grpo_trainer import GRPOTrainer
optimizer, trainer = Optimizer(), GRPOTrainer()
for _ in range(3):
    answers = trainer._generate(["?"])
    trainer._calculate_rewards(trainer._get_per_token_logps_and_entropies(answers))
    optimizer.step()
print(answers)
"""


def test_what_updates_wait_for_is_timed(torch: Program) -> None:
    torch.write(TRL)
    assert torch.quietly(LOOP + TRAINS) == "[1]\n"
    events = torch.events()
    known = {"rollout", "reward", "reference", "weight sync"}
    names = [name for name in event_names(events, "phase") if name in known]
    assert sorted(names) == sorted([*known] * 3)
