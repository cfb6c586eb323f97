"""The hooks in the recorded program, in real processes, with modules that stand for frameworks."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import gputrace
from gputrace.api import Report
from gputrace.collectors.finalize import merge
from gputrace.collectors.spool.host_events import HostEvents, join_hosts, read_host_file
from gputrace.errors import InputError
from tests.helpers import command
from tests.helpers.command import ROOT, Ran

HOOKS: Final = Path(gputrace.__file__).parent / "collectors" / "hooks"
SECOND: Final = 1_000_000_000

TORCH: Final = {
    "torch/utils/data/dataloader.py": """
class _BaseDataLoaderIter:
    def __init__(self, items, wait=0): self.items, self.wait = iter(items), wait
    def __iter__(self): return self
    def __next__(self):
        import time
        time.sleep(self.wait)
        return next(self.items)
""",
    "torch/optim/__init__.py": "from .optimizer import Optimizer",
    "torch/optim/optimizer.py": """
_hooks = []
def register_optimizer_step_post_hook(hook): _hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in _hooks: assert hook(self, (), {}) is None
        return "stepped"
""",
}
LOOP: Final = """
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.optim import Optimizer
"""


def torch_python() -> str:
    """A Python that has torch; GPUTRACE_TORCH_PYTHON may name it, if this one has none."""
    python = os.environ.get("GPUTRACE_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("torch is not installed; GPUTRACE_TORCH_PYTHON may name a Python that has it")
    return python


def recorded_with_torch(folder: Path, source: str) -> tuple[str, Report]:
    """Record a program that uses torch; its output and its analysis."""
    script, trace = folder / "train.py", folder / "trace.sqlite"
    script.write_text(source, encoding="utf-8")
    options = "--backend", "host", "-o", trace
    ran = command.gputrace("record", *options, "--", torch_python(), script)
    assert ran.code == 0, ran.err
    with gputrace.open(trace) as opened:
        return ran.out, opened.analyze()


def event_names(events: HostEvents, kind: str) -> list[str]:
    """Names of the events of a kind, in the order of their ends."""
    return [events.names[int(row["name"])] for row in events.records[kind]]


class Program:
    """Runs programs with the hooks, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = folder / "modules"
        self.spool = folder / "spool"
        self.modules.mkdir()
        self.spool.mkdir()

    def write(self, sources: Mapping[str, str]) -> None:
        """Writes modules that the program can import, packages among them."""
        for name, source in sources.items():
            path = self.modules / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
            for parent in path.relative_to(self.modules).parents:
                (self.modules / parent / "__init__.py").touch()
        (self.modules / "__init__.py").unlink(missing_ok=True)

    def environment(self, hooked: bool = True, **extra: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GPUTRACE", "PYTHON"))}
        paths = [str(HOOKS)] * hooked + [str(self.modules), str(ROOT)]
        env["PYTHONPATH"] = os.pathsep.join(paths)
        if hooked:
            env["GPUTRACE_DIR"] = str(self.spool)
        return env | extra

    def start(self, source: str, *options: str, python: str = sys.executable, **how: Any) -> Any:
        main = self.folder / "main.py"
        main.write_text(source, encoding="utf-8")
        return subprocess.Popen(
            [python, *options, str(main)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment(**how),
            cwd=self.folder,
        )

    def run(self, source: str, *options: str, **how: Any) -> Ran:
        with self.start(source, *options, **how) as process:
            out, err = process.communicate(timeout=60)
        return Ran(process.returncode, out.decode(), err.decode())

    def quietly(self, source: str, *options: str, **how: Any) -> str:
        """Runs the program, which has to end well and silently; what it printed."""
        ran = self.run(source, *options, **how)
        assert (ran.code, ran.err) == (0, "")
        return ran.out

    def files(self) -> list[Path]:
        return sorted(self.spool.iterdir())

    def all_events(self) -> list[HostEvents]:
        return [join_hosts([read_host_file(path)]) for path in self.files()]

    def events(self) -> HostEvents:
        """Return the events of the only process that left some."""
        [events] = self.all_events()
        return events


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture
def torch(program: Program) -> Program:
    """With modules that have the names of PyTorch's and what the hooks use of them."""
    program.write(TORCH)
    return program


def numbers(events: HostEvents, kind: str) -> list[int]:
    return [int(number) for number in events.records[kind]["number"]]


# ---- what is recorded ----


def test_waits_and_steps_have_the_times_threads_and_names_they_had(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import os, time, _thread\n"
        "optimizer = Optimizer()\n"
        "print(os.getpid(), _thread.get_native_id(), time.time_ns())\n"
        "for item in _BaseDataLoaderIter('abc', 0.02): time.sleep(0.01); optimizer.step()\n"
        "print(time.time_ns())\n"
    )
    pid, thread, begin, end = map(int, out.split())
    events = torch.events()
    waits, steps = events.records["data_wait"], events.records["step"]
    assert torch.files()[0].name == f"{os.uname().nodename}.{pid}.host"
    assert (events.pid, events.host, events.whole) == (pid, os.uname().nodename, True)
    assert numbers(events, "data_wait") == [0, 0, 0, 1]
    assert numbers(events, "step") == [0, 1, 2]
    assert set(event_names(events, "data_wait")) == {
        "torch.utils.data.dataloader._BaseDataLoaderIter"
    }
    assert set(event_names(events, "step")) == {"torch.optim.Optimizer.step"}
    assert {*waits["thread"], *steps["thread"]} == {thread}
    assert begin <= waits["start"][0] < steps["end"][-1] <= end
    assert (waits["end"] - waits["start"] >= 20_000_000).all()
    assert steps["start"].tolist() == [waits["start"][0], *steps["end"][:-1]]
    assert (np.diff(steps["end"]) >= 30_000_000).all()
    assert abs(int(events.clocks["realtime"][0]) - begin) < 10 * SECOND


def test_a_file_is_its_owners_alone_and_holds_nothing_of_the_environment(torch: Program) -> None:
    torch.quietly(LOOP + "Optimizer().step()", API_TOKEN="planted-secret", RANK="3")
    path = torch.files()[0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"planted" not in path.read_bytes()
    assert torch.events().info["RANK"] == "3"


def test_the_file_stays_closed_to_other_programs_and_out_of_the_way(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import os, fcntl\n"
        "Optimizer().step()\n"
        "ours = [int(f) for f in os.listdir('/proc/self/fd') if int(f) > 2]\n"
        "ours = [f for f in ours if os.path.exists(f'/proc/self/fd/{f}')]\n"
        "print(*[(f, fcntl.fcntl(f, fcntl.F_GETFD)) for f in sorted(ours)])\n"
    )
    # The second one is the kernel's, of the thread's times.
    assert out == "(200, 1) (201, 1)\n"


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ("for _ in range(4): d.step(); g.step()", 4),
        ("for _ in range(4): d.step(); d.step(); g.step()", 8),
        ("for _ in range(4): g.step(); d.step(); d.step()", 4),
        ("for _ in range(4): g.step()\nfor _ in range(60): d.step()", 64),
        ("for _ in range(4): g.step()\ndel g\nfor _ in range(4): d.step()", 8),
        ("for _ in range(4): Outer(g).step()", 4),
    ],
)
def test_of_several_optimizers_the_first_counts_while_it_steps(
    torch: Program, loop: str, steps: int
) -> None:
    outer = "class Outer(Optimizer):\n    def __init__(self, inner): self.inner = inner\n"
    outer += "    def step(self): self.inner.step(); super().step()\n"
    torch.quietly(f"{LOOP}{outer}d, g = Optimizer(), Optimizer()\n{loop}")
    assert numbers(torch.events(), "step") == list(range(steps))
    assert (np.diff(torch.events().records["step"]["end"].astype(np.int64)) > 0).all()


def test_a_torch_without_hooks_of_all_optimizers_is_hooked_class_by_class(torch: Program) -> None:
    torch.write(
        {
            "torch/optim/optimizer.py": """
class Optimizer:
    def __init__(self, rate): self.rate = rate
class SGD(Optimizer):
    def step(self, closure=None): return self.rate
"""
        }
    )
    source = "from torch.optim.optimizer import SGD\n"
    source += "for _ in range(2): SGD(0.5); print(SGD(0.25).step(closure=None))"
    assert torch.quietly(source) == "0.25\n0.25\n"
    assert numbers(torch.events(), "step") == [0, 1]


def test_hooks_that_torch_compile_takes_off_are_put_back(torch: Program) -> None:
    torch.write(
        {
            "torch/optim/__init__.py": "from .optimizer import Optimizer, SGD, LBFGS",
            "torch/optim/optimizer.py": """
import functools
_hooks = []
def register_optimizer_step_post_hook(hook): _hooks.append(hook)
class Optimizer:
    def __init__(self):
        cls = type(self)
        if not getattr(cls.step, "hooked", False):
            cls.step = self.profile_hook_step(cls.step)
            cls.step.hooked = True
    @staticmethod
    def profile_hook_step(func):
        @functools.wraps(func)
        def wrapper(*args):
            profile_name = ""
            func(*args)
            for hook in _hooks: hook(args[0], args, {})
        return wrapper
class SGD(Optimizer):
    def step(self): pass
class LBFGS(Optimizer):
    def step(self): pass
""",
            "torch/_dynamo/eval_frame.py": """
import functools, torch.optim
class TorchPatcher:
    @staticmethod
    @functools.lru_cache(None)
    def patch():
        torch.optim.SGD.step = torch.optim.SGD.step.__wrapped__
        torch.optim.SGD.step.hooked = True
        step = torch.optim.LBFGS.step
        torch.optim.LBFGS.step = functools.wraps(step)(lambda self: step(self))
""",
        }
    )
    for name in ("SGD", "LBFGS"):
        torch.quietly(
            f"from torch.optim import SGD, LBFGS\nSGD(), LBFGS()\noptimizer = {name}()\n"
            "optimizer.step()\n"
            "from torch._dynamo.eval_frame import TorchPatcher\n"
            "TorchPatcher.patch(); TorchPatcher.patch()\n"
            "optimizer.step(); optimizer.step()\n"
        )
    assert [numbers(events, "step") for events in torch.all_events()] == [[0, 1, 2]] * 2
    # They are timed before and after; torch's patch took off what it found outermost.
    phases = [event_names(events, "phase") for events in torch.all_events()]
    assert phases == [["optimizer"] * 3] * 2


def test_a_step_that_calls_its_base_class_s_is_one(tmp_path: Path) -> None:
    """Torch calls hooks in both, where the base class has been used too."""
    program = Program(tmp_path)
    program.quietly(
        "import torch\n"
        "class Lookahead(torch.optim.SGD):\n"
        "    def step(self, closure=None): return super().step(closure)\n"
        "weights = [torch.ones(1, requires_grad=True)]\n"
        "torch.optim.SGD(weights, lr=0.1)\n"
        "optimizer = Lookahead(weights, lr=0.1)\n"
        "for _ in range(3): optimizer.step()\n",
        python=torch_python(),
    )
    assert numbers(program.events(), "step") == [0, 1, 2]


def test_nothing_is_recorded_while_torch_compile_traces_the_optimizer(torch: Program) -> None:
    torch.write(
        {"torch/compiler/__init__.py": "tracing = False\ndef is_compiling(): return tracing"}
    )
    torch.quietly(
        LOOP + "import torch.compiler\noptimizer = Optimizer()\noptimizer.step()\n"
        "torch.compiler.tracing = True\noptimizer.step()\n"
    )
    assert numbers(torch.events(), "step") == [0]


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
def test_a_step_of_horovod_s_optimizer_is_one_and_making_a_state_is_none(
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


def test_a_step_of_fastai_s_optimizer_is_one_whichever_is_around_it(torch: Program) -> None:
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


def test_a_step_whose_gradients_overflowed_is_a_step(torch: Program) -> None:
    torch.write(
        {
            "torch/amp/grad_scaler.py": """
class GradScaler:
    def step(self, optimizer, overflow):
        return None if overflow else optimizer.step()
"""
        }
    )
    out = torch.quietly(
        LOOP + "from torch.amp.grad_scaler import GradScaler\n"
        "first, second, scaler = Optimizer(), Optimizer(), GradScaler()\n"
        "for overflow in (True, False, True):\n"
        "    print(scaler.step(first, overflow=overflow)); scaler.step(second, overflow)\n"
    )
    assert out == "None\nstepped\nNone\n"
    assert numbers(torch.events(), "step") == [0, 1, 2]


ITERATOR: Final = """
class {name}:
    def __init__(self): self.left = 2
    def __iter__(self): return self
    def __next__(self):
        if not self.left: raise StopIteration
        self.left -= 1
        return self.left
    next = __next__
"""
MARKED: Final = """
class {name}:
    def {method}(self, *args, **keywords): return args, keywords
"""


WITHIN: Final = """
class Node:
    left = 2
    def __iter__(self): return self
    def __next__(self):
        if not self.left: raise StopIteration
        self.left -= 1
        return self.left
class {name}(Node):
    pass
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torchdata.nodes.loader", "LoaderIterator"),
        ("grain._src.python.data_loader", "DataLoaderIterator"),
    ],
)
def test_of_loaders_that_are_chains_only_the_last_is_waited_for(
    program: Program, module: str, name: str
) -> None:
    program.write({module.replace(".", "/") + ".py": WITHIN.format(name=name)})
    source = f"from {module} import {name}, Node\nprint(list({name}()), list(Node()))"
    assert program.quietly(source) == "[1, 0] [1, 0]\n"
    assert event_names(program.events(), "data_wait") == [f"{module}.{name}"] * 3


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torchdata.stateful_dataloader.stateful_dataloader", "Iter"),
        ("keras.src.trainers.epoch_iterator", "EpochIterator"),
        ("mxnet.gluon.data.dataloader", "_MultiWorkerIter"),
        ("mxnet.io.io", "DataIter"),
        ("chainer.iterators.serial_iterator", "SerialIterator"),
        ("chainer.iterators.multiprocess_iterator", "MultiprocessIterator"),
        ("chainer.iterators.multithread_iterator", "MultithreadIterator"),
        ("nvidia.dali.plugin.pytorch", "DALIGenericIterator"),
        ("nvidia.dali.plugin.jax.iterator", "DALIGenericIterator"),
        ("ffcv.loader.epoch_iterator", "EpochIterator"),
    ],
)
def test_waits_for_iterators_of_each_framework_are_recorded(
    program: Program, module: str, name: str
) -> None:
    program.write({module.replace(".", "/") + ".py": ITERATOR.format(name=name)})
    source = f"from {module} import {name}\nprint(list({name}()), {name}().next())"
    assert program.quietly(source) == "[1, 0] 1\n"
    assert event_names(program.events(), "data_wait") == [f"{module}.{name}"] * 4
    assert numbers(program.events(), "data_wait") == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("module", "name", "method", "source"),
    [
        (
            "keras.src.callbacks.callback_list",
            "CallbackList",
            "on_train_batch_end",
            "keras.Model.fit",
        ),
        ("keras.callbacks", "CallbackList", "on_train_batch_end", "keras.Model.fit"),
        ("tf_keras.src.callbacks", "CallbackList", "on_train_batch_end", "keras.Model.fit"),
        ("mxnet.gluon.trainer", "Trainer", "step", "mxnet.gluon.Trainer.step"),
        ("mxnet.gluon.trainer", "Trainer", "update", "mxnet.gluon.Trainer.update"),
        ("cntk.train.trainer", "Trainer", "train_minibatch", "cntk.Trainer.train_minibatch"),
        ("mxnet.module.module", "Module", "update", "mxnet.mod.Module.update"),
        ("chainer.optimizer", "GradientMethod", "update", "chainer.GradientMethod.update"),
        (
            "chainer.training.updaters.standard_updater",
            "StandardUpdater",
            "update",
            "chainer.training.StandardUpdater",
        ),
        (
            "deepspeed.runtime.engine",
            "DeepSpeedEngine",
            "_take_model_step",
            "deepspeed.DeepSpeedEngine.step",
        ),
    ],
)
def test_steps_of_each_framework_are_recorded(
    program: Program, module: str, name: str, method: str, source: str
) -> None:
    path = module.replace(".", "/") + ".py"
    program.write({path: MARKED.format(name=name, method=method)})
    call = f"from {module} import {name}\nit = {name}()\nprint(it.{method}(1, a=2)); it.{method}()"
    assert program.quietly(call) == "((1,), {'a': 2})\n"
    assert event_names(program.events(), "step") == [source] * 2
    assert numbers(program.events(), "step") == [0, 1]


CHAINER: Final = {
    "chainer/optimizer.py": """
class GradientMethod:
    def update(self): pass
""",
    "chainer/training/updaters/standard_updater.py": """
class StandardUpdater:
    def __init__(self, optimizer): self.optimizer = optimizer
    def update(self): self.update_core()
    def update_core(self): self.optimizer.update()
""",
    "chainer/training/updaters/multiprocess_parallel_updater.py": """
import multiprocessing
from chainer.training.updaters.standard_updater import StandardUpdater
def scatter_params(link, array): return link
class _Worker(multiprocessing.Process):
    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe
    def run(self):
        while self.pipe.recv() == "update": scatter_params("a link", array=None)
class MultiprocessParallelUpdater(StandardUpdater):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.pipe, end = multiprocessing.Pipe()
        self.worker = _Worker(end)
        self.worker.start()
    def update_core(self):
        self.pipe.send("update")
        super().update_core()
    def finalize(self):
        self.pipe.send("finalize")
        self.worker.join()
""",
    "chainermn/optimizers.py": """
class _MultiNodeOptimizer:
    def __init__(self, optimizer): super().__setattr__("optimizer", optimizer)
    def __setattr__(self, name, value): setattr(self.optimizer, name, value)
    def update(self):
        if not hasattr(self.optimizer, "sent"): self.sent = True
        else: self.optimizer.update()
class _DoubleBufferingOptimizer(_MultiNodeOptimizer): pass
""",
}


@pytest.mark.parametrize("cls", ["_MultiNodeOptimizer", "_DoubleBufferingOptimizer"])
def test_what_a_multi_node_optimizer_does_is_one_step_though_the_first_sends_alone(
    program: Program, cls: str
) -> None:
    program.write(CHAINER)
    program.quietly(
        f"from chainer.optimizer import GradientMethod\nfrom chainermn.optimizers import {cls}\n"
        f"optimizer = {cls}(GradientMethod())\nfor _ in range(60): optimizer.update()\n"
    )
    assert event_names(program.events(), "step") == ["chainermn.MultiNodeOptimizer.update"] * 60
    assert numbers(program.events(), "step") == list(range(60))


def test_an_updater_counts_before_the_multi_node_optimizer_that_it_calls(program: Program) -> None:
    program.write(CHAINER)
    program.quietly(
        "from chainer.optimizer import GradientMethod\n"
        "from chainermn.optimizers import _MultiNodeOptimizer\n"
        "from chainer.training.updaters.standard_updater import StandardUpdater\n"
        "updater = StandardUpdater(_MultiNodeOptimizer(GradientMethod()))\n"
        "for _ in range(5): updater.update()\n"
    )
    assert event_names(program.events(), "step") == ["chainer.training.StandardUpdater"] * 5


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_process_of_a_multiprocess_updater_counts_its_own_steps(
    program: Program, method: str
) -> None:
    program.write(CHAINER)
    program.quietly(
        "import multiprocessing\n"
        "from chainer.optimizer import GradientMethod\n"
        "from chainer.training.updaters.multiprocess_parallel_updater import *\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        "    updater = MultiprocessParallelUpdater(GradientMethod())\n"
        "    for _ in range(7): updater.update()\n"
        "    updater.finalize()\n"
    )
    events = program.all_events()
    assert sorted(event_names(one, "step")[0] for one in events) == [
        "chainer.training.MultiprocessParallelUpdater",
        "chainer.training.StandardUpdater",
    ]
    assert [numbers(one, "step") for one in events] == [list(range(7))] * 2


@pytest.mark.parametrize(
    ("module", "cls", "method"),
    [
        ("mxnet.gluon.data.dataloader", "DataLoader", "__iter__"),
        ("keras.src.trainers.epoch_iterator", "EpochIterator", "enumerate_epoch"),
        ("keras.src.backend.jax.trainer", "JAXEpochIterator", "_get_iterator"),
    ],
)
def test_a_generator_stays_one_and_its_waits_are_recorded(
    program: Program, module: str, cls: str, method: str
) -> None:
    body = f"class {cls}:\n    def {method}(self):\n"
    body += "        try:\n            yield 1; yield 2\n        finally: print('closed')\n"
    program.write({module.replace(".", "/") + ".py": body})
    out = program.quietly(
        f"from {module} import {cls}\nprint(list({cls}().{method}()))\n"
        f"items = {cls}().{method}(); next(items); items.close(); print(type(items).__name__)\n"
    )
    assert out == "closed\n[1, 2]\nclosed\ngenerator\n"
    assert numbers(program.events(), "data_wait") == [0, 0, 1, 0]


CNTK_IO: Final = """
class MinibatchSource:
    def next_minibatch(self, size, input_map=None): return {"size": size, "map": input_map}
class UserMinibatchSource:
    def __init__(self): self.made = True
    def _next_minibatch(self, info_map, size): info_map.update(self.next_minibatch(size, 1, 0))
class MinibatchSourceFromData(UserMinibatchSource):
    def next_minibatch(self, size, number_of_workers=1, worker_rank=0): return {"size": size}
"""


def test_waits_for_cntk_s_sources_are_recorded_be_they_in_c_or_in_python(
    program: Program,
) -> None:
    program.write({"cntk/io/__init__.py": CNTK_IO})
    out = program.quietly(
        "from cntk import io\n"
        "class Own(io.UserMinibatchSource):\n"
        "    def next_minibatch(self, size, number_of_workers, worker_rank): return {}\n"
        "print(io.MinibatchSource().next_minibatch(2, input_map=3))\n"
        "for source in (io.MinibatchSourceFromData(), Own(), Own()):\n"
        "    batch = {}\n"
        "    source._next_minibatch(batch, 4)\n"
        "    print(source.made, batch)\n"
    )
    batches = ["{'size': 2, 'map': 3}", "True {'size': 4}", "True {}", "True {}"]
    assert out.splitlines() == batches
    sources = ["cntk.io.MinibatchSource", "cntk.io.MinibatchSourceFromData", *["__main__.Own"] * 2]
    assert event_names(program.events(), "data_wait") == sources


TENSORFLOW: Final = {
    "tensorflow/python/framework/ops.py": """
class Graph: pass
class FuncGraph(Graph):
    building_function = True
    def __init__(self): self.outer_graph = stack[-1]
class WhileBodyFuncGraph(FuncGraph): pass
stack = [Graph()]
def get_default_graph(): return stack[-1]
""",
    "tensorflow/python/eager/context.py": """
from tensorflow.python.framework import ops
def executing_eagerly(): return len(ops.stack) == 1
""",
    "tensorflow/python/eager/polymorphic_function/concrete_function.py": """
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
class ConcreteFunction:
    def __init__(self, body, graph=ops.FuncGraph):
        self.graph = graph()
        ops.stack.append(self.graph)
        body()
        ops.stack.pop()
    def _call_flat(self, *args): return args
    def __call__(self, *args): return self._call_flat(*args)
""",
    "tensorflow/python/data/ops/iterator_ops.py": """
class OwnedIterator:
    def __init__(self): self.left = 2
    def __iter__(self): return self
    def __next__(self):
        if not self.left: raise StopIteration
        return self.get_next()
    def get_next(self, name=None):
        self.left -= 1
        return self.left
""",
    "keras/src/backend/tensorflow/optimizer.py": """
class BaseOptimizer:
    def apply(self, grads): return grads
class TFOptimizer(BaseOptimizer): pass
""",
    "keras/src/optimizers/optimizer.py": """
class _BaseOptimizer:
    def apply_gradients(self, grads): return grads
class Optimizer(_BaseOptimizer):
    def apply_gradients(self, grads): return super().apply_gradients(grads)
""",
}
FUNCTIONS: Final = """
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework.ops import WhileBodyFuncGraph
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from keras.src.backend.tensorflow.optimizer import TFOptimizer
optimizer, data = TFOptimizer(), OwnedIterator()
def update(): optimizer.apply([])
"""


@pytest.fixture
def tensorflow(program: Program) -> Program:
    """With modules that have the names of TensorFlow's, and graphs that nest as its do."""
    program.write(TENSORFLOW)
    return program


def test_a_call_of_a_tensorflow_function_is_a_step_if_an_optimizer_works_in_it(
    tensorflow: Program,
) -> None:
    out = tensorflow.quietly(
        FUNCTIONS + "train, check = ConcreteFunction(update), ConcreteFunction(lambda: None)\n"
        "for _ in range(3): print(train('batch'), check()); check()\n"
    )
    assert out == "('batch',) ()\n" * 3
    assert event_names(tensorflow.events(), "step") == ["tf.function"] * 3


def test_of_tensorflow_functions_within_functions_the_one_that_is_called_counts(
    tensorflow: Program,
) -> None:
    tensorflow.quietly(
        FUNCTIONS + "parts = []\n"
        "def body():\n    parts.append(ConcreteFunction(update)); parts[0]()\n"
        "outer = ConcreteFunction(body)\n"
        "outer(); outer(); parts[0]()\n"
    )
    assert numbers(tensorflow.events(), "step") == [0, 1, 2]


def test_a_tensorflow_function_that_trains_in_a_loop_tells_no_steps(tensorflow: Program) -> None:
    tensorflow.quietly(
        FUNCTIONS
        + "loop = ConcreteFunction(lambda: ConcreteFunction(update, WhileBodyFuncGraph))\n"
        "loop(); loop(); next(data)\n"
    )
    assert numbers(tensorflow.events(), "step") == []


@pytest.mark.parametrize(
    ("module", "cls", "method"),
    [
        ("keras.src.backend.tensorflow.optimizer", "TFOptimizer", "apply"),
        ("keras.src.optimizers.optimizer", "Optimizer", "apply_gradients"),
    ],
)
def test_an_optimizer_outside_of_tensorflows_graphs_makes_a_step_at_once(
    tensorflow: Program, module: str, cls: str, method: str
) -> None:
    out = tensorflow.quietly(
        f"{FUNCTIONS}from {module} import {cls} as Kind\nother = Kind()\n"
        f"for _ in range(2): print(other.{method}('grads'))\n"
    )
    assert out == "grads\n" * 2
    assert event_names(tensorflow.events(), "step") == ["tf.keras.optimizers.Optimizer"] * 2


def test_waits_outside_of_tensorflows_graphs_are_recorded(tensorflow: Program) -> None:
    out = tensorflow.quietly(
        FUNCTIONS + "read, train = ConcreteFunction(data.get_next), ConcreteFunction(update)\n"
        "data.left += 1\n"
        "for item in data: print(item); train()\n"
        "data.left = 1; print(data.get_next(name='n')); read()\n"
    )
    assert out == "1\n0\n0\n"
    name = "tensorflow.python.data.ops.iterator_ops.OwnedIterator"
    assert event_names(tensorflow.events(), "data_wait") == [name] * 4
    assert numbers(tensorflow.events(), "data_wait") == [0, 0, 1, 0]
    assert event_names(tensorflow.events(), "note") == []


def test_no_wait_is_told_where_the_steps_take_their_batches_inside_the_graph(
    tensorflow: Program,
) -> None:
    tensorflow.quietly(
        FUNCTIONS + "next(data)\n"
        "train = ConcreteFunction(lambda: (data.get_next(), update()))\n"
        "for _ in range(3): train()\n"
    )
    events = tensorflow.events()
    assert numbers(events, "step") == [0, 1, 2]
    assert numbers(events, "data_wait") == []
    assert event_names(events, "note") == [
        "TensorFlow takes the batches inside its graph: waits for them are not recorded"
    ]


TENSORPACK: Final = {
    "tensorpack/callbacks/group.py": """
class Callbacks:
    def __init__(self, *calls): self.calls = calls
    def trigger_step(self):
        for call in self.calls: call()
""",
    "tensorpack/input_source/input_source.py": """
class FeedInput:
    class _FeedCallback:
        def _before_run(self, context): return context
class EnqueueThread:
    def run(self): return "ran"
""",
}
FED: Final = """
from tensorpack.callbacks.group import Callbacks
from tensorpack.input_source.input_source import EnqueueThread, FeedInput
feed = FeedInput._FeedCallback()
"""


def test_steps_of_tensorpack_count_even_if_a_callback_ends_the_training(program: Program) -> None:
    program.write(TENSORPACK)
    program.quietly(
        FED + "steps = iter('ab')\ncallbacks = Callbacks(lambda: next(steps))\n"
        "try:\n    while True: callbacks.trigger_step()\nexcept StopIteration: pass\n"
    )
    assert event_names(program.events(), "step") == ["tensorpack.Trainer.run_step"] * 3


@pytest.mark.parametrize(("queue", "waits"), [("", 2), ("print(EnqueueThread().run());", 0)])
def test_waits_of_tensorpack_are_told_unless_a_queue_feeds_the_steps(
    program: Program, queue: str, waits: int
) -> None:
    program.write(TENSORPACK)
    out = program.quietly(FED + queue + "print(feed._before_run(1), feed._before_run(2))")
    assert out == "ran\n" * bool(queue) + "1 2\n"
    assert len(program.events().records["data_wait"]) == waits


def test_a_step_annotation_of_jax_is_a_step(program: Program) -> None:
    program.write(
        {
            "jax/_src/profiler.py": """
class TraceAnnotation:
    def __enter__(self): return self
    def __exit__(self, *error): return None
class StepTraceAnnotation(TraceAnnotation): pass
"""
        }
    )
    program.quietly(
        "from jax._src.profiler import StepTraceAnnotation, TraceAnnotation\n"
        "for _ in range(3):\n    with StepTraceAnnotation(), TraceAnnotation(): pass\n"
    )
    assert event_names(program.events(), "step") == ["jax.profiler.StepTraceAnnotation"] * 3


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("for _ in range(4): gputrace.step()", 4),
        ("for _ in range(4):\n with gputrace.step(): pass", 4),
        ("for _ in range(2):\n with gputrace.step(): pass\ngputrace.step()", 3),
        ("gputrace.step()\nfor _ in range(2):\n with gputrace.step(): pass", 3),
        ("for _ in range(2):\n with gputrace.step(): continue", 2),
        ("try:\n with gputrace.step(): 1 / 0\nexcept ArithmeticError: pass\ngputrace.step()", 1),
    ],
)
def test_a_step_ends_where_the_user_marks_it_or_with_its_block(
    body: str, count: int, program: Program
) -> None:
    program.quietly(f"import gputrace\n{body}")
    assert event_names(program.events(), "step") == ["gputrace.step"] * count


