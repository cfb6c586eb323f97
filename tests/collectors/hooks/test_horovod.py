"""Horovod: steps of its optimizers."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.programs import Program, event_names, numbers

HOROVOD: Final = {
    "horovod/torch/optimizer.py": """
class _DistributedOptimizer:
    def step(self): return super(self.__class__, self).step()
class _PerParameter:
    def backward(self): super(self.__class__, self).step(); super(self.__class__, self).step()
    def step(self): return "stepped"
def DistributedOptimizer(cls, whole):
    body = dict((_DistributedOptimizer if whole else _PerParameter).__dict__)
    hooked = body["step"]
    def step(self):
        from torch.optim import optimizer
        result = hooked(self)
        for hook in optimizer._hooks: hook(self, (), {})
        return result
    return type(cls.__name__, (cls,), dict(body, step=step))()
""",
    "horovod/torch/functions.py": """
def broadcast_optimizer_state(optimizer, root_rank):
    optimizer.step()
    super(optimizer.__class__, optimizer).step()
    return root_rank
""",
    "horovod/torch/__init__.py": """
from .functions import broadcast_optimizer_state
from .optimizer import DistributedOptimizer
""",
}


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_of_horovods_optimizer_counts_once_and_making_its_state_does_not(
    torch: Program, whole: bool
) -> None:
    """Horovod makes a class of its methods around the user's, whose steps torch hooks."""
    torch.write(HOROVOD)
    source = f"""
from torch.optim import Optimizer
import horovod.torch as hvd
class SGD(Optimizer):
    def step(self): return super().step()
print(hvd.broadcast_optimizer_state(SGD(), 7))
optimizer = hvd.DistributedOptimizer(SGD, {whole})
print(hvd.broadcast_optimizer_state(optimizer, root_rank=8))
for _ in range(3):
    if not {whole}: optimizer.backward()
    print(optimizer.step())
"""
    assert torch.quietly(source) == "7\n8\n" + "stepped\n" * 3
    assert numbers(torch.events(), "step") == [0, 1, 2]
    cls = "_DistributedOptimizer" if whole else "_PerParameter"
    marks = set(event_names(torch.events(), "step"))
    assert marks == {f"horovod.torch.optimizer.{cls}.step"}
