"""Cures that change a model, its optimizer or torch's settings, within the program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gputrace.collectors.session import HOOKS
from gputrace.trials import runs
from gputrace.trials.cures import Candidate, combine, read_candidates
from gputrace.trials.runs import Program as ProgramToTry
from gputrace.trials.runs import Turns
from tests.helpers.programs import torch_python
from tests.helpers.tried_programs import PROGRAM, InProgram, Real


def test_torch_itself_is_changed_at_every_place(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    python = torch_python()
    source = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
data = TensorDataset(torch.randn(800, 3, 8, 8), torch.randint(2, (800,)))
optimizer = torch.optim.AdamW(model.parameters())
model.eval()(data[:8][0])
model.train()
for x, y in DataLoader(data, 8):
    optimizer.zero_grad(set_to_none=False)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
    applied = "workers=1,prefetch=3,persistent,fused,set-to-none,channels-last,bf16,gc"
    skipped = "pinned,staging,non-blocking,tf32,cudnn-benchmark"
    run = real.run(f"{applied},{skipped}", source, command=(python, str(real.script)))
    assert {change.cure for change in run.changes} >= {
        word.partition("=")[0] for word in applied.split(",")
    }
    assert len(run.losses) == run.steps == 8
    assert run.threads == 1
    assert "keeps-gradients" in run.has
    if not run.gpu:
        assert {run.reasons[cure] for cure in skipped.split(",")} == {"torch sees no GPU"}
    switched = combine(read_candidates("fused,channels-last,bf16,set-to-none"))
    assert switched.switched
    program = ProgramToTry((python, str(real.script)))
    each = tuple(read_candidates("fused,channels-last,bf16,set-to-none,foreach"))
    every = Candidate(tuple(setting for turn in each for setting in turn.settings))
    by_turns = program.run(every, warmup=10, steps=4 * 6 * 3, turns=Turns(each, 3))
    assert [len(pairs) for pairs in by_turns.turns] == [4] * 5
    assert {change.cure for change in by_turns.changes} == {s.cure.id for s in every.settings}


def test_weights_keep_a_place_for_each_layout_and_outputs_leave_a_captures_graph(
    tmp_path: Path,
) -> None:
    """A captured graph reads weights where they were; what it kept would hold up other passes."""
    program = f"""
import sys
sys.path.insert(0, {str(HOOKS)!r})
import torch
from _gputrace_hooks.cures import model as ours
from _gputrace_hooks.cures.trial import _switch_to, asked, cures

model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
weight = model[0].weight
with torch.no_grad():
    weight.fill_(1)
cures["channels-last"] = asked["stretch"] = True
ours._channels_last("channels-last", model, None)
images, places = torch.randn(2, 3, 8, 8), []
for on in (True, False, True, False):
    _switch_to({{"channels-last"}} if on else set())
    assert weight.is_contiguous(memory_format=torch.channels_last) is on
    places.append(weight.data_ptr())
    with torch.no_grad():
        weight.mul_(2)
    model(images).sum().backward()
assert places[:2] == places[2:] and len(set(places)) == 2, places
assert weight.eq(16).all()

output = ours._detachable(torch)(model(images).view(4))
gradient, = torch.autograd.grad(output.sum(), [model[2].bias])
assert gradient.eq(2).all()
assert output.detach_().grad_fn is None
"""
    ran = subprocess.run([torch_python(), "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_what_the_program_sets_itself_stays_so_in_all_turns(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has TF32 on would else be compared with one that has it off."""
    matmul, cudnn = SimpleNamespace(allow_tf32=False), SimpleNamespace(allow_tf32=True)
    backends = SimpleNamespace(cuda=SimpleNamespace(matmul=matmul), cudnn=cudnn)
    monkeypatch.setattr(hooks.model, "sees_gpu", lambda _: True)
    hooks.state.asked.update(stretch=6)
    hooks.state.cures.update(tf32=True)
    hooks.model._set_switches(SimpleNamespace(backends=backends))
    matmul.allow_tf32 = True
    for call in hooks.state.between:
        call(1)
    for turn in {"tf32"}, set():
        hooks.state._switch_to(turn)
        assert matmul.allow_tf32
    said = {"tf32": "torch.backends.cuda.matmul.allow_tf32 is True already"}
    assert (hooks.state.trial.reasons, hooks.changes) == (said, [])


