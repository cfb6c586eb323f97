"""Hugging Face's TRL (tried with 1.16): phases of GRPO and RLOO between their updates.

These are the rollout, from the prompts to the tokens of all answers; the reward; and what the
policy and the reference find probable, without gradients. TRL's own profiling contexts tell when an
engine gets new weights. Steps, forward and backward passes are transformers'. A call costs 0.8 µs.
"""

from typing import Any

from ..host_file import time_ns
from ..recorder import PHASE, record, word
from ..wrappers import around, phases


def contexts(module: Any) -> None:
    """Time the context in which an engine gets new weights: ``GRPOTrainer.sync_weights``."""
    sync = word("weight sync")
    begun: dict[int, int] = {}

    @around(module.ProfilingContext, "__enter__")
    def enter(original: Any, self: Any) -> Any:
        if self.name.endswith("sync_weights"):
            begun[id(self)] = time_ns()
        return original(self)

    @around(module.ProfilingContext, "__exit__")
    def leave(original: Any, self: Any, *error: Any) -> Any:
        if id(self) in begun:
            record(begun.pop(id(self)), time_ns(), sync, PHASE)
        return original(self, *error)


PATCHES = [
    *(
        (
            f"trl.trainer.{module}_trainer",
            phases(
                f"{module.upper()}Trainer",
                _generate="rollout",
                _calculate_rewards="reward",
                _get_per_token_logps_and_entropies="reference",
            ),
        )
        for module in ("grpo", "rloo")
    ),
    ("trl.extras.profiling", contexts),
]
