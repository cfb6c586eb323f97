"""Changes that ``gputrace try`` makes in the program, and the steps that it measures with them.

GPUTRACE_TRY is JSON:

cures     values by id, as the table in gputrace/trials/cures.py has them
warmup    steps to pass
steps     steps to measure then; after them the process ends by SystemExit, with null by itself
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

from . import host
from .trial import asked, cures, guarded, start, trial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

MODULES = {
    "jax": "cures.model.jitted",
    "tensorboard.summary.writer.event_file_writer": "cures.trial.event_files",
    "tensorboardX.event_file_writer": "cures.trial.event_files",
    "tensorflow.python.data.ops.dataset_ops": "cures.data.tf_datasets",
    "tensorflow.python.ops.summary_ops_v2": "cures.trial.tf_summaries",
    "torch": "cures.model.switches cures.host.torch_calls",
    "torch.nn.modules.module": "cures.model.modules",
    "torch.nn.parallel.distributed": "cures.model.distributed",
    "torch.optim": "cures.model.optimizers",
    "torch.utils.data.dataloader": "cures.data.loaders",
    "transformers.training_args": "cures.data.trainer_arguments",
}
"""Functions of ours by the module that they change."""
LOSSES = {
    "keras.src.callbacks.callback_list": "cures.trial.keras_losses",
    "torch.autograd": "cures.trial.losses",
}
_ALONE = ("torch.autograd",)
"""Modules that another hook wraps too, which would hide ours."""
_UNUSED = ("loader", "compilation")
"""Modules whose hooks only a recording needs: what they cost is left out."""
_plugged: "dict[str, list[tuple[str, Callable[[Any], None]]]]" = {}
"""Functions of plugins, with their cures, by the module that they change."""


def install(patches: "dict[str, str]") -> None:
    """Take what is asked for into the table of modules to patch."""
    start(json.loads(os.environ["GPUTRACE_TRY"]))
    if asked.get("recorded"):
        for module in _ALONE:
            # After the recorder's, which leaves alone what is wrapped: steps may be told by it.
            patches[module] = f"{patches.get(module, '')} {LOSSES[module]}"
    else:
        _leave_out(patches)
    for cure, path in asked.get("hooks", {}).items():
        guarded(cure, _load, cure, path)
    for table in (MODULES, dict.fromkeys(_plugged, "cures.plugged")):
        for module, names in table.items():
            patches[module] = f"{patches.get(module, '')} {names}"
    if "pin-cores" in cures:
        guarded("pin-cores", host.pin_cores)
    if "gc" in cures:
        host.collect_between_steps()


def _leave_out(patches: "dict[str, str]") -> None:
    """Leave out what only a recording needs, and put in what keeps losses."""
    for module, names in list(patches.items()):
        left = [name for name in names.split() if name.partition(".")[0] not in _UNUSED]
        patches[module] = " ".join(left)
    for module in _ALONE:
        patches.pop(module, None)
    # First: a loss is there when the step ends.
    for module, name in LOSSES.items():
        patches[module] = f"{name} {patches.get(module, '')}"


def _load(cure: str, path: str) -> None:
    """Run a plugin's file, and keep its functions."""
    import runpy

    names = runpy.run_path(path, run_name="gputrace_cure")
    for module, function in names["patches"](cures[cure]).items():
        _plugged.setdefault(module, []).append((cure, function))


def plugged(module: "ModuleType") -> None:
    """Call the functions of plugins for a module; one that returns counts as a change."""
    for cure, function in _plugged[module.__name__]:

        def call(cure: str = cure, function: "Callable[[Any], None]" = function) -> None:
            function(module)
            trial.change(cure, "", module.__name__, -1, "", "")

        guarded(cure, call)
