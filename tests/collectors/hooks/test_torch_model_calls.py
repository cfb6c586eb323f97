"""Calls of a torch program's model, which the program does not notice."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.programs import Program, event_names, torch_python

NET: Final = """
import copy, io, json, os, pickle, sys, time
import torch
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x): return self.linear(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
    def forward(self, x): return self.blocks(x)

def train(call, optimizer, count):
    for seed in range(count):
        torch.manual_seed(seed)
        loss = call(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
"""

DOES: Final = {
    "keeps, copies, scripts and traces its model": """
print(train(model, optimizer, 6), list(model.state_dict()), sorted(vars(model)))
print(model._forward_pre_hooks, model._forward_hooks, vars(nn.Module)["__call__"].__name__)
x, file = torch.ones(2, 8), io.BytesIO()
torch.save(model, file); file.seek(0)
print(torch.load(file, weights_only=False)(x), copy.deepcopy(model)(x))
print(b"gputrace" in file.getvalue(), b"gputrace" in pickle.dumps(optimizer))
print(torch.jit.script(model)(x), torch.jit.trace(model, x)(x), torch.fx.symbolic_trace(model)(x))
""",
    "has it compiled before and after, and exported": """
from torch._dynamo.utils import counters
def loss(x): return model(x).square().mean()
x = torch.ones(2, 8)
before = torch.compile(loss, backend="eager", fullgraph=True)
before(x)
train(model, optimizer, 6)
after = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
after(x)
torch._dynamo.config.error_on_recompile = True
print(before(x), after(x), dict(counters["stats"]), dict(counters["graph_break"]))
torch._dynamo.config.error_on_recompile = False
print(train(torch.compile(model, backend="eager", fullgraph=True), optimizer, 4))
print(torch.export.export(model, (x,)).graph)
""",
    "has parts of it computed again, under DDP": """
from torch.utils.checkpoint import checkpoint
class Again(Net):
    def forward(self, x): return checkpoint(self.blocks, x, use_reentrant=False)
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
again = nn.parallel.DistributedDataParallel(Again())
print(train(again, torch.optim.SGD(again.parameters(), 0.1), 6))
torch.distributed.destroy_process_group()
""",
}


@pytest.mark.parametrize("does", list(DOES))
def test_a_program_does_the_same_with_its_calls_timed(program: Program, does: str) -> None:
    python = torch_python()
    without = program.run(NET + DOES[does], python=python, hooked=False)
    assert without.code == 0, without.err
    hooked = program.run(NET + DOES[does], python=python)
    assert (hooked.code, hooked.out) == (0, without.out), hooked.err
    assert "model" in event_names(program.events(), "phase")


def test_only_classes_of_outermost_modules_are_timed(program: Program) -> None:
    program.quietly(
        NET + "lossy = nn.MSELoss()\n"
        "train(lambda x: lossy(model(x), x), optimizer, 6)\n"
        "classes = Net, nn.MSELoss, Block, nn.Sequential, nn.Linear\n"
        "assert ['__call__' in vars(c) for c in classes] == [True, True, False, False, False]\n",
        python=torch_python(),
    )
    names = event_names(program.events(), "phase")
    # Seen in the second step, timed from the third one on.
    assert names.count("model") == 2 * 4


def test_a_forked_child_times_calls_even_if_its_parent_was_in_one(program: Program) -> None:
    program.quietly(
        NET + "import threading\nheld, go = threading.Event(), threading.Event()\n"
        "class Held(Net):\n"
        "    def forward(self, x):\n"
        "        if threading.current_thread() is not threading.main_thread():\n"
        "            held.set(); go.wait()\n"
        "        return super().forward(x)\n"
        "model = Held()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "train(model, optimizer, 4)\n"
        "thread = threading.Thread(target=model, args=[torch.ones(2, 8)])\n"
        "thread.start(); held.wait()\nchild = os.fork()\n"
        "if child == 0:\n    train(model, optimizer, 3)\n    sys.exit()\n"
        "assert os.waitpid(child, 0)[1] == 0\ngo.set(); thread.join()\n",
        python=torch_python(),
    )
    # The last two of four in the parent, and its thread's.
    names = [event_names(events, "phase").count("model") for events in program.all_events()]
    assert sorted(names) == [3, 3]


def test_modules_let_be_are_not_timed(program: Program) -> None:
    program.quietly(
        NET + "train(model, optimizer, 6)\nassert '__call__' not in vars(Net)\n",
        python=torch_python(),
        GPUTRACE_MODULES="0",
    )
    assert "model" not in event_names(program.events(), "phase")


def test_a_class_of_the_main_program_is_pickled_without_needing_gputrace(program: Program) -> None:
    """As cloudpickle does, which writes the code of such a class's functions and what they name."""
    program.quietly(
        NET + "import dis\ntrain(model, optimizer, 6)\n"
        "call = vars(Net)['__call__']\n"
        "used = {cell.cell_contents for cell in call.__closure__} - {None}\n"
        "names = {i.argval for i in dis.get_instructions(call) if i.opname == 'LOAD_GLOBAL'}\n"
        "assert (used, names) == ({Net}, {'sys', 'super'}), (used, names)\n"
        "del sys.modules['_gputrace_hooks.frameworks.torch_modules']\n"
        "assert model(torch.ones(2, 8)).shape == (2, 8)\n",
        python=torch_python(),
    )
