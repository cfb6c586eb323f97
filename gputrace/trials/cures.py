"""Cures: changes of a program that can be made from outside, and what is known of each.

To add one, give it an entry in `CURES`. What it does in the program is an entry of ``MODULES`` in
``collectors/hooks/_gputrace_hooks/cures``, unless its environment says it all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from gputrace.errors import PluginError, UsageError
from gputrace.model.host import Loader
from gputrace.model.results import Analysis

Value = bool | int | str


@dataclass(frozen=True, slots=True)
class Variable:
    """Environment variable that a cure sets; ``{}`` in its text is the cure's value."""

    name: str
    text: str
    joint: str = ""
    """Separator before it where the variable has a value that is to stay; empty to replace that."""


@dataclass(frozen=True, slots=True)
class Cure:
    """Change that can be made without editing the program.

    Attributes:
        id: name on the command line.
        what: what it changes, in a few words.
        frameworks: those that it is for; empty for any program.
        takes: ``N`` for a number, words joined by ``|`` for one of them, a name in capitals for
            any text; empty for a switch.
        value: value where none is given; None where one must be.
        numerics: whether results of the training change.
        findings: ids of findings that it may cure.
        predictions: ids of predictions (`WhatIf`) of its gain.
        phases: phases of a step to whose launches it is confined; empty for all of the step.
        removes: id of the finding whose cost it saves, for a cure without a prediction.
        variables: environment that it sets.
        line: statement that does the same in the program; empty if arguments of a call do.
        advice: how to do the same by hand, if neither can.
        needs: what it has no effect without, words of `LACKS`.
        edit: what is done for good with the statement that makes each call: ``remove`` it, or have
            it run ``every`` so many steps.
        group: cures of one group exclude each other.
        switched: whether the hooks can switch it off and on within a run.
        alone: whether no other may be switched in that run.
        forward: what it does to the forward pass: ``changes`` it, or ``captures`` it with what was
            changed before; a cure that captures it shares no run with others of these.
        ahead: ``batches`` or ``epochs`` if its turn begins with batches made before it, which must
            be passed over, by some batches or whole epochs.
        slow: whether a program takes much longer to start with it; it is tried after the others.
        hook: file of Python with ``patches(value)``, of a plugin's cure.
    """

    id: str
    what: str
    frameworks: tuple[str, ...] = ()
    takes: str = ""
    value: Value | None = True
    numerics: bool = False
    findings: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    removes: str = ""
    variables: tuple[Variable, ...] = ()
    line: str = ""
    advice: str = ""
    needs: str = ""
    edit: str = ""
    group: str = ""
    switched: bool = False
    alone: bool = False
    forward: str = ""
    ahead: str = ""
    slow: bool = False
    hook: Path | None = None


LACKS: Final[Mapping[str, str]] = {
    "gpu": "torch sees no GPU",
    "ranks": "it has one rank",
    "loader": "it makes no DataLoader",
    "workers": "its loaders have no workers",
    "unpinned": "its loaders pin their batches already",
    "new-workers": "no workers start anew with each epoch",
    "unfused": "its optimizers are fused",
    "one-by-one": "its optimizers take several tensors at a time",
    "keeps-gradients": "set_to_none is True already",
    "reads": "it reads no number from a GPU in its loop",
    "convolutions": "its models have no convolution in two dimensions",
    "cudnn": "its models have no convolutions",
    "full-precision": "its models run in lower precision already",
    "eager": "its models are compiled",
    "blocks": "its models repeat no block",
    "tf32-off": "TF32 is on",
    "cudnn-benchmark-off": "torch.backends.cudnn.benchmark is True already",
    "accumulates": "each step has one backward pass under DistributedDataParallel",
    "compiled": "it does not call torch.compile",
    "skip-empty-cache-calls": "it does not empty torch's cache in its loop",
    "skip-synchronize-calls": "it does not call torch.cuda.synchronize in its loop",
    "skip-gc-collect-calls": "it does not collect garbage in its loop",
    "anomalies": "autograd looks for no anomalies",
    "launches-wait": "CUDA_LAUNCH_BLOCKING is not set",
    "async-checkpoint-calls": "it does not save in its loop",
    "jemalloc": "libjemalloc.so.2 is not installed",
}
"""Words for what the hooks see in a program, and what is said of one without."""


