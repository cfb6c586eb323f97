"""Lightning: phases with what it does around torch's calls."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.handmade import MS
from tests.helpers.programs import Program, phases

LIGHTNING: Final = {
    "strategies/strategy.py": """
class Strategy:
    def training_step(self, batch): return 2 * batch
    def backward(self, loss):
        import time, torch.autograd
        time.sleep(0.02)  # the program's on_before_backward
        torch.autograd.backward([])
        return loss
    def optimizer_step(self, optimizer, call):
        result = call()
        optimizer.step()
        return result
""",
    "plugins/precision/precision.py": """
class Precision:
    def clip_gradients(self, optimizer, most): return most
""",
    "loops/optimization/automatic.py": """
class Closure:
    def closure(self): return 42
    def __call__(self): return self.closure()
""",
}


USES: Final = """
from {package}.loops.optimization.automatic import Closure
from {package}.plugins.precision.precision import Precision
from {package}.strategies.strategy import Strategy
strategy = Strategy()
print(strategy.training_step(21), strategy.backward(42))
class Optimizer:
    def step(self): pass
call = lambda: Precision().clip_gradients(None, Closure()())
print(strategy.optimizer_step(Optimizer(), call))
"""


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_phases_include_what_lightning_does_around_torchs_calls(
    program: Program, package: str
) -> None:
    folder = package.replace(".", "/")
    program.write({f"{folder}/{name}": source for name, source in LIGHTNING.items()})
    program.write({"torch/autograd/__init__.py": "def backward(tensors): pass"})
    assert program.quietly(USES.format(package=package)) == "42 42\n42\n"
    events = program.events()
    names = ["forward", "backward", "backward", "other", "gradient clipping", "optimizer"]
    assert phases(events) == names
    lengths = events.records["phase"]["end"] - events.records["phase"]["start"]
    # The program's callback before torch's backward pass.
    assert lengths[2] >= 20 * MS > lengths[1]