def test_a_block_of_a_step_does_nothing_where_nothing_is_recorded(program: Program) -> None:
    source = "import gputrace\nwith gputrace.step(): pass\ngputrace.step()"
    program.quietly(source, hooked=False)
    assert program.files() == []


def test_what_the_user_marks_goes_before_a_loop_and_that_before_an_optimizer(
    torch: Program,
) -> None:
    path = "deepspeed/runtime/engine.py"
    torch.write({path: MARKED.format(name="DeepSpeedEngine", method="_take_model_step")})
    loop = "from deepspeed.runtime.engine import DeepSpeedEngine\n"
    loop += "optimizer, engine = Optimizer(), DeepSpeedEngine()\n"
    loop += "for _ in range(2): optimizer.step(); optimizer.step(); engine._take_model_step()\n"
    torch.quietly(LOOP + loop)
    torch.quietly(f"{LOOP}{loop}from gputrace.marks import step\nstep()")
    by_source = {
        event_names(events, "step")[0]: numbers(events, "step") for events in torch.all_events()
    }
    assert by_source == {"deepspeed.DeepSpeedEngine.step": [0, 1], "gputrace.step": [0]}


def test_a_wait_within_a_wait_counts_once(torch: Program) -> None:
    torch.quietly(
        LOOP + "inner = _BaseDataLoaderIter('abc')\n"
        "class Outer(_BaseDataLoaderIter):\n    pass\n"
        "print(list(Outer(inner)))\n"
    )
    assert numbers(torch.events(), "data_wait") == [0, 0, 0, 1]


