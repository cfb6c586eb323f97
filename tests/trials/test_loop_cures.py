"""Cures of what a program calls in its loop: collections, caches, checkpoints."""

from __future__ import annotations

import gc
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.tried_programs import InProgram, Real


@pytest.fixture
def loop(hooks: InProgram) -> Any:
    """What changes a loop, in a program whose first step has ended."""
    hooks.state.trial.ends.append(0)
    return importlib.import_module("_gputrace_hooks.cures.loop")


def test_collections_and_emptied_caches_are_left_out_while_the_cure_is_on(
    hooks: InProgram, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def collect(generation: int = 2) -> int:
        called.append("collect")
        return 7

    monkeypatch.setattr(gc, "collect", collect)
    cuda = SimpleNamespace(
        empty_cache=lambda: called.append("empty"), synchronize=lambda: called.append("wait")
    )
    hooks.start("skip-gc-collect", "skip-empty-cache", "skip-synchronize")
    loop.skip_collections()
    loop.torch_calls(SimpleNamespace(cuda=cuda, save=None))
    assert (gc.collect(), cuda.empty_cache(), cuda.synchronize(), called) == (0, None, None, [])
    hooks.state._on.clear()
    assert (gc.collect(), cuda.empty_cache(), cuda.synchronize()) == (7, None, None)
    assert called == ["collect", "empty", "wait"]
    hooks.start("skip-gc-collect")
    hooks.state.trial.ends.clear()
    assert gc.collect() == 7, "before the loop"
    assert {change["cure"] for change in hooks.changes} == {
        *("skip-gc-collect", "skip-empty-cache", "skip-synchronize")
    }
    assert "skip-gc-collect-calls" in hooks.state.trial.has


def test_checkpoints_are_copied_and_written_by_a_thread(real: Real) -> None:
    """What the loop changes meanwhile is not in the file; a module as a whole is saved at once."""
    (real.folder / "modules" / "torch" / "__init__.py").write_text(
        "import pickle, time\n"
        "__version__ = '2.13.0'\n"
        "class cuda: is_initialized = staticmethod(lambda: False)\n"
        "class Tensor:\n"
        "    is_cuda = False\n"
        "    def __init__(self, value): self.value = value\n"
        "    def detach(self): return self\n"
        "    def copy_(self, other, non_blocking): self.value = other.value; return self\n"
        "def empty_like(tensor, device, pin_memory): return Tensor(None)\n"
        "def save(value, path):\n"
        "    time.sleep(0.3)\n"
        "    with open(path, 'wb') as file: pickle.dump(value, file)\n"
    )
    program = (
        "import time, torch\n"
        "from torch.optim import SGD\n"
        "weight, optimizer = torch.Tensor(0), SGD([], 0.1)\n"
        "for step in range(12):\n"
        "    weight.value = step\n"
        "    optimizer.step()\n"
        "    if step == 5:\n"
        "        began = time.time()\n"
        "        torch.save({'model': {'weight': weight}, 'step': step}, 'PATH')\n"
        "        assert time.time() - began < 0.2\n"
    )
    path = real.folder / "last.pt"
    run = real.run("async-checkpoint", program.replace("PATH", str(path)), steps=99)
    assert [change.call for change in run.changes] == ["save"]
    assert b"\x05" in path.read_bytes()
    assert "async-checkpoint-calls" in run.has
