"""Calls a function of ``frameworks`` after the program has imported a module that has one.

A finder at the front of ``sys.meta_path`` lets the others find the module and adds to its loader
what is to be done once the module has run: a module that is only looked for is not touched.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PATCHES = {
    "chainer.iterators.dali_iterator": "iterators",
    "chainer.iterators.multiprocess_iterator": "iterators",
    "chainer.iterators.multithread_iterator": "iterators",
    "chainer.iterators.serial_iterator": "iterators",
    "chainer.optimizer": "chainer_optimizer",
    "chainer.training.updaters.standard_updater": "chainer_updater",
    "deepspeed.runtime.engine": "deepspeed_engine",
    "jax._src.profiler": "jax_profiler",
    "keras.callbacks": "keras_callbacks",
    "keras.src.callbacks": "keras_callbacks",
    "keras.src.callbacks.callback_list": "keras_callbacks",
    "keras.src.trainers.epoch_iterator": "keras_epoch_iterator",
    "multiprocessing.util": "multiprocessing_exit",
    "mxnet.gluon.data.dataloader": "mxnet_dataloader",
    "mxnet.gluon.trainer": "mxnet_trainer",
    "mxnet.io.io": "iterators",
    "mxnet.module.module": "mxnet_module",
    "nvidia.dali.plugin.jax.iterator": "iterators",
    "nvidia.dali.plugin.mxnet": "iterators",
    "nvidia.dali.plugin.paddle": "iterators",
    "nvidia.dali.plugin.pytorch": "iterators",
    "tensorflow.python.data.ops.iterator_ops": "iterators",
    "tensorflow.python.distribute.input_lib": "iterators",
    "tensorflow.python.keras.callbacks": "keras_callbacks",
    "tensorflow.python.profiler.profiler_v2": "tensorflow_profiler",
    "tf_keras.src.callbacks": "keras_callbacks",
    "torch._dynamo.eval_frame": "torch_dynamo",
    "torch.amp.grad_scaler": "torch_grad_scaler",
    "torch.autograd.profiler": "torch_profiler",
    "torch.cuda.amp.grad_scaler": "torch_grad_scaler",
    "torch.optim.optimizer": "torch_optimizer",
    "torch.utils.data.dataloader": "iterators",
    "torchdata.stateful_dataloader.stateful_dataloader": "iterators",
}


class Finder:
    """Finds nothing by itself."""

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        if name not in PATCHES:
            return None
        for other in list(sys.meta_path):
            find = getattr(other, "find_spec", None)
            spec = find(name, path, target) if find and other is not self else None
            if spec is not None:
                _watch(spec)
                return spec  # type: ignore[no-any-return]
        return None


def _watch(spec: "ModuleSpec") -> None:
    loader = spec.loader
    run = getattr(loader, "exec_module", None)
    if run is None:
        return

    def exec_module(module: "ModuleType") -> None:
        # Some loaders serve several modules.
        vars(loader).pop("exec_module", None)
        run(module)
        patch(module)

    try:
        loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]
    except AttributeError:
        return


def patch(module: "ModuleType") -> None:
    """Does what is to be done with the module, if anything; it never raises."""
    name = PATCHES.get(module.__name__)
    if name is None:
        return
    from . import recorder

    try:
        from . import frameworks

        getattr(frameworks, name)(module)
    except Exception:
        recorder.note_failure(module.__name__)


def install() -> None:
    """Watches imports from now on, and patches what is there already."""
    if any(type(finder).__name__ == Finder.__name__ and isinstance(finder, Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    for name in PATCHES:
        module = sys.modules.get(name)
        if module is not None:
            patch(module)
    if os.environ.get("GPUTRACE_STEPS"):
        from . import steps  # noqa: F401