# ---- the program's own marks ----


def test_annotations_are_recorded_in_with_and_as_decorator(program: Program) -> None:
    program.quietly(
        "from gputrace.marks import annotate, step\n"
        "@annotate('half')\n"
        "def half(n):\n    'Doc.'\n    return half(n // 2) if n else 'end'\n"
        "assert (half(2), half.__name__, half.__doc__) == ('end', 'half', 'Doc.')\n"
        "again = annotate('again')\n"
        "with again, again: pass\n"
        "try:\n    with annotate('fails'): raise KeyError\nexcept KeyError: pass\n"
        "step(); step()\n"
    )
    events = program.events()
    assert sorted(event_names(events, "annotation")) == ["again"] * 2 + ["fails"] + ["half"] * 3
    assert event_names(events, "step") == ["gputrace.step"] * 2
    assert (events.records["annotation"]["start"] <= events.records["annotation"]["end"]).all()


def test_marks_work_where_the_program_takes_no_sitecustomize(program: Program) -> None:
    program.quietly("from gputrace.marks import step\nstep()", "-S")
    assert numbers(program.events(), "step") == [0]


def test_marks_do_nothing_and_cost_nothing_where_nothing_is_recorded(program: Program) -> None:
    out = program.quietly(
        "import sys, timeit\n"
        "from gputrace.marks import annotate, step\n"
        "def f(): pass\n"
        "assert annotate('f')(f) is f\n"
        "with annotate('a'): step()\n"
        "assert not any('_gputrace_hooks' in name for name in sys.modules)\n"
        "print(min(timeit.repeat(step, number=10000, repeat=5)) / 10000)\n",
        hooked=False,
    )
    assert float(out) < 1e-6


