"""Calls a function of ours after the program has imported a module that has one.

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
    "accelerate.accelerator": "pytorch.phases",
    "accelerate.optimizer": "pytorch.phases",
    "chainer.iterators.dali_iterator": "wrappers.iterators",
    "chainer.iterators.multiprocess_iterator": "wrappers.iterators",
    "chainer.iterators.multithread_iterator": "wrappers.iterators",
    "chainer.iterators.serial_iterator": "wrappers.iterators",
    "chainer.optimizer": "others.marked_steps",
    "chainer.training.updaters.multiprocess_parallel_updater": "others.chainer_nccl_worker",
    "chainer.training.updaters.standard_updater": "others.marked_steps",
    "chainermn.optimizers": "others.marked_steps",
    "cntk.io": "others.cntk_sources",
    "cntk.train.trainer": "others.marked_steps",
    "deepspeed.runtime.engine": "others.marked_steps pytorch.phases",
    "fastai.optimizer": "pytorch.other_optimizers",
    "ffcv.loader.epoch_iterator": "wrappers.iterators",
    "grain._src.python.data_loader": "others.grain_data_loader",
    "horovod.torch.functions": "pytorch.horovod_functions",
    "horovod.torch.optimizer": "pytorch.other_optimizers",
    "jax._src.monitoring": "compilation.jax_events",
    "jax._src.profiler": "others.jax_profiler",
    "keras.callbacks": "others.keras_callbacks",
    "keras.src.backend.jax.trainer": "others.keras_jax_trainer",
    "keras.src.backend.tensorflow.optimizer": "others.tensorflow_optimizers",
    "keras.src.backend.torch.optimizers.torch_parallel_optimizer": "pytorch.phases",
    "keras.src.callbacks": "others.keras_callbacks",
    "keras.src.callbacks.callback_list": "others.keras_callbacks",
    "keras.src.optimizers.legacy.optimizer_v2": "others.tensorflow_optimizers",
    "keras.src.optimizers.optimizer": "others.tensorflow_optimizers",
    "keras.src.trainers.epoch_iterator": "others.keras_epoch_iterator",
    "lightning.pytorch.loops.optimization.automatic": "pytorch.phases",
    "lightning.pytorch.plugins.precision.precision": "pytorch.phases",
    "lightning.pytorch.strategies.strategy": "pytorch.phases",
    "multiprocessing.util": "recorder.finish_with",
    "mxnet.gluon.data.dataloader": "others.mxnet_dataloader",
    "mxnet.gluon.trainer": "others.marked_steps",
    "mxnet.io.io": "wrappers.iterators",
    "mxnet.module.module": "others.marked_steps",
    "nvidia.dali.plugin.jax.iterator": "others.dali_iterators",
    "nvidia.dali.plugin.mxnet": "others.dali_iterators",
    "nvidia.dali.plugin.paddle": "others.dali_iterators",
    "nvidia.dali.plugin.pytorch": "others.dali_iterators",
    "pytorch_lightning.loops.optimization.automatic": "pytorch.phases",
    "pytorch_lightning.plugins.precision.precision": "pytorch.phases",
    "pytorch_lightning.strategies.strategy": "pytorch.phases",
    "tensorflow.python.data.ops.iterator_ops": "others.tensorflow_iterators",
    "tensorflow.python.distribute.input_lib": "others.tensorflow_iterators",
    "tensorflow.python.eager.polymorphic_function.concrete_function": "others.tensorflow_functions",
    "tensorflow.python.eager.polymorphic_function.tracing_compilation": "compilation.tf_tracing",
    "tensorflow.python.keras.callbacks": "others.keras_callbacks",
    "tensorflow.python.profiler.profiler_v2": "others.tensorflow_profiler",
    "tensorpack.callbacks.group": "others.tensorpack_callbacks",
    "tensorpack.input_source.input_source": "others.tensorpack_input",
    "tf_keras.src.callbacks": "others.keras_callbacks",
    "tf_keras.src.optimizers.legacy.optimizer_v2": "others.tensorflow_optimizers",
    "tf_keras.src.optimizers.optimizer": "others.tensorflow_optimizers",
    "torch._dynamo.callback": "compilation.dynamo_callbacks",
    "torch._dynamo.convert_frame": "compilation.dynamo_frames",
    "torch._dynamo.eval_frame": "pytorch.dynamo",
    "torch.amp.grad_scaler": "pytorch.grad_scaler",
    "torch.autograd": "pytorch.backward",
    "torch.autograd.profiler": "pytorch.profiler",
    "torch.cuda.amp.grad_scaler": "pytorch.grad_scaler",
    "torch.cuda.memory": "allocator.cuda_memory",
    "torch.distributed.distributed_c10d": "hangs.collectives",
    "torch.distributed.pipelining.stage": "pytorch.phases",
    "torch.nn.utils": "pytorch.clipping",
    "torch.nn.utils.clip_grad": "pytorch.clipping",
    "torch.optim.optimizer": "pytorch.optimizer",
    "torch.profiler._cupti.monitor": "pytorch.cupti_monitor",
    "torch.profiler._cupti_monitor": "pytorch.cupti_monitor",
    "torch.utils.data._utils.fetch": "loader.fetchers",
    "torch.utils.data._utils.worker": "loader.worker_loop",
    "torch.utils.data.dataloader": "loader.dataloader",
    "torchdata.nodes.loader": "others.torchdata_loader",
    "torchdata.stateful_dataloader.stateful_dataloader": "loader.dataloader",
    "torchdata.stateful_dataloader.worker": "loader.worker_loop",
    "transformers.trainer": "pytorch.transformers_trainer",
    "triton.compiler.compiler": "compilation.triton_compiler",
    "triton.runtime.autotuner": "compilation.triton_autotuner",
}


class Finder:
    """Finder that watches modules found by the others."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
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
    """Apply the hooks of a module, if there are any; never raises."""
    names = PATCHES.get(module.__name__)
    if names is None:
        return
    from importlib import import_module

    from . import recorder

    if os.environ.get("GPUTRACE_LINES") and module.__name__ != "multiprocessing.util":
        from . import sampler

        sampler.install_for_steps(os.environ["GPUTRACE_LINES"])
    for name in names.split():
        try:
            home, function = name.rsplit(".", 1)
            getattr(import_module(f"{__package__}.{home}"), function)(module)
        except Exception:
            recorder.note_failure(module.__name__)


_installed: "list[None]" = []


def install() -> None:
    """Watch imports from now on, and patch modules that are already imported.

    A program that looks for a sitecustomize which it does not have comes here again.
    """
    if _installed:
        return
    _installed.append(None)
    if os.environ.get("GPUTRACE_TRY"):
        from . import cures

        cures.install(PATCHES)
    sys.meta_path.insert(0, Finder())
    for name in PATCHES:
        module = sys.modules.get(name)
        if module is not None:
            patch(module)
    if os.environ.get("GPUTRACE_STEPS"):
        from . import steps  # noqa: F401
    if os.environ.get("GPUTRACE_HANG"):
        from . import hangs

        hangs.install()
    if os.environ.get("GPUTRACE_PYTHON"):
        from . import sampler

        sampler.install(os.environ["GPUTRACE_PYTHON"])
