"""Changes that ``gputrace try`` makes in the program, and the steps that it measures with them.

GPUTRACE_TRY is JSON:

cures     values by id, as the table in gputrace/trials/cures.py has them
warmup    steps to pass
steps     steps to measure then; after them the process ends by SystemExit, with null by itself
until     moment, in nanoseconds, after which few steps are enough, those of the warm-up too
turns     lists of ids of cures that are on together, by turns with the program as it is
orders    of each round, the order of its turns by their numbers, 0 for the program as it is
stretch   steps of a turn; without it all cures stay on
passed    how many of them to pass over first
folder    folder for what the process leaves
hooks     files of plugins by id: Python that defines ``patches(value)``, functions by module
recorded  true under ``gputrace record``, which needs its hooks
keep      true to leave the folders of TensorBoard as they are

What it leaves, in ``HOST.PID.try``, is JSON: see `Trial.write`. After each round of turns it
leaves the same without losses in ``HOST.PID.turns``. A file ``going`` has the numbers of the turns
that go on, as JSON; with none, the process ends.
"""

import json
import os
from functools import partial
from importlib import import_module

from . import host, loop
from .trial import asked, cures, guarded, start, trial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Hook = Callable[[Any], None]

MODULES = {
    "jax": "cures.model.jitted",
    "tensorboard.summary.writer.event_file_writer": "cures.trial.event_files",
    "tensorboardX.event_file_writer": "cures.trial.event_files",
    "tensorflow.python.data.ops.dataset_ops": "cures.data.tf_datasets",
    "tensorflow.python.ops.summary_ops_v2": "cures.trial.tf_summaries",
    "torch": "cures.model.torch_calls cures.host.torch_calls cures.loop.torch_calls",
    "torch.nn.modules.module": "cures.model.modules",
    "torch.nn.parallel.distributed": "cures.model.distributed",
    "torch.optim": "cures.model.optimizers",
    "torch.utils.data.dataloader": "cures.data.loaders",
    "transformers.training_args": "cures.data.trainer_arguments",
}
"""Functions of ours by the module that they change, loaded when the program imports that."""
LOSSES = {
    "keras.src.callbacks.callback_list": "frameworks.keras.losses",
    "torch.autograd": "cures.trial.losses",
}
_ALONE = ("torch.autograd",)
"""Modules that another hook wraps too, which would hide ours."""
_UNUSED = ("compilations", "searches", "torch_compile", "torch_data")
"""Hooks and files of hooks that only a recording needs: what they cost is left out."""
_plugin_hooks: "dict[str, list[tuple[str, Hook]]]" = {}
"""Functions of plugins, with their cures, by the module that they change."""


def install() -> None:
    """Begin the trial, and what changes no module."""
    start(json.loads(os.environ["GPUTRACE_TRY"]))
    for cure, path in asked.get("hooks", {}).items():
        guarded(cure, _load, cure, path)
    if "pin-cores" in cures:
        guarded("pin-cores", host.pin_cores)
    if "gc" in cures:
        host.collect_between_steps()
    if loop.LESS_OFTEN in cures:
        guarded(loop.LESS_OFTEN, loop.run_less_often)
    loop.skip_collections()


def change_hooks(module: str, hooks: "list[Hook]") -> "list[Hook]":
    """Return the hooks that a module has in the trial, of those that it has in a recording."""
    keeps = _named(LOSSES.get(module, ""))
    if not asked.get("recorded"):
        hooks = [
            hook
            for hook in hooks
            if {hook.__name__, hook.__module__.rpartition(".")[2]}.isdisjoint(_UNUSED)
        ]
        # First: a loss is there when the step ends.
        hooks = keeps + ([] if module in _ALONE else hooks)
    elif module in _ALONE:
        # After the recorder's, which leaves alone what is wrapped: steps may be told by it.
        hooks = hooks + keeps
    return (
        hooks + _named(MODULES.get(module, "")) + [apply_plugin_cures] * (module in _plugin_hooks)
    )


def _named(names: str) -> "list[Hook]":
    """Return hooks that import the functions of these names, which are ours, to call them."""

    def hook(module: "ModuleType", name: str = "") -> None:
        home, _, function = name.rpartition(".")
        getattr(import_module(f"..{home}", __package__), function)(module)

    return [partial(hook, name=name) for name in names.split()]


def _load(cure: str, path: str) -> None:
    """Run a plugin's file, and keep its functions."""
    import runpy

    names = runpy.run_path(path, run_name="gputrace_cure")
    for module, function in names["patches"](cures[cure]).items():
        _plugin_hooks.setdefault(module, []).append((cure, function))


def apply_plugin_cures(module: "ModuleType") -> None:
    """Call the functions of plugins for a module; one that returns counts as a change."""
    for cure, function in _plugin_hooks[module.__name__]:

        def call(cure: str = cure, function: "Callable[[Any], None]" = function) -> None:
            function(module)
            trial.change(cure, "", module.__name__, -1, "", "")

        guarded(cure, call)