# ---- windows, and other users of CUPTI ----

LIBRARY: Final = """
#include <stdio.h>
#include <stdlib.h>
static void tell(const char *what, int on) {
    FILE *log = fopen(getenv("CALLS"), "a");
    fprintf(log, "%s %d\\n", what, on);
    fclose(log);
}
void gputrace_pause(int on) { tell("pause", on); }
void gputrace_capture(int on) { tell("capture", on); }
int steps;
void gputrace_step(void) { steps++; }
int gputrace_keep_cupti(void) { return getenv("KEEPS") ? 0 : -1; }
"""
LOAD: Final = """
import ctypes, os
def load(): ctypes.CDLL(os.environ["GPUTRACE_LIBRARY"])
def calls():
    path = os.environ["CALLS"]
    return ",".join(open(path).read().splitlines()) if os.path.exists(path) else "none"
"""


@pytest.fixture
def library(program: Program) -> dict[str, str]:
    """A library with the collector's functions that writes down the calls; what to set for it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here")
    source, built = program.folder / "library.c", program.folder / "library.so"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source], check=True)
    return {"GPUTRACE_LIBRARY": str(built), "CALLS": str(program.folder / "calls")}


def calls(library: Mapping[str, str]) -> list[str]:
    path = Path(library["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def test_a_window_of_steps_is_captured_from_its_first_step_to_its_last(
    torch: Program, library: dict[str, str]
) -> None:
    out = torch.quietly(
        LOOP + LOAD + "load(); optimizer = Optimizer()\n"
        "for i in range(6): print(i, calls()); optimizer.step()\n",
        GPUTRACE_STEPS="2:4",
        **library,
    )
    on, off = "capture 1", "capture 1,capture 0"
    assert out.splitlines() == ["0 none", "1 none", f"2 {on}", f"3 {on}", f"4 {off}", f"5 {off}"]
    assert event_names(torch.events(), "note") == [
        "recording from step 2",
        "recorded to the end of step 3",
    ]


def test_the_collector_is_told_of_each_step_once_it_is_loaded(
    torch: Program, library: dict[str, str]
) -> None:
    """It is looked for when the hooks write: each second."""
    out = torch.quietly(
        LOOP + LOAD + "import time\noptimizer = Optimizer()\n"
        "library = os.environ['GPUTRACE_LIBRARY']\n"
        "def steps(): return ctypes.c_int.in_dll(ctypes.CDLL(library), 'steps').value\n"
        "load(); optimizer.step(); time.sleep(1.2); optimizer.step(); before = steps()\n"
        "for i in range(5): optimizer.step()\n"
        "print(steps() - before)\n",
        **library,
    )
    assert out == "5\n"


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("2:10", ". . + . . . + . . . . ."),
        ("1:", ". + . . . + . . . + . ."),
    ],
)
def test_windows_come_again_with_a_step_before_each(
    torch: Program, library: dict[str, str], window: str, expected: str
) -> None:
    """One step (+) of each four: the one before it is captured too, as the gap between is its."""
    out = torch.quietly(
        LOOP + LOAD + "load(); optimizer = Optimizer()\n"
        "for i in range(12): print(calls().split(',')[-1]); optimizer.step()\n",
        GPUTRACE_STEPS=window,
        GPUTRACE_EVERY="4:1",
        **library,
    )
    on = [line == "capture 1" for line in out.splitlines()]
    wanted = [step == "+" for step in expected.split()]
    first = wanted.index(True)
    before = [number + 1 < 12 and number >= first and wanted[number + 1] for number in range(12)]
    assert on == [a or b for a, b in zip(wanted, before, strict=True)]
    assert event_names(torch.events(), "note") == []


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("0:2", ["capture 1", "capture 0"]),
        (":2", ["capture 1", "capture 0"]),
        ("2:", ["capture 1"]),
        ("9:10", []),
    ],
)
def test_a_library_that_is_loaded_late_gets_the_calls_it_missed(
    torch: Program, library: dict[str, str], window: str, expected: list[str]
) -> None:
    torch.quietly(
        LOOP + LOAD + "import time\noptimizer = Optimizer()\n"
        "for item in _BaseDataLoaderIter(range(6), 0.11):\n"
        "    if item == 0: load()\n"
        "    optimizer.step()\n",
        GPUTRACE_STEPS=window,
        **library,
    )
    assert calls(library) == expected


DRIVER: Final = """
#include <stdio.h>
#include <stdlib.h>
static int ready;
static int tell(const char *what) {
    FILE *log = fopen(getenv("CALLS"), "a");
    fprintf(log, "%s\\n", what);
    fclose(log);
    return 0;
}
void start_cuda(void) { ready = 1; }
int cuProfilerStart(void) { return ready ? tell("start") : 201; }
int cuCtxSynchronize(void) { return tell("synchronize"); }
int cuProfilerStop(void) { return tell("stop"); }
"""


@pytest.fixture
def driver(program: Program) -> dict[str, str]:
    """A libcuda that writes down the calls; what to set for a recorder that follows them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here")
    source, built = program.folder / "driver.c", program.folder / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source], check=True)
    return {
        "GPUTRACE_PROFILER_API": "1",
        "CALLS": str(program.folder / "calls"),
        "LD_LIBRARY_PATH": str(program.folder),
    }


