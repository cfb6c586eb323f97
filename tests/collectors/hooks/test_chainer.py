"""Chainer and ChainerMN: steps of optimizers and updaters, and waits for batches."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.programs import Program, check_steps, check_waits, event_names, numbers


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("chainer.iterators.multiprocess_iterator", "MultiprocessIterator"),
        ("chainer.iterators.multithread_iterator", "MultithreadIterator"),
        ("chainer.iterators.serial_iterator", "SerialIterator"),
    ],
)
def test_waits_for_batches_are_recorded(program: Program, module: str, name: str) -> None:
    check_waits(program, module, name)


@pytest.mark.parametrize(
    ("module", "name", "mark"),
    [
        ("chainer.optimizer", "GradientMethod", "chainer.GradientMethod.update"),
        (
            "chainer.training.updaters.standard_updater",
            "StandardUpdater",
            "chainer.training.StandardUpdater",
        ),
    ],
)
def test_steps_are_recorded(program: Program, module: str, name: str, mark: str) -> None:
    check_steps(program, module, name, "update", mark)


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
def test_each_update_of_a_multi_node_optimizer_is_one_step_also_the_first(
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
