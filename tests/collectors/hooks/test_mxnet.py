"""MXNet: steps of Gluon and Module, and waits for batches."""

from __future__ import annotations

import pytest

from tests.helpers.programs import Program, check_generator, check_steps, check_waits


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mxnet.gluon.data.dataloader", "_MultiWorkerIter"),
        ("mxnet.io.io", "DataIter"),
    ],
)
def test_waits_for_batches_are_recorded(program: Program, module: str, name: str) -> None:
    check_waits(program, module, name)


def test_waits_for_a_loader_without_workers_are_recorded(program: Program) -> None:
    check_generator(program, "mxnet.gluon.data.dataloader", "DataLoader", "__iter__")


@pytest.mark.parametrize(
    ("module", "name", "method", "mark"),
    [
        ("mxnet.gluon.trainer", "Trainer", "step", "mxnet.gluon.Trainer.step"),
        ("mxnet.gluon.trainer", "Trainer", "update", "mxnet.gluon.Trainer.update"),
        ("mxnet.module.module", "Module", "update", "mxnet.mod.Module.update"),
    ],
)
def test_steps_are_recorded(
    program: Program, module: str, name: str, method: str, mark: str
) -> None:
    check_steps(program, module, name, method, mark)