WITH_DRIVER: Final = """
import ctypes, os
def calls():
    path = os.environ["CALLS"]
    return ",".join(open(path).read().splitlines()) if os.path.exists(path) else "none"
def load(): ctypes.CDLL("libcuda.so.1").start_cuda()
"""


def test_other_recorders_follow_the_steps_through_cuda_s_profiler_api(
    torch: Program, driver: dict[str, str]
) -> None:
    out = torch.quietly(
        LOOP + WITH_DRIVER + "load(); optimizer = Optimizer()\n"
        "for i in range(4): print(i, calls()); optimizer.step()\n",
        GPUTRACE_STEPS="1:3",
        **driver,
    )
    assert out.splitlines() == ["0 none", "1 start", "2 start", "3 start,synchronize,stop"]


def test_a_window_from_the_first_step_waits_for_cuda(
    torch: Program, driver: dict[str, str]
) -> None:
    torch.quietly(
        LOOP + WITH_DRIVER + "optimizer = Optimizer(); ctypes.CDLL('libcuda.so.1')\n"
        "for item in _BaseDataLoaderIter(range(6), 0.3):\n"
        "    if item == 2: load()\n"
        "    optimizer.step()\n",
        GPUTRACE_STEPS="0:6",
        **driver,
    )
    assert calls(driver) == ["start", "synchronize", "stop"]


def test_each_rank_ends_its_window_by_itself(torch: Program, driver: dict[str, str]) -> None:
    script = LOOP + WITH_DRIVER + "load(); optimizer = Optimizer()\n"
    script += "for i in range(3): optimizer.step()\n"
    ranks = {"LOCAL_WORLD_SIZE": "2", "GPUTRACE_STEPS": "1:2"}
    torch.quietly(script, **ranks, **driver)
    assert calls(driver) == ["start", "synchronize", "stop"]


def test_pthread_ids_are_told_once_where_they_are_asked_for(torch: Program) -> None:
    script = LOOP + "import threading; optimizer = Optimizer()\n"
    script += "for i in range(3): optimizer.step()\n"
    script += "print(threading.get_native_id(), threading.get_ident())"
    out = torch.quietly(script, GPUTRACE_PTHREADS="1")
    thread, pthread = out.split()
    told = {key: value for key, value in torch.events().info.items() if "pthread" in key}
    assert told == {f"pthread.{thread}": pthread}


def test_a_program_without_cuda_is_not_asked(torch: Program, driver: dict[str, str]) -> None:
    torch.quietly(
        LOOP + "optimizer = Optimizer()\nfor i in range(3): optimizer.step()\n",
        GPUTRACE_STEPS="1:2",
        **driver,
    )
    assert calls(driver) == []