def test_compiled_code_is_for_all_shapes_and_is_known_to_be_compiled(hooks: InProgram) -> None:
    def compile(model: Any = None, *, dynamic: bool | None = None) -> bool | None:
        return dynamic

    torch: Any = SimpleNamespace(compile=compile, backends=None)
    hooks.model.torch_calls(torch)
    assert (torch.compile("model"), hooks.state.trial.has) == (None, {"compiled"})
    hooks.start("dynamic")
    assert torch.compile("model", dynamic=False) is True
    [change] = hooks.changes
    assert (change["cure"], change["argument"], change["new"]) == ("dynamic", "dynamic", "True")


def test_each_block_that_a_model_repeats_is_compiled_and_switched(hooks: InProgram) -> None:
    class Part:
        def __init__(self, *children: Part) -> None:
            self.within = children
            self._compiled_call_impl: str | None = None

        def children(self) -> Sequence[Part]:
            return self.within

        def modules(self) -> list[Part]:
            return [self, *(part for child in self.within for part in child.modules())]

        def compile(self) -> None:
            self._compiled_call_impl = "compiled"

    class Block(Part):
        pass

    def block() -> Block:
        # Its own parts are alike, too.
        return Block(Part(Part()), Part(Part()))

    blocks = [block() for _ in range(3)]
    model = Part(Part(), Part(*blocks))
    hooks.state.cures["compile"] = "regional"
    hooks.model._compile("compile", model)
    assert [part for part in model.modules() if part._compiled_call_impl] == blocks
    hooks.state._on.add("compile")
    hooks.state._switch_to(set())
    assert not any(part._compiled_call_impl for part in model.modules())
    hooks.state.trial.changes.clear()
    hooks.model._compile("compile", Part(Part()))
    assert hooks.state.trial.reasons["compile"] == "the model repeats no block"


def test_an_optimizer_that_could_not_be_made_is_not_switched(real: Real) -> None:
    path = real.folder / "modules" / "torch" / "optim" / "optimizer.py"
    path.write_text(
        path.read_text().partition("class SGD")[0] + "    def __init__(self, params, foreach):\n"
        "        if not isinstance(params, list): raise TypeError('no list')\n"
        "        self.state = {}\n"
        "        self.param_groups = [{'params': params, 'foreach': foreach}]\n"
        "class SGD(Optimizer):\n"
        "    def __init__(self, params, lr=0.1, *, foreach=None):\n"
        "        super().__init__(params, foreach)\n"
    )
    fails = "from torch.optim import SGD\ntry: SGD('weight')\nexcept TypeError: print('refused')\n"
    real.script.write_text(fails + PROGRAM)
    [foreach] = read_candidates("foreach")
    trial = ProgramToTry((sys.executable, str(real.script)))
    run = trial.run(foreach, 2, 4 * 6, turns=Turns((foreach,), 6))
    assert (len(run.turns[0]), run.reasons) == (2, {})