def lacking(cure: Cure, there: Collection[str]) -> str:
    """Return why a cure would change nothing; empty if all that it needs is there."""
    return "; ".join(LACKS.get(word, word) for word in cure.needs.split() if word not in there)


_TORCH: Final = ("torch",)
_TF: Final = ("tensorflow",)
_JAX: Final = ("jax",)
_FEEDING: Final = ("data-feeding", "loader-restart")
_COPIES: Final = ("h2d-exposed", "h2d-pageable", "sync-bound")
_EXCHANGE: Final = ("communication-exposed", "topology", "host-staged-comm")
_COMPUTE: Final = ("compute-bound", "no-tensor-cores")
_THREADS: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)

CURES: Final = (
    Cure(
        "workers",
        "set num_workers of DataLoaders",
        _TORCH,
        takes="N",
        value=None,
        findings=_FEEDING,
        predictions=("prefetch",),
        switched=True,
        alone=True,
        ahead="batches",
        needs="loader",
    ),
    Cure(
        "prefetch",
        "set prefetch_factor of DataLoaders",
        _TORCH,
        takes="N",
        value=4,
        findings=_FEEDING,
        needs="loader workers",
        switched=True,
        alone=True,
        ahead="batches",
    ),
    Cure(
        "persistent",
        "set persistent_workers of DataLoaders",
        _TORCH,
        findings=_FEEDING,
        needs="loader workers new-workers",
        switched=True,
        alone=True,
        ahead="epochs",
    ),
    Cure(
        "pinned",
        "set pin_memory of DataLoaders",
        _TORCH,
        findings=(*_FEEDING, *_COPIES),
        predictions=("pinned",),
        needs="gpu loader unpinned",
        switched=True,
        alone=True,
        ahead="batches",
    ),
    Cure(
        "staging",
        "copy each next batch to the GPU ahead of time, on a stream of its own",
        _TORCH,
        findings=(*_FEEDING, "h2d-exposed", "h2d-pageable"),
        predictions=("pinned",),
        advice="copy the next batch on a second stream while the program trains",
        needs="gpu loader",
        switched=True,
    ),
    Cure(
        "non-blocking",
        "let copies to the GPU not wait (non_blocking in .to and .cuda)",
        _TORCH,
        findings=_COPIES,
        predictions=("pinned",),
        needs="gpu",
        switched=True,
    ),
    Cure(
        "defer-item",
        "let .item(), float() and bool() return the previous step's number, without waiting",
        _TORCH,
        numerics=True,
        findings=("sync-bound", "host-work"),
        predictions=("sync",),
        advice="copy what is read to pinned memory (non_blocking=True), and read that a step later",
        needs="gpu reads",
        switched=True,
    ),
    Cure(
        "channels-last",
        "keep weights and images in the memory format NHWC",
        _TORCH,
        findings=("layout-transposes", "compute-bound"),
        removes="layout-transposes",
        advice="model = model.to(memory_format=torch.channels_last), and its input",
        switched=True,
        forward="changes",
        needs="convolutions",
    ),
    Cure(
        "tf32",
        "compute matrix products and convolutions in TF32",
        _TORCH,
        numerics=True,
        findings=_COMPUTE,
        predictions=("tf32",),
        removes="no-tensor-cores",
        line="torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True",
        needs="gpu tf32-off",
        switched=True,
        forward="changes",
    ),
    Cure(
        "bf16",
        "run forward passes under autocast to bfloat16",
        _TORCH,
        numerics=True,
        findings=_COMPUTE,
        predictions=("bf16",),
        removes="no-tensor-cores",
        advice="with torch.autocast(x.device.type, dtype=torch.bfloat16): around the forward pass",
        switched=True,
        forward="changes",
        needs="full-precision",
    ),
    Cure(
        "graphs",
        "run forward and backward of each trained model as CUDA graphs",
        _TORCH,
        findings=("launch-bound",),
        predictions=("graphs",),
        phases=("forward", "backward"),
        advice="model = torch.cuda.make_graphed_callables(model, (inputs,)), of one shape; under "
        "autocast of the program, with cache_enabled=False; before DistributedDataParallel wraps "
        "it; gradients that accumulate have to be moved out of the graph's memory after each pass",
        needs="gpu eager",
        group="forward",
        switched=True,
        forward="captures",
    ),
    Cure(
        "fused",
        "create optimizers with fused=True",
        _TORCH,
        findings=("launch-bound",),
        phases=("optimizer",),
        group="optimizer",
        switched=True,
        needs="unfused",
    ),
    Cure(
        "foreach",
        "create optimizers with foreach=True",
        _TORCH,
        findings=("launch-bound",),
        phases=("optimizer",),
        group="optimizer",
        switched=True,
        needs="one-by-one",
    ),
    Cure(
        "set-to-none",
        "call zero_grad(set_to_none=True)",
        _TORCH,
        findings=("launch-bound",),
        needs="keeps-gradients",
        switched=True,
    ),
    Cure(
        "bucket-cap",
        "set bucket_cap_mb of DistributedDataParallel",
        _TORCH,
        takes="N",
        value=100,
        findings=_EXCHANGE,
        predictions=("overlap",),
        needs="ranks",
    ),
    Cure(
        "bucket-view",
        "set gradient_as_bucket_view of DistributedDataParallel",
        _TORCH,
        findings=(*_EXCHANGE, "launch-bound"),
        needs="ranks",
    ),
    Cure(
        "static-graph",
        "set static_graph of DistributedDataParallel",
        _TORCH,
        findings=_EXCHANGE,
        needs="ranks",
    ),
    Cure(
        "compile",
        "compile each trained model with torch.compile",
        _TORCH,
        takes="default|reduce-overhead|max-autotune|regional",
        value="default",
        findings=("launch-bound", "compute-bound"),
        advice="model = torch.compile(model)",
        group="forward",
        slow=True,
        switched=True,
        alone=True,
        needs="eager",
    ),
    Cure(
        "dynamic",
        "have torch.compile make code for all shapes at once",
        _TORCH,
        findings=("recompilation",),
        needs="compiled",
    ),
    Cure(
        "no-sync",
        "send gradients with the last backward pass of a step alone",
        _TORCH,
        findings=(*_EXCHANGE, "launch-bound"),
        advice="with model.no_sync(): around all but the last forward and backward pass of a step",
        needs="ranks accumulates",
        switched=True,
    ),
    Cure(
        "skip-empty-cache",
        "leave out the program's torch.cuda.empty_cache() in its loop",
        _TORCH,
        findings=("alloc-stall", "sync-bound", "host-work"),
        advice="take torch.cuda.empty_cache() out of the loop",
        needs="gpu skip-empty-cache-calls",
        edit="remove",
        switched=True,
    ),
    Cure(
        "skip-synchronize",
        "leave out the program's torch.cuda.synchronize() in its loop",
        _TORCH,
        findings=("sync-bound", "host-work", "launch-bound"),
        advice="take torch.cuda.synchronize() out of the loop",
        needs="gpu skip-synchronize-calls",
        edit="remove",
        switched=True,
    ),
    Cure(
        "skip-gc-collect",
        "leave out the program's gc.collect() in its loop",
        findings=("garbage-collection",),
        predictions=("gc",),
        advice="take gc.collect() out of the loop",
        needs="skip-gc-collect-calls",
        edit="remove",
        switched=True,
    ),
    Cure(
        "skip-anomalies",
        "have autograd look for no anomalies",
        _TORCH,
        findings=("debugging",),
        phases=("forward", "backward"),
        advice="take out torch.autograd.set_detect_anomaly(True) and detect_anomaly()",
        needs="anomalies",
        switched=True,
    ),
    Cure(
        "async-launches",
        "let launches return before their kernels end (CUDA_LAUNCH_BLOCKING=0)",
        _TORCH,
        findings=("debugging",),
        advice="do not set CUDA_LAUNCH_BLOCKING",
        needs="gpu launches-wait",
    ),
    Cure(
        "less-often",
        "run a statement that the training can go without in one of 50 times",
        takes="FILE:LINE",
        value=None,
        findings=("host-work", "sync-bound", "checkpoint-stall"),
        advice="run it in one of 50 times",
        edit="every",
        switched=True,
    ),
    Cure(
        "async-checkpoint",
        "have a thread write what torch.save saves in the loop",
        _TORCH,
        findings=("checkpoint-stall",),
        advice="copy the state to pinned memory and save it in a thread, or call "
        "torch.distributed.checkpoint.async_save",
        needs="async-checkpoint-calls",
    ),
    Cure(
        "cudnn-benchmark",
        "let cuDNN measure which algorithm is fastest",
        _TORCH,
        takes="on|off",
        value="on",
        findings=("compute-bound", "autotune-repeated"),
        line="torch.backends.cudnn.benchmark = {}",
        needs="gpu cudnn-benchmark-off cudnn",
        switched=True,
        forward="changes",
    ),
    Cure(
        "gc",
        "collect garbage only between steps, and never objects older than the second step",
        findings=("garbage-collection",),
        predictions=("gc",),
        advice="gc.freeze() and gc.disable() before the loop, gc.collect(0) now and then in it",
        switched=True,
    ),
    Cure(
        "threads",
        "set the number of threads that each process computes with",
        takes="N",
        value=1,
        findings=("cpu-starved", "cpu-throttled", "late-host"),
        variables=tuple(Variable(name, "{}") for name in _THREADS),
    ),
    Cure(
        "pin-threads",
        "keep each OpenMP thread on a core of its own",
        findings=("slow-cores", "cpu-starved"),
        variables=(Variable("OMP_PROC_BIND", "close"), Variable("OMP_PLACES", "cores")),
    ),
    Cure(
        "malloc",
        "have the host's allocator keep the memory that the program frees",
        findings=("page-faults",),
        variables=(
            # Large blocks from the heap, of which nothing goes back to the system.
            Variable("MALLOC_MMAP_MAX_", "0"),
            Variable("MALLOC_TRIM_THRESHOLD_", "1000000000000"),
            Variable("MALLOC_TOP_PAD_", "67108864"),
        ),
        group="malloc",
    ),
    Cure(
        "jemalloc",
        "allocate the host's memory by jemalloc",
        findings=("page-faults",),
        variables=(Variable("LD_PRELOAD", "libjemalloc.so.2", " "),),
        needs="jemalloc",
        group="malloc",
    ),
    Cure(
        "pin-cores",
        "give each rank of a machine cores of its own, on the NUMA node of its GPU",
        findings=("cpu-starved", "late-host"),
        advice="start each rank under taskset or numactl",
        needs="ranks",
    ),
    Cure(
        "expandable",
        "take CUDA memory in segments that can grow",
        _TORCH,
        findings=("alloc-stall",),
        predictions=("alloc",),
        variables=(Variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", ","),),
        needs="gpu",
    ),
    Cure(
        "nccl-p2p",
        "set up to which distance NCCL uses direct access between GPUs",
        takes="LOC|NVL|PIX|PXB|PHB|SYS",
        value="SYS",
        findings=("host-staged-comm", "topology"),
        predictions=("peer-access",),
        variables=(Variable("NCCL_P2P_LEVEL", "{}"),),
        needs="ranks",
    ),
    Cure(
        "nccl-algo",
        "set the algorithm of NCCL's collectives",
        takes="Ring|Tree",
        value="Tree",
        findings=_EXCHANGE,
        variables=(Variable("NCCL_ALGO", "{}"),),
        needs="ranks",
    ),
    Cure(
        "nccl-channels",
        "set the minimum number of NCCL's channels",
        takes="N",
        value=8,
        findings=_EXCHANGE,
        variables=(Variable("NCCL_MIN_NCHANNELS", "{}"),),
        needs="ranks",
    ),
    Cure(
        "tf-parallel",
        "set num_parallel_calls=AUTOTUNE for map, interleave and batch of tf.data",
        _TF,
        findings=_FEEDING,
        predictions=("prefetch",),
    ),
    Cure(
        "tf-prefetch",
        "add prefetch(AUTOTUNE) at the end of datasets",
        _TF,
        findings=_FEEDING,
        predictions=("prefetch",),
        advice="dataset = dataset.prefetch(tf.data.AUTOTUNE)",
    ),
    Cure(
        "xla-latency",
        "use XLA's latency hiding scheduler",
        (*_JAX, *_TF),
        findings=("communication-exposed",),
        predictions=("overlap",),
        variables=(Variable("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true", " "),),
    ),
    Cure(
        "xla-graphs",
        "let XLA launch CUDA graphs, however short",
        (*_JAX, *_TF),
        findings=("launch-bound",),
        predictions=("graphs",),
        variables=(Variable("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=1", " "),),
        needs="gpu",
    ),
    Cure(
        "xla-triton",
        "let XLA compute matrix products with Triton",
        (*_JAX, *_TF),
        findings=("compute-bound",),
        variables=(Variable("XLA_FLAGS", "--xla_gpu_triton_gemm_any=true", " "),),
        needs="gpu",
    ),
    Cure(
        "xla-flag",
        "set a flag of XLA, e.g. xla-flag=xla_gpu_all_reduce_combine_threshold_bytes=134217728",
        (*_JAX, *_TF),
        takes="NAME=VALUE",
        value=None,
        variables=(Variable("XLA_FLAGS", "--{}", " "),),
    ),
    Cure(
        "donate",
        "let functions under jax.jit donate what they return anew: parameters, optimizer state",
        _JAX,
        findings=("alloc-stall", "compute-bound"),
        advice="jax.jit(step, donate_argnums=...) for the state that the step returns",
    ),
    Cure(
        "jax-matmul",
        "set the precision of JAX's matrix products",
        _JAX,
        takes="tensorfloat32|bfloat16",
        value="tensorfloat32",
        numerics=True,
        findings=_COMPUTE,
        predictions=("tf32",),
        removes="no-tensor-cores",
        variables=(Variable("JAX_DEFAULT_MATMUL_PRECISION", "{}"),),
    ),
)


@cache
def all_cures() -> Mapping[str, Cure]:
    """Return all cures by id: ours, then those of plugins; the first of a name counts."""
    from gputrace.plugins import load, plugins, warn

    cures = {cure.id: cure for cure in CURES}
    for plugin in plugins("cures"):
        try:
            cures.setdefault(plugin.name, load(plugin, Cure))
        except PluginError as error:
            warn(error)
    return cures


@dataclass(frozen=True, slots=True)
class Setting:
    """Cure with its value."""

    cure: Cure
    value: Value

    def __str__(self) -> str:
        return f"{self.cure.id}={self.value}" if self.cure.takes else self.cure.id

    @property
    def for_hook(self) -> Value:
        """Return the value as the hook takes it."""
        return {"on": True, "off": False, "default": True}.get(str(self.value), self.value)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Cures that are tried together; without any, the program as it is."""

    settings: tuple[Setting, ...] = field(default=())

    def __str__(self) -> str:
        return "+".join(map(str, self.settings)) or "as it is"

    @property
    def switched(self) -> bool:
        """True if it can be switched off and on within a run."""
        return bool(self.settings) and all(setting.cure.switched for setting in self.settings)

    @property
    def captures(self) -> bool:
        """True if it keeps the forward pass with what was changed before."""
        return any(setting.cure.forward == "captures" for setting in self.settings)

    def shares_run(self, other: Candidate) -> bool:
        """Return whether both may be switched in the same run."""
        each, both = (self, other), [*self.settings, *other.settings]
        change = [any(setting.cure.forward for setting in one.settings) for one in each]
        captures = any(one.captures for one in each)
        return not any(setting.cure.alone for setting in both) and not (captures and all(change))

    @property
    def numerics(self) -> bool:
        """True if results of the training change."""
        return any(setting.cure.numerics for setting in self.settings)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that differ from the inherited environment."""
        changed: dict[str, str] = {}
        for setting in self.settings:
            for variable in setting.cure.variables:
                text = variable.text.format(setting.value)
                before = changed.get(variable.name, inherited.get(variable.name, ""))
                keep = f"{before}{variable.joint}" if before and variable.joint else ""
                changed[variable.name] = f"{keep}{text}"
        return changed


def read_candidates(text: str) -> list[Candidate]:
    """Parse ``workers=8,pinned+fused``: alternatives, some of several cures at once.

    Raises UsageError for an unknown cure or value, and for those that exclude each other.
    """
    candidates = [
        Candidate(tuple(_read_setting(word) for word in part.split("+")))
        for part in text.split(",")
        if part.strip()
    ]
    for candidate in candidates:
        if len(combine([candidate]).settings) < len(candidate.settings):
            apart = str(candidate).replace("+", ",")
            raise UsageError(f"{candidate}: these exclude each other; try them apart: {apart}")
    return list({str(candidate): candidate for candidate in candidates}.values())


def _read_setting(word: str) -> Setting:
    id, equals, text = word.strip().partition("=")
    cure = all_cures().get(id)
    if cure is None:
        from difflib import get_close_matches

        close = get_close_matches(id, all_cures(), 1)
        hint = f"did you mean {close[0]}?" if close else "`gputrace try --list` names them"
        raise UsageError(f"no cure is called {id!r}; {hint}")
    if not equals:
        if cure.value is None:
            example = "8" if cure.takes == "N" else cure.takes
            raise UsageError(f"{id}: give its value, e.g. {id}={example}")
        return Setting(cure, cure.value)
    if not cure.takes:
        raise UsageError(f"{id} takes no value; leave out ={text}")
    if cure.takes == "N":
        if not text.isdecimal():
            raise UsageError(f"{id}={text}: not a number; write {id}=8")
        return Setting(cure, int(text))
    if "|" in cure.takes and text not in cure.takes.split("|"):
        raise UsageError(f"{id}={text}: it takes {', '.join(cure.takes.split('|'))}")
    return Setting(cure, text)


def combine(candidates: Sequence[Candidate]) -> Candidate:
    """Return the cures of all candidates together; of those that exclude each other, the first."""
    chosen: dict[str, Setting] = {}
    for candidate in candidates:
        for setting in candidate.settings:
            chosen.setdefault(setting.cure.group or setting.cure.id, setting)
    return Candidate(tuple(chosen.values()))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step with a cure, from a recording, as a fraction of the step without."""

    ratio: float
    low: float | None = None
    high: float | None = None
    """Bounds; None if unknown."""

    @property
    def middle(self) -> float:
        """Return the middle of its bounds, as the ratio may be one of them."""
        return self.ratio if self.low is None or self.high is None else (self.low + self.high) / 2


def predict(candidate: Candidate, analysis: Analysis) -> Prediction | None:
    """Predict the step with a candidate from a recording; None if that is not possible."""
    if len(candidate.settings) != 1:
        return None
    setting = candidate.settings[0]
    # All ranks wait for the one that waits longest.
    loader = max(analysis.loader, key=lambda loader: loader.wait_ns, default=None)
    step_ns = None if loader is None else _with_setting(loader, setting)
    if loader is not None and loader.now is not None and step_ns is not None:
        return Prediction(step_ns / max(loader.now.step_ns, 1))
    return next(_predictions(setting.cure, analysis), None)


def _with_setting(loader: Loader, setting: Setting) -> int | None:
    """Return the predicted step of a loader with a setting; None if it has none."""
    if setting.cure.id == "workers":
        steps = {choice.workers: choice.step_ns for choice in loader.predictions}
        return steps.get(int(setting.value))
    is_deeper = setting.cure.id == "prefetch" and int(setting.value) >= 2 * loader.prefetch_factor
    return loader.doubled_step_ns if is_deeper else None


def _predictions(cure: Cure, analysis: Analysis) -> Iterator[Prediction]:
    """Yield the predictions of a cure: by replay, by the cost of its phases, and of its finding.

    The replay leaves out all launches of a step; a cure of some phases, those in them. What else
    the host does in them may go, too, and is the bound.
    """
    every = [phase for rank in analysis.step_phases for phase in rank.phases]
    mine = [phase for phase in every if phase.name in cure.phases]
    launch_ns, all_ns = (sum(each.launch_ns or 0 for each in some) for some in (mine, every))
    part = launch_ns / all_ns if all_ns and mine else 1.0
    for effect in analysis.what_if:
        if effect.id in cure.predictions:
            steps = (effect.step_ns, effect.low_ns, effect.high_ns)
            yield Prediction(*(1 - part * (1 - ns / max(effect.now_ns, 1)) for ns in steps))
    if all_ns and mine:
        total_ns = sum(rank.step_ns for rank in analysis.step_phases)
        host_ns = sum(phase.host_ns for phase in mine)
        yield Prediction(1 - launch_ns / total_ns, 1 - host_ns / total_ns, 1.0)
    step_ns = analysis.steps.mean_ns
    for finding in analysis.findings:
        if finding.id == cure.removes and step_ns:
            yield Prediction(max(step_ns - finding.impact_ns, 1) / step_ns)