def test_a_window_that_names_no_steps_is_said_and_harms_nothing(torch: Program) -> None:
    torch.quietly(LOOP + "Optimizer().step()", GPUTRACE_STEPS="early")
    assert event_names(torch.events(), "note") == ["GPUTRACE_STEPS=early names no steps"]


@pytest.mark.parametrize(
    ("activities", "expected"),
    [("{'ProfilerActivity.CUDA'}", ["pause 1", "pause 0"]), ("{'ProfilerActivity.CPU'}", [])],
)
def test_the_collector_makes_way_while_torch_profiler_records_the_gpu(
    torch: Program, library: dict[str, str], activities: str, expected: list[str]
) -> None:
    body = f"enabled, kineto_activities = True, {activities}\n"
    body += "    def __enter__(self): self._prepare_trace(); return self\n"
    body += "    def _prepare_trace(self): print('prepares', self.calls())\n"
    body += "    def __exit__(self, *error): print('stops', self.calls())\n"
    torch.write({"torch/autograd/profiler.py": f"class profile:\n    {body}"})
    out = torch.quietly(
        LOAD + "load()\nfrom torch.autograd.profiler import profile\n"
        "profile.calls = staticmethod(calls)\n"
        "try:\n    with profile(): print('inside'); raise KeyError\nexcept KeyError: pass\n",
        **library,
    )
    seen = "pause 1" if expected else "none"
    assert out == f"prepares {seen}\ninside\nstops {seen}\n"
    assert calls(library) == expected
    if expected:
        begun, ended = event_names(torch.events(), "note")
        assert "torch.profiler records it" in begun
        assert "recorded again" in ended
    else:
        assert not torch.files()


@pytest.mark.parametrize(
    ("module", "begin", "end"),
    [
        ("tensorflow.python.profiler.profiler_v2", "start", "stop"),
        ("jax._src.profiler", "start_trace", "stop_trace"),
    ],
)
def test_the_collector_makes_way_for_other_profilers_too(
    program: Program, library: dict[str, str], module: str, begin: str, end: str
) -> None:
    body = f"def {begin}(where):\n    if not where: raise ValueError\ndef {end}(): pass\n"
    program.write({module.replace(".", "/") + ".py": body})
    program.quietly(
        f"{LOAD}load()\nimport {module} as profiler\n"
        f"try: profiler.{begin}('')\nexcept ValueError: pass\n"
        f"for i in range(2): profiler.{begin}('there'); profiler.{end}()\n",
        **library,
    )
    # One that ran does not leave a CUPTI that a program with XLA's graphs survives.
    assert calls(library) == ["pause 1", "pause 0", "pause 1"]
    *_, last = event_names(program.events(), "note")
    assert "is not recorded after" in last


def test_a_profiler_that_would_crash_the_program_s_graphs_gets_no_cupti(
    program: Program, library: dict[str, str]
) -> None:
    body = "def start_trace(where): print('starts')\ndef stop_trace(): print('stops')\n"
    program.write({"jax/_src/profiler.py": body})
    out = program.quietly(
        f"{LOAD}load()\nfrom jax._src import profiler\n"
        "profiler.start_trace('there')\nprofiler.stop_trace()\n",
        KEEPS="1",
        **library,
    )
    assert out == "starts\nstops\n"
    assert calls(library) == []
    (note,) = event_names(program.events(), "note")
    assert note.startswith("JAX's profiler sees nothing of the GPU: gputrace records it")


@pytest.mark.parametrize(
    "module", ["torch.profiler._cupti_monitor", "torch.profiler._cupti.monitor"]
)
def test_the_collector_makes_way_while_torch_s_monitor_runs(
    program: Program, library: dict[str, str], module: str
) -> None:
    body = "class CuptiMonitor:\n    def start(self): pass\n    def stop(self): pass\n"
    program.write({module.replace(".", "/") + ".py": body})
    program.quietly(
        f"{LOAD}load()\nfrom {module} import CuptiMonitor\nmonitor = CuptiMonitor()\n"
        "monitor.start(); assert calls() == 'pause 1'; monitor.stop(); monitor.stop()\n",
        **library,
    )
    assert calls(library) == ["pause 1", "pause 0"]
    assert "torch's CUPTI monitor records it" in event_names(program.events(), "note")[0]


# ---- the program is left as it is ----


def test_programs_that_train_nothing_leave_no_file_and_load_little(program: Program) -> None:
    out = program.quietly(
        "import sys; print(*sorted(m for m in sys.modules if '_gputrace_hooks' in m))"
    )
    assert out.split() == ["_gputrace_hooks", "_gputrace_hooks.imports"]
    assert not program.files()


@pytest.mark.parametrize("option", ["-S", "-E", "-I"])
def test_a_program_that_wants_no_environment_or_site_is_untouched(
    torch: Program, option: str
) -> None:
    find = f"import sys; sys.path.insert(0, {str(torch.modules)!r})\n"
    hooked = "print([m for m in sys.modules if '_gputrace_hooks' in m], len(sys.meta_path))\n"
    source = find + LOOP + "Optimizer().step()\n" + hooked
    out = torch.quietly(source, option)
    assert out == torch.quietly(source, option, hooked=False)
    assert out.startswith("[]")
    assert not torch.files()


@pytest.mark.parametrize("folder", ["", "/nowhere/at/all", __file__])
def test_without_a_folder_to_write_to_nothing_is_hooked(torch: Program, folder: str) -> None:
    source = (
        LOOP
        + "Optimizer().step()\nimport sys\nprint(any('_gputrace_hooks' in m for m in sys.modules))"
    )
    assert torch.quietly(source, GPUTRACE_DIR=folder) == "False\n"


OWN_SITE: Final = {
    "works": "import sys; sys.own_site = __name__, __file__\n",
    "fails": "raise ValueError('of the user')\n",
    "lacks": "import not_there_at_all\n",
    "exits": "raise SystemExit(3)\n",
}


@pytest.mark.parametrize("kind", OWN_SITE)
def test_the_sitecustomize_of_the_user_does_what_it_did(torch: Program, kind: str) -> None:
    torch.write({"sitecustomize.py": OWN_SITE[kind]})
    source = LOOP + "import sys, sitecustomize\nOptimizer().step()\n"
    source += "print(getattr(sys, 'own_site', None), sitecustomize.__file__)\n"
    if kind in ("fails", "lacks"):
        source = source.replace(", sitecustomize\n", "\n").replace(", sitecustomize.__file__", "")
    hooked, plain = torch.run(source), torch.run(source, hooked=False)
    assert hooked[:2] == plain[:2]
    # What ends the interpreter's start shows the lines of all who took part in it.
    assert hooked.err == plain.err or (kind == "exits" and "SystemExit: 3" in hooked.err)
    assert len(torch.files()) == (kind != "exits")


def test_a_program_may_look_for_a_sitecustomize_that_it_lacks(torch: Program) -> None:
    source = "for again in range(2):\n    try: import sitecustomize\n"
    source += "    except ModuleNotFoundError as error: print(error, error.name)\n"
    source += LOOP + "print(Optimizer().step())\n"
    assert torch.quietly(source) == torch.quietly(source, hooked=False)
    assert numbers(torch.events(), "step") == [0]


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(7)",
        "os._exit(8)",
        "sys.exit('a message')",
        "raise ValueError('of the program')",
        "os.kill(os.getpid(), 15)",
        "os.kill(os.getpid(), 6)",
        "import warnings; warnings.warn('odd')",
        "os.execv(sys.executable, [sys.executable, '-c', 'print(5)'])",
    ],
)
def test_exit_code_output_and_errors_are_those_without_hooks(torch: Program, ending: str) -> None:
    source = LOOP + "import os, sys\nprint(list(_BaseDataLoaderIter('ab')), flush=True)\n"
    source += f"Optimizer().step()\nprint('to stderr', file=sys.stderr, flush=True)\n{ending}\n"
    assert torch.run(source) == torch.run(source, hooked=False)
    assert numbers(torch.events(), "step") == [0]


def test_forking_warns_of_no_thread_and_exceptions_pass_through(torch: Program) -> None:
    source = LOOP + "import os\nOptimizer().step()\n"
    source += "pid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)\n"
    source += "def items():\n    yield 1\n    raise OSError('disk')\n"
    source += "it = _BaseDataLoaderIter(items())\nnext(it)\n"
    source += "try: next(it)\nexcept OSError as error: print(error)\n"
    assert torch.quietly(source, "-W", "error") == "disk\n"
    assert numbers(torch.events(), "data_wait") == [0, 1]


