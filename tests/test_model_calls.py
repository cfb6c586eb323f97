"""Calls of a torch program's model: what begins a forward pass, and that nobody notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from tests.analyzers.test_step_phases import RANGES, WAIT, Calls, Host, host_ms, the
from tests.helpers.handmade import MS, analyze
from tests.test_hooks import Program, event_names, recorded_with_torch, torch_python

# ---- what it means ----


def test_forward_begins_with_the_model_and_ends_where_backward_begins(tmp_path: Path) -> None:
    """Between the two are a loss that is no module's, and a call that is none of the pass."""
    calls: Calls = [(WAIT, 0, 1), ("model", 3, 4), ("other", 5, 5.5), ("backward", 6, 8)]
    row = the(analyze(Host().trains(*calls, ("optimizer", 8, 9)).export, tmp_path))
    expected = {"data": 1, "forward": 2.5, "backward": 2, "optimizer": 1, "other": 3.5}
    assert host_ms(row) == expected


def test_each_backward_pass_has_the_model_s_first_call_before_it(tmp_path: Path) -> None:
    calls: Calls = [
        *[("model", 1, 2), ("model", 2, 2.5), ("backward", 3, 4)],
        *[("model", 5, 6), ("backward", 6, 7), ("optimizer", 7, 8)],
    ]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 2 + 1, "backward": 2, "optimizer": 1, "other": 4}


def test_a_model_that_is_called_without_a_backward_pass_is_forward_too(tmp_path: Path) -> None:
    calls: Calls = [("model", 1, 2), ("backward", 3, 4), ("optimizer", 4, 5), ("model", 6, 9)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 2 + 3, "backward": 1, "optimizer": 1, "other": 3}


def test_what_a_backward_pass_calls_again_is_its_own(tmp_path: Path) -> None:
    calls: Calls = [("model", 1, 2), ("backward", 2, 6), ("model", 3, 4), ("optimizer", 6, 7)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 1, "backward": 4, "optimizer": 1, "other": 4}


def test_a_pass_that_a_framework_calls_is_what_it_says_with_a_model_in_it(tmp_path: Path) -> None:
    calls: Calls = [("forward", 1, 4), ("model", 2, 3), ("backward", 5, 6), ("optimizer", 6, 7)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 3, "backward": 1, "optimizer": 1, "other": 5}


def test_before_calls_were_timed_a_forward_pass_is_as_long_as_the_others(tmp_path: Path) -> None:
    host = Host().trains(("model", 3, 4), ("backward", 6, 8), ("optimizer", 8, 9))
    rows, model = host.export.rows[RANGES], host.export.string("model")
    for early in [row for row in rows if row["nameId"] == model][:5]:
        rows.remove(early)
    row = the(analyze(host.export, tmp_path))
    assert host_ms(row) == {"forward": 3, "backward": 2, "optimizer": 1, "other": 4}


# ---- real torch ----

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
def test_a_program_does_what_it_did(tmp_path: Path, does: str) -> None:
    program, python = Program(tmp_path), torch_python()
    without = program.run(NET + DOES[does], python=python, hooked=False)
    assert without.code == 0, without.err
    hooked = program.run(NET + DOES[does], python=python)
    assert (hooked.code, hooked.out) == (0, without.out), hooked.err
    assert "model" in event_names(program.events(), "phase")


def test_the_classes_of_outermost_calls_alone_are_timed(tmp_path: Path) -> None:
    program = Program(tmp_path)
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


def test_a_child_times_calls_though_a_thread_of_its_parent_was_in_one(tmp_path: Path) -> None:
    program = Program(tmp_path)
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


def test_modules_let_be_are_not_timed(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.quietly(
        NET + "train(model, optimizer, 6)\nassert '__call__' not in vars(Net)\n",
        python=torch_python(),
        GPUTRACE_MODULES="0",
    )
    assert "model" not in event_names(program.events(), "phase")


def test_a_class_of_the_main_program_is_pickled_as_it_is_without_ours(tmp_path: Path) -> None:
    """As cloudpickle does, which writes the code of such a class's functions and what they name."""
    program = Program(tmp_path)
    program.quietly(
        NET + "import dis\ntrain(model, optimizer, 6)\n"
        "call = vars(Net)['__call__']\n"
        "used = {cell.cell_contents for cell in call.__closure__} - {None}\n"
        "names = {i.argval for i in dis.get_instructions(call) if i.opname == 'LOAD_GLOBAL'}\n"
        "assert (used, names) == ({Net}, {'sys', 'super'}), (used, names)\n"
        "del sys.modules['_gputrace_hooks.frameworks.torch_model_calls']\n"
        "assert model(torch.ones(2, 8)).shape == (2, 8)\n",
        python=torch_python(),
    )


CLOCKED: Final = (
    NET
    + """
class SGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.020)
        return super().step(closure)
    def zero_grad(self):
        super().zero_grad()

class Slow(Net):
    def forward(self, x):
        time.sleep(0.030)
        return self.blocks(x)

model = Slow()
optimizer = SGD(model.parameters(), lr=0.01)
times = []
for _ in range(25):
    x = torch.randn(4, 8)
    time.sleep(0.025)
    now = [time.perf_counter()]
    loss = model(x).sum()
    now.append(time.perf_counter())
    loss.backward()
    now.append(time.perf_counter())
    optimizer.step()
    now.append(time.perf_counter())
    optimizer.zero_grad()
    times.append([1e3 * (b - a) for a, b in zip(now, now[1:])])
print("times =", times)
"""
)


def test_the_batch_s_preparation_is_no_part_of_the_forward_pass(tmp_path: Path) -> None:
    out, report = recorded_with_torch(tmp_path, CLOCKED)
    row = the(report)
    clocked = json.loads(out.split("times = ")[1].splitlines()[0])[-row.steps :]
    found = host_ms(row)
    for name, own in zip(
        ("forward", "backward", "optimizer"), zip(*clocked, strict=True), strict=True
    ):
        # A busy machine may take the core away between the two clocks.
        assert found[name] == pytest.approx(sum(own) / row.steps, rel=0.03, abs=1.0)
    assert found["forward"] >= 30
    assert found["other"] >= 25
    assert row.step_ns >= 75 * MS