@pytest.mark.parametrize("read", [lambda tensor: tensor.item(), lambda tensor: float(tensor)])
def test_a_number_of_the_step_before_is_read_without_waiting(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], float]
) -> None:
    """Tensors here count the reads that wait for a GPU."""
    waited: list[float] = []

    class Tensor:
        def __init__(self, value: float, is_cuda: bool = True) -> None:
            self.value, self.is_cuda = float(value), is_cuda

        def item(self) -> float:
            waited.extend([self.value] * self.is_cuda)
            return self.value

        __float__ = item

        def detach(self) -> Tensor:
            return self

        def copy_(self, other: Tensor, non_blocking: bool) -> None:
            self.value = other.value

    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    torch = SimpleNamespace(
        Tensor=Tensor,
        __file__="/torch/__init__.py",
        empty_like=lambda *_, **given: Tensor(0, is_cuda=given["device"] != "cpu"),
        cuda=SimpleNamespace(Event=lambda: event, is_available=lambda: True),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    hooks.start("defer-item")
    hooks.host.torch_calls(torch)
    reads = []
    for step in range(3):
        reads.append([read(Tensor(10 * step + part)) for part in range(2)])
        hooks.state.trial.ends.append(step)
    assert reads == [[0, 1], [0, 1], [10, 11]]
    assert waited == [0, 1], "only the first step waits"
    assert Tensor(7, is_cuda=False).item() == 7
    assert {change["cure"] for change in hooks.changes} == {"defer-item"}
    assert "reads" in hooks.state.trial.has


def fake_torch(tensor: type, capture: Any) -> Any:
    """Return what captures need of torch, with a function for ``make_graphed_callables``."""
    function = type("Function", (), {"apply": staticmethod(lambda value: value)})
    return SimpleNamespace(
        Tensor=tensor,
        autograd=SimpleNamespace(Function=function, grad=None),
        cuda=SimpleNamespace(make_graphed_callables=capture),
        autocast=lambda kind, **_: nullcontext(),
        get_autocast_dtype=lambda kind: None,
        is_autocast_enabled=lambda kind: False,
        is_grad_enabled=lambda: False,
    )


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_without_an_optimizer_a_step_ends_with_each_backward_pass(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch, has_optimizer: bool
) -> None:
    class Optimizer:
        """Base of torch's optimizers."""

    def backward(loss: Any) -> str:
        return "done"

    trial, module = hooks.state.trial, SimpleNamespace(backward=backward)
    monkeypatch.setitem(sys.modules, "torch.optim", SimpleNamespace(Optimizer=Optimizer))
    hooks.state.asked.update(warmup=2, steps=None)
    made = [Optimizer()] * has_optimizer
    hooks.state.losses(module)
    assert [module.backward(object()) for _ in range(7)] == ["done"] * 7
    # The first two passes may be of a step whose end is not yet known.
    assert (len(trial.ends), len(made)) == ((0, 1) if has_optimizer else (5, 0))
    trial.step_ended(1, 99)
    module.backward(object())
    assert trial.ends == [99], "one that was made later tells of steps"


def test_a_model_is_captured_before_its_first_call_and_other_shapes_go_without(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Tensor:
        is_cuda, requires_grad, dtype = True, False, "float32"

        def __init__(self, *shape: int) -> None:
            self.shape = shape

        def detach(self) -> Tensor:
            return Tensor(*self.shape)

        clone = detach

        def requires_grad_(self, _: bool) -> Tensor:
            return self

    def capture(model: Any, sample: tuple[Tensor, ...]) -> Any:
        made.append(model.forward(*sample))
        model.forward = lambda *_: "captured"
        return model

    made: list[Any] = []
    monkeypatch.setitem(sys.modules, "torch", fake_torch(Tensor, capture))
    hooks.start("graphs")
    model, other = (SimpleNamespace(forward=lambda *_, **__: "as it is") for _ in range(2))
    hooks.model._graph("graphs", model, (Tensor(8, 3),), {})
    assert model.forward(Tensor(8, 3)) == "captured"
    assert model.forward(Tensor(4, 3)) == "as it is", "the last batch is smaller"
    assert model.forward(Tensor(8, 3), mask=None) == "as it is"
    hooks.state._on.clear()
    assert model.forward(Tensor(8, 3)) == "as it is", "it is switched off"
    assert [change["cure"] for change in hooks.changes] == ["graphs"]
    hooks.model._graph("graphs", other, (), {})
    assert other.forward() == "as it is"
    assert "other arguments than tensors" in hooks.state.trial.reasons["graphs"]


GRAPHS = """
import sys
sys.path.insert(0, HOOKS)
import torch
from _gputrace_hooks.cures import model as ours
from _gputrace_hooks.cures.trial import _on, between, cures
from torch.autograd import Function, grad

def capture(model, inputs, **options):
    forward, weights, last = model.forward, tuple(model.parameters()), []
    output = forward(*inputs)
    written = torch.autograd.grad((output,), weights, (torch.ones_like(output),))
    kept = output.detach().clone()

    class Graphed(Function):
        @staticmethod
        def forward(ctx, *given):
            for place, value in zip(inputs, given):
                place.copy_(value)
            with torch.enable_grad():
                last[:] = [forward(*inputs)]
            return kept.copy_(last[0].detach()).detach()

        @staticmethod
        def backward(ctx, gradient):
            for place, value in zip(written, grad(last[0], weights, gradient)):
                place.copy_(value)
            return (*[None] * len(inputs), *(place.detach() for place in written))

    model.forward = lambda *given: Graphed.apply(*given, *weights)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x, scale=1):
        return self.b(torch.tanh(self.a(x))) * scale

def train(graphs, passes, calls, set_to_none):
    torch.manual_seed(0)
    net, data = Net(), torch.randn(40, 8, 4)
    optimizer, batches, replayed = torch.optim.SGD(net.parameters(), 0.1), iter(data), []
    if graphs:
        given = {"x": data[0], "scale": 2}
        net.forward = ours._Graphed(net, [data[0]], ours._described(torch, (), given), [*given])
        net.forward.capture(torch, (), given)
        captured = net.forward.captured
        net.forward.captured = lambda *x: replayed.append(1) or captured(*x)
    for step in range(4):
        for _ in range(passes):
            sum(net(x=next(batches), scale=2).pow(2).mean() for _ in range(calls)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        for call in between:
            call(step)
    assert len(replayed) == 4 * passes * graphs
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])

torch.cuda.make_graphed_callables = capture
cures["graphs"] = True
_on.add("graphs")
for how in [(1, 1, True), (1, 1, False), (3, 1, True), (3, 2, False)]:
    assert torch.equal(train(False, *how), train(True, *how)), how
"""


def test_with_graphs_gradients_add_up_as_without(tmp_path: Path) -> None:
    """What a graph reads and writes has one place, here as on a GPU: a pass overwrites the last
    one's gradients, and the outputs of a call whose backward pass is still to come.
    """
    program = GRAPHS.replace("HOOKS", repr(str(HOOKS)))
    ran = subprocess.run([torch_python(), "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


ACCUMULATING = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(1 + dist.get_rank())
for passes in (4, 4, 4, 2, 5, 4, 4, 4, 4, 4, 4, 4):
    for _ in range(passes):
        model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
torch.save(weights, f"{os.environ['WEIGHTS']}{dist.get_rank()}")
dist.destroy_process_group()
"""


def test_gradients_are_sent_once_a_step_and_weights_are_those_of_the_program_as_it_is(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with fewer backward passes than the one before has its last gradients unsent."""
    monkeypatch.delenv("PYTHONPATH")
    python = torch_python()
    launch = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for cures in ("gc", "no-sync"):
        monkeypatch.setenv("WEIGHTS", str(real.folder / cures))
        run = real.run(cures, ACCUMULATING, command=(*launch, str(real.script)), steps=99)
        assert {change.cure for change in run.changes} == {cures}
    compared = (
        "import sys, torch; a, *rest = map(torch.load, sys.argv[1:])\n"
        "assert all(torch.allclose(a, b, atol=1e-6) for b in rest)"
    )
    files = [str(real.folder / f"{cures}{rank}") for cures in ("gc", "no-sync") for rank in (0, 1)]
    subprocess.run([python, "-c", compared, *files], check=True)


def test_of_distributed_data_parallel_the_model_within_is_captured(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DistributedDataParallel looks at events in its own forward pass, which ends a capture."""

    class DistributedDataParallel:
        def __init__(self, module: Any) -> None:
            self.module = module

        def forward(self, inputs: Any) -> str:
            return f"reduced {self.module.forward(inputs)}"

    def capture(model: Any, sample: Sequence[Any]) -> None:
        model.forward(*sample)
        model.forward = lambda *_: "captured"

    tensor = SimpleNamespace(is_cuda=True, requires_grad=False, shape=(8, 3), dtype="float32")
    tensor.detach = tensor.clone = lambda: tensor
    tensor.requires_grad_ = lambda _: tensor
    monkeypatch.setitem(sys.modules, "torch", fake_torch(SimpleNamespace, capture))
    hooks.start("graphs")
    model = DistributedDataParallel(SimpleNamespace(forward=lambda *_: "as it is"))
    hooks.model._graph("graphs", model, (tensor,), {})
    assert model.forward(tensor) == "reduced captured"


def test_a_cure_that_fails_is_told_by_what_failed_first(hooks: InProgram) -> None:
    def capture() -> None:
        try:
            raise RuntimeError("not permitted when stream is capturing")
        finally:
            raise OSError("a previous error during capture")

    hooks.start("graphs")
    assert hooks.state.guarded("graphs", capture) is None
    reason = hooks.state.trial.reasons["graphs"]
    assert reason == "failed: RuntimeError('not permitted when stream is capturing')"


def test_distributed_data_parallel_and_what_follows_are_on_the_stream_of_captures(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that it keeps of autograd run on the stream on which they were made."""
    current = ["default"]

    class Stream(SimpleNamespace):
        def wait_stream(self, other: Any) -> None:
            waited.append((self.name, other.name))

    class DistributedDataParallel:
        def __init__(self, module: Any, device_ids: Any = None) -> None:
            self.made_on = current[-1]

    waited: list[tuple[str, str]] = []
    cuda = SimpleNamespace(
        graph=SimpleNamespace(default_capture_stream=None),
        Stream=lambda: Stream(name="capture"),
        current_stream=lambda: Stream(name=current[-1]),
        set_stream=lambda stream: current.append(stream.name),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    hooks.start("graphs")
    hooks.model.distributed(SimpleNamespace(DistributedDataParallel=DistributedDataParallel))
    of_gpu, of_cpu = (
        SimpleNamespace(parameters=lambda is_cuda=is_cuda: [SimpleNamespace(is_cuda=is_cuda)])
        for is_cuda in (True, False)
    )
    assert DistributedDataParallel(of_cpu).made_on == "default"
    assert DistributedDataParallel(of_gpu, device_ids=[0]).made_on == "capture"
    assert waited == [("capture", "default")]
    assert current[-1] == "capture"
    # PyTorch before 1.10 captures nothing.
    del cuda.graph
    assert DistributedDataParallel(of_gpu).made_on == "capture"
    assert hooks.state.trial.reasons["graphs"].startswith(runs.FAILURE)


def test_a_function_of_jax_donates_what_it_returns_anew(hooks: InProgram) -> None:
    hooks.start("donate")
    donated: list[tuple[int, ...]] = []

    def jit(function: Any, **keywords: Any) -> Any:
        def compiled(*args: Any) -> Any:
            donated.append(keywords.get("donate_argnums", ()))
            return function(*args)

        compiled.eval_shape = function  # type: ignore[attr-defined]
        return compiled

    def leaves(value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            return [value]
        return [leaf for part in value for leaf in leaves(part)]

    tree = SimpleNamespace(tree_leaves=leaves)
    jax: Any = SimpleNamespace(jit=jit, Array=np.ndarray, tree_util=tree)
    hooks.model.jitted(jax)
    weights, batch = np.zeros((2, 3)), np.zeros((8, 2))

    step = jax.jit()(lambda state, batch: ((state[0] + 1, state[1]), batch.sum()))
    loss = jax.jit(lambda weights, batch: (batch @ weights).sum())
    for _ in range(2):
        step((weights, weights), batch)
    loss(weights, batch)
    jax.jit(lambda x: x, static_argnums=1)(batch)
    assert donated == [(0,), (0,), (), ()]
    assert [change["new"] for change in hooks.changes] == ["(0,)"]