def test_looking_for_a_module_does_not_import_it(torch: Program) -> None:
    out = torch.quietly(
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('torch.utils.data.dataloader')\n"
        "print(spec.name in sys.modules, 'class' in spec.loader.get_source(spec.name))\n"
        "import inspect, importlib, torch.optim.optimizer as module\n"
        "print(inspect.getsource(module.Optimizer).startswith('class Optimizer'))\n"
        "importlib.reload(module).Optimizer().step()\n"
    )
    assert out == "False True\nTrue\n"
    assert numbers(torch.events(), "step") == [0]


def test_a_hook_that_fails_leaves_a_line_and_the_program_alone(torch: Program) -> None:
    torch.write(
        {
            "torch/optim/optimizer.py": "def register_optimizer_step_post_hook(hook): "
            "raise RuntimeError('not today')\nclass Optimizer:\n    def step(self): pass\n"
        }
    )
    torch.quietly(LOOP + "Optimizer().step(); print(list(_BaseDataLoaderIter('a')))")
    [line] = event_names(torch.events(), "note")
    assert "torch.optim.optimizer" in line
    assert "not today" in line
    assert numbers(torch.events(), "data_wait") == [0, 1]


def test_a_full_disk_stops_the_recording_and_not_the_program(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import resource, sys, time\nsys.dont_write_bytecode = True\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "optimizer = Optimizer()\n"
        "for _ in range(4000): optimizer.step(); time.sleep(0.0002)\n"
        "print('done')\n"
    )
    assert out == "done\n"
    events = torch.events()
    assert events.whole
    assert 0 < len(events.records["step"]) < 100
    # All that could not be written is counted, in the place that was kept for it.
    assert events.stopped is not None
    at, lost, why = events.stopped
    assert lost + len(events.records["step"]) >= 4000  # with counters
    assert why == "nothing more could be written: File too large"
    assert events.records["step"]["end"][-1] < at < time.time_ns()
    assert events.info["python"]
    merged = merge(torch.spool, torch.folder / "t.sqlite", {"backend": "host"})
    assert merged.notes == (
        f"process {events.pid}, {why}; all after {(at - events.started) / 1e9:.1f} s is missing",
    )
    with closing(sqlite3.connect(torch.folder / "t.sqlite")) as database:
        found = database.execute("SELECT records, reason FROM GPUTRACE_LOSS").fetchall()
    assert found == [(lost, why)]


def test_a_disk_that_is_full_from_the_start_leaves_an_empty_file(torch: Program) -> None:
    out = torch.quietly(
        "import resource, sys\nsys.dont_write_bytecode = True\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        + LOOP
        + "optimizer = Optimizer()\nfor _ in range(9): optimizer.step()\nprint('done')\n"
    )
    assert out == "done\n"
    (path,) = torch.spool.iterdir()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("called", ["os.fstat", "ctypes.CDLL"])
def test_what_a_handler_raises_reaches_the_program_from_within_the_hooks(
    program: Program, called: str
) -> None:
    """TimeoutError, which handlers of alarms raise, is an OSError, as are our own with files."""
    out = program.quietly(
        "import ctypes, os, signal, time, gputrace\n"
        "def handler(*_): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        f"called = {called}\n"
        "def interrupted(*given, **named):\n"
        "    signal.raise_signal(signal.SIGALRM); return called(*given, **named)\n"
        "os.environ['GPUTRACE_LIBRARY'] = 'none.so'\n"
        f"gputrace.step(); {called} = interrupted\n"
        "try: time.sleep(0.3); gputrace.step()\n"
        "except TimeoutError: print('too late')\n"
        f"{called} = called; gputrace.step()\n"
    )
    assert out == "too late\n"
    assert numbers(program.events(), "step") == [0, 1, 2]


RAISERS: Final = """
import functools, os, signal
from _gputrace_hooks.host_file import is_handlers

def plain(number, frame): raise OSError
def rest(*_): raise OSError
def named(number, frame, *, hard=True, **more): raise OSError
def deep(number, frame): os.stat("/none/such")
def leading(what, number, frame): raise OSError
def gone(number, frame):
    del number, frame
    raise OSError
def passing(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise OSError

class Handler:
    def __call__(self, number, frame): raise OSError
    def method(self, number, frame): raise OSError
    @classmethod
    def of_class(cls, number, frame): raise OSError

def library(path, frame=None): return os.fsdecode(path)

def is_seen(handler, argument):
    signal.signal(signal.SIGUSR1, handler)
    try:
        # Python runs the handler within the library.
        before = os.fsdecode
        os.fsdecode = lambda path: os.kill(os.getpid(), signal.SIGUSR1) or before(path)
        try:
            library(argument)
        finally:
            os.fsdecode = before
    except Exception as error:
        return is_handlers(error)

handlers = [plain, rest, named, deep, functools.partial(leading, "x"), Handler(), Handler().method,
            Handler.of_class, lambda number, frame: plain(number, frame), gone, passing]
print(*(is_seen(handler, "x") for handler in handlers))
print(is_seen(signal.SIG_IGN, 1), is_seen(lambda *_: None, 1))
"""


def test_errors_of_handlers_and_of_libraries_are_told_apart(program: Program) -> None:
    """A handler is a program's, however it is made; what a library raises in a hook is not."""
    handlers, libraries = program.quietly(RAISERS).splitlines()
    assert handlers.split() == ["True"] * 11
    assert libraries.split() == ["False"] * 2


def test_a_program_that_closes_all_files_keeps_its_own_to_itself(torch: Program) -> None:
    torch.quietly(
        LOOP + "import os\noptimizer = Optimizer(); optimizer.step()\n"
        "os.closerange(3, 300)\n"
        "fd = os.open('own', os.O_WRONLY | os.O_CREAT); os.dup2(fd, 200)\n"
        "for _ in range(20): optimizer.step()\n"
    )
    assert (torch.folder / "own").read_bytes() == b""
    assert numbers(torch.events(), "step") == list(range(21))


# ---- processes ----


def test_a_forked_worker_leaves_the_file_to_its_parent(torch: Program) -> None:
    torch.quietly(
        LOOP + "import os, time\noptimizer = Optimizer()\n"
        "for _ in range(30): optimizer.step()\n"
        "pid = os.fork()\nif not pid: time.sleep(0.01); raise SystemExit\nos.waitpid(pid, 0)\n"
        "optimizer.step()\n"
    )
    assert numbers(torch.events(), "step") == list(range(31))


def test_a_forked_child_that_trains_writes_a_file_of_its_own(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import os, time, _thread\noptimizer = Optimizer()\n"
        "for _ in range(30): optimizer.step()\n"
        "pid = os.fork()\n"
        "for _ in range(10 if pid else 20): optimizer.step()\n"
        "if pid: os.waitpid(pid, 0)\n"
        "print(os.getpid(), flush=True)\n"
    )
    by_pid = {events.pid: events.records["step"] for events in torch.all_events()}
    child, parent = map(int, out.split())
    assert {pid: len(steps) for pid, steps in by_pid.items()} == {parent: 40, child: 20}
    assert by_pid[child]["number"].tolist() == list(range(20))
    assert set(by_pid[child]["thread"]) == {child}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing_lose_nothing_at_their_end(
    torch: Program, method: str
) -> None:
    torch.quietly(
        LOOP + "import multiprocessing\n"
        "def train():\n"
        "    optimizer = Optimizer()\n"
        "    for _ in range(50): optimizer.step()\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    workers = [context.Process(target=train) for _ in range(2)]\n"
        "    for worker in workers: worker.start()\n"
        "    for worker in workers: worker.join()\n"
    )
    assert [numbers(events, "step") for events in torch.all_events()] == [list(range(50))] * 2


def test_threads_record_side_by_side_under_their_own_ids(torch: Program) -> None:
    out = torch.quietly(
        LOOP + "import threading\n"
        "def read():\n"
        "    print(threading.get_native_id(), flush=True)\n"
        "    for _ in _BaseDataLoaderIter(range(2000)): pass\n"
        "threads = [threading.Thread(target=read) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
    )
    waits = torch.events().records["data_wait"]
    ids, counts = np.unique(waits["thread"], return_counts=True)
    assert set(ids) <= set(map(int, out.split()))
    assert counts.sum() == 4 * 2001


@pytest.mark.parametrize("pause", [0, 0.003, 0.3])
def test_sigkill_loses_a_second_at_most(torch: Program, pause: float) -> None:
    process = torch.start(
        LOOP + "import time\noptimizer = Optimizer()\n"
        "optimizer.step(); print('ready', flush=True)\n"
        f"for item in _BaseDataLoaderIter(iter(int, 1), {pause}): optimizer.step()\n"
    )
    with process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(1.2)
        killed = time.time_ns()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    events = torch.events()
    assert killed - SECOND < events.records["step"]["end"].max() < killed + SECOND
    assert numbers(events, "step") == list(range(len(events.records["step"])))


def test_a_wait_leaves_writing_to_the_end_of_its_step(torch: Program) -> None:
    """Writing gives Python's lock away: within a wait that the program clocks it would count."""
    out = torch.quietly(
        LOOP + "import os, time\nwritten, at = [], ['step']\n"
        "write, stat = os.write, os.fstat\n"
        "def noted(function): return lambda *a: (written.append(at[0]), function(*a))[1]\n"
        "optimizer, items = Optimizer(), iter(_BaseDataLoaderIter(range(12)))\n"
        "os.write, os.fstat = noted(write), noted(stat)\n"
        "for _ in range(12):\n"
        "    at[0] = 'wait'; next(items); at[0] = 'step'; time.sleep(0.15); optimizer.step()\n"
        "os.write, os.fstat = write, stat\n"
        "print(written.count('wait'), written.count('step') > 4)\n"
    )
    assert out.split() == ["0", "True"]


def test_what_came_before_a_long_silence_is_there_after_sigkill(torch: Program) -> None:
    with torch.start(
        LOOP + "import time\noptimizer = Optimizer()\n"
        "for item in _BaseDataLoaderIter('ab'): optimizer.step()\n"
        "print('now', flush=True)\ntime.sleep(60)\n"
    ) as process:
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert numbers(torch.events(), "step") == [0, 1]
    assert numbers(torch.events(), "data_wait") == [0, 0, 1]


# ---- reading ----


def test_a_file_cut_anywhere_gives_every_whole_record(torch: Program) -> None:
    torch.quietly(LOOP + "optimizer = Optimizer()\nfor _ in range(20): optimizer.step()")
    path = torch.files()[0]
    raw = path.read_bytes()
    counts = []
    for size in range(32, len(raw) + 1):
        path.write_bytes(raw[:size])
        events = join_hosts([read_host_file(path)])
        counts.append(len(events.records["step"]))
        assert numbers(events, "step") == list(range(counts[-1]))
    assert counts[-1] == 20
    assert sorted(counts) == counts
    assert set(counts) == set(range(21))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"SQLite format 3\0" * 4, "not a file"),
        (b"GPUTRHST" + b"\x09" + b"\0" * 23, "version 9"),
    ],
)
def test_a_file_that_is_no_host_file_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "node.1.host"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=words):
        join_hosts([read_host_file(path)])


# ---- real Pythons, a real framework, the cost ----


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7", "3.8", "3.9", "3.10", "3.12", "3.13"])
def test_other_pythons_run_the_hooks_or_go_without(torch: Program, version: str) -> None:
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    python = str(homes[0]) if homes else shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"no Python {version} is here")
    torch.write({"sitecustomize.py": "import sys; sys.own_site = True"})
    source = LOOP + "import sys\nprint(sys.own_site)\n"
    source += "for item in _BaseDataLoaderIter('ab'): Optimizer().step()\n"
    if version == "2.7":
        source = "import sys\nprint(sys.own_site)\n"
    assert torch.quietly(source, python=python) == "True\n"
    if version != "2.7":
        assert numbers(torch.events(), "data_wait") == [0, 0, 1]
        assert numbers(torch.events(), "step") == [0, 1]


REAL: Final = """
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    data = TensorDataset(torch.zeros(32, 4), torch.zeros(32, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for context in (None, "fork", "spawn"):
        loader = DataLoader(data, 8, num_workers=2 * bool(context), multiprocessing_context=context)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    print("trained")
"""


def test_real_torch_is_recorded_with_and_without_workers(program: Program) -> None:
    python = torch_python()
    ran = program.run(REAL, python=python)
    assert ran == program.run(REAL, python=python, hooked=False)
    assert (ran.code, ran.out) == (0, "trained\n")
    # The loader's workers leave files, too.
    [trained] = [events for events in program.all_events() if len(events.records["step"])]
    assert numbers(trained, "step") == list(range(12))
    assert numbers(trained, "data_wait") == [0, 0, 0, 0, 1] * 3


REAL_TENSORFLOW: Final = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((tf.zeros((44, 4)), tf.zeros((44, 1)))).batch(8)
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD()
@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
if sys.argv[1] == "loop":
    for x, y in data: step(x, y)
else:
    next(iter(data))
    model.compile(optimizer, "mse")
    model.fit(data, epochs=2, verbose=0)
print("trained")
"""


@pytest.mark.parametrize(
    ("way", "steps", "waits"), [("loop", 6, [0, 0, 0, 0, 0, 0, 1]), ("fit", 12, [])]
)
def test_real_tensorflow_is_recorded_inside_and_outside_of_its_graph(
    program: Program, way: str, steps: int, waits: list[int]
) -> None:
    """GPUTRACE_TENSORFLOW_PYTHON names a Python that has TensorFlow; the last batch is smaller."""
    python = os.environ.get("GPUTRACE_TENSORFLOW_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import tensorflow"], capture_output=True).returncode:
        pytest.skip("no TensorFlow; GPUTRACE_TENSORFLOW_PYTHON may name a Python that has it")
    ran = program.run(REAL_TENSORFLOW.replace("sys.argv[1]", repr(way)), python=python)
    assert (ran.code, ran.out) == (0, "trained\n")
    assert numbers(program.events(), "step") == list(range(steps))
    assert numbers(program.events(), "data_wait") == waits


COST: Final = """
import timeit
from _gputrace_hooks import recorder, steps, wrappers
from gputrace.marks import annotate

def cost(call, times=20000):
    return min(timeit.repeat(call, number=times, repeat=7)) / times * 1e9

def item(self): return self
timed, what = wrappers.timed(item, "item"), recorder.word("a")
def stretch():
    with annotate("a"): pass
owner = object
print("record", cost(lambda: recorder.record(1, recorder.time_ns(), what, 1)) - cost(lambda: None))
print("wait", cost(lambda: timed(0)) - cost(lambda: item(0)))
print("step", cost(lambda: steps.step_ended(what, 1, owner)) - cost(lambda: None))
print("annotation", cost(stretch) - cost(lambda: None))
"""


def test_a_call_costs_about_a_microsecond(
    program: Program, record_property: Callable[[str, object], None]
) -> None:
    costs = dict(line.split() for line in program.quietly(COST).splitlines())
    for name, nanoseconds in costs.items():
        record_property(f"{name} in ns", nanoseconds)
        # A machine under load is slower; this is to notice a mistake.
        assert float(nanoseconds) < 20_000


def test_what_a_signal_handler_raises_while_a_step_is_counted_reaches_the_program(
    torch: Program,
) -> None:
    script = LOOP + "import signal\nfrom _gputrace_hooks import steps\n"
    script += "class Alarm(Exception): pass\n"
    script += "def handler(number, frame): raise Alarm\n"
    script += "signal.signal(signal.SIGALRM, handler)\n"
    script += "optimizer = Optimizer(); optimizer.step()\n"
    script += "steps.time_ns = lambda: signal.raise_signal(signal.SIGALRM)\n"
    script += "try: optimizer.step()\nexcept Alarm: print('rung')\n"
    assert torch.quietly(script) == "rung\n"


def test_samples_and_tokens_of_a_step_make_rates(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace.sqlite"
    script.write_text(
        "import gputrace, time\n"
        "for _ in range(15):\n"
        "    time.sleep(0.01)\n"
        "    gputrace.step(samples=16, tokens=8192, flop=6e15 + 500_000)\n"
        "    time.sleep(0.01)\n"
        "    gputrace.step()\n"
    )
    ran = command.gputrace(
        "record", "--backend", "host", "--no-nvml", "-o", trace, "--", sys.executable, script
    )
    assert ran.code == 0, ran.err
    with gputrace.open(trace) as opened:
        report = opened.analyze()
    (row,) = report.throughput
    assert (row.samples_per_step, row.tokens_per_step, row.flop_per_step) == (
        8,
        4096,
        3e15 + 250_000,
    )
    assert row.mfu is None, "no card was seen"
    assert row.samples_per_s is not None
    assert row.tokens_per_s == pytest.approx(512 * row.samples_per_s, rel=1e-3)
    assert row.samples_per_s == pytest.approx(8e9 / (report.steps.mean_ns or 0), rel=0.01)
