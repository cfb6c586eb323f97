"""Programs of every kind that people record, drawn at random, with the kind and the turns planted.

Kernels, ranges and habits are named as the frameworks name them; what a program does between two
kernels is played by the machine of `trainer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tests.synthetic import collectives
from tests.synthetic.machine import Log
from tests.synthetic.model import Model, Work
from tests.synthetic.plan import Plan
from tests.synthetic.recording import (
    API,
    COLLECTIVES,
    NVTX,
    OP,
    OSRT,
    STATES,
    SYNC,
    Kind,
    Process,
    Recording,
    Table,
    Truth,
    Unit,
)
from tests.synthetic.simulate import simulate
from tests.synthetic.trainer import COMPUTE, Trainer
from tests.synthetic.variants import random_plan

_AT: Final = "void at::native::"
_ELEMENTWISE: Final = _AT + "vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 3>>"
_CAST: Final = _AT + "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"
_MULTI: Final = _AT + "(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<{}>, {}>"


@dataclass(frozen=True)
class Style:
    """Names that a framework's kernels have: of products, and of the rest of a layer."""

    products: tuple[str, ...]
    norm: str
    activation: str
    attention: tuple[str, ...]
    embedding: str
    add: str
    back: tuple[str, ...]
    """Of the backward pass: of a norm, an activation, an attention, an embedding."""


EAGER: Final = Style(
    ("ampere_sgemm_128x64_tn", "ampere_sgemm_64x64_nn", "ampere_sgemm_128x128_nt"),
    _AT + "(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
    _ELEMENTWISE.format("GeluCUDAKernelImpl"),
    ("ampere_sgemm_32x128_tn", "void (anonymous namespace)::softmax_warp_forward<float>",
     "ampere_sgemm_32x32_sliced1x4_nn"),
    _AT + "(anonymous namespace)::indexSelectLargeIndex<float, long>",
    _ELEMENTWISE.format("CUDAFunctor_add<float>"),
    (_AT + "(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<float>",
     _ELEMENTWISE.format("GeluBackwardCUDAKernelImpl"),
     "void (anonymous namespace)::softmax_warp_backward<float>",
     _AT + "embedding_backward_feature_kernel<float>"),
)  # fmt: skip
HALF: Final = replace(
    EAGER,
    products=("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "nvjet_hsh_64x64_64x16_1x1_v_bz_TNN",
              "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1"),
    attention=("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>",),
    back=(*EAGER.back[:2],
          "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<traits>",
          EAGER.back[3]),
)  # fmt: skip
COMPILED: Final = Style(
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>",
     "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn"),
    "triton_per_fused_add_native_layer_norm_3",
    "triton_poi_fused_gelu_5",
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>",),
    "triton_poi_fused_embedding_0",
    "triton_poi_fused_add_7",
    ("triton_red_fused_native_layer_norm_native_layer_norm_backward_9",
     "triton_poi_fused_gelu_gelu_backward_11",
     "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<traits>",
     "triton_poi_fused_embedding_dense_backward_13"),
)  # fmt: skip
CONVOLUTIONS: Final = Style(
    ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x64",
     "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64"),
    _AT + "batch_norm_collect_statistics_channels_last_kernel<float>",
    _ELEMENTWISE.format("launch_clamp_scalar"),
    ("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>",),
    _AT + "max_pool_forward_nhwc<c10::Half>",
    _ELEMENTWISE.format("CUDAFunctor_add<c10::Half>"),
    (_AT + "batch_norm_backward_elemt_channels_last_kernel<4, c10::Half>",
     _ELEMENTWISE.format("threshold_kernel_impl"),
     "sm80_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x64",
     _AT + "max_pool_backward_nhwc<c10::Half>"),
)  # fmt: skip
TRAINED: Final = (EAGER, HALF, COMPILED, CONVOLUTIONS)

_SERVED: Final = replace(
    HALF,
    norm="void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>",
    activation="void vllm::act_and_mul_kernel<c10::BFloat16, silu_kernel>",
)
_WRITE: Final = "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>"
_CAT: Final = _AT + "(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4>"
ENGINES: Final = (
    # Style; attention of a prompt and of one more token; products of one more token.
    (_SERVED, (_WRITE, "void flash::flash_fwd_kernel<traits, true>"),
     (_WRITE, "void flash::flash_fwd_splitkv_kernel<traits>",
      "void flash::flash_fwd_splitkv_combine_kernel<traits>"), HALF.products),
    (_SERVED, ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<params>",),
     ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<params>",), HALF.products),
    (replace(HALF, norm=_AT + "reduce_kernel<512, 1, MeanOps<float>>"),
     (_CAT, _CAT, *HALF.attention), (_CAT, _CAT, *HALF.attention),
     ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float, float>",
      "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float>")),
    (EAGER, (_CAT, _CAT, *EAGER.attention), (_CAT, _CAT, *EAGER.attention),
     ("void gemv2N_kernel<int, int, float, float, float, 128>",
      "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 8, false>")),
    (replace(_SERVED, products=("void mul_mat_q<(ggml_type)12, 64, 8, false>",),
             norm="void rms_norm_f32<1024, true>", activation="void unary_gated_op_kernel<silu>",
             embedding="void k_get_rows<float>", add="void k_bin_bcast<op_add>"),
     ("void rope_norm<true, false, float>", "k_set_rows<__half>",
      "void flash_attn_ext_f16<128, 32>"),
     ("void rope_norm<true, false, float>", "k_set_rows<__half>",
      "void flash_attn_vec_ext_f16<128, 1>"),
     ("void mul_mat_vec_q<(ggml_type)12, 1, false>",)),
)  # fmt: skip

OPTIMIZERS: Final = (
    (_MULTI.format(4, "FusedAdamMathFunctor<float, 4, ADAM_MODE::ADAMW>"),),
    tuple(_MULTI.format(n, f"{functor}Functor<float>")
          for n, functor in ((1, "BinaryOpScalar"), (3, "TernaryOpScalar"),
                             (2, "PointwiseOpScalar"), (1, "UnaryOp"), (4, "PointwiseOpList"))),
    ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>>",),
    ("triton_for_fused_2",),
    tuple(_ELEMENTWISE.format(name) for name in
          ("AUnaryFunctor<MulFunctor>", "lerp_scalar_kernel", "addcmul_cuda_kernel",
           "sqrt_kernel_cuda", "addcdiv_cuda_kernel")),
    (_ELEMENTWISE.format("CUDAFunctorOnSelf_add<float>"),),
)  # fmt: skip
"""Kernels of an update; the last two name none: they are applied to each parameter in turn."""
_UNNAMED: Final = 4

Kernels = tuple[str, ...]


class Network:
    """A network of equal layers between an embedding and a head, with the kernels of its passes."""

    def __init__(
        self, rng: np.random.Generator, style: Style, attention: Kernels = (), most: int = 32
    ) -> None:
        self.rng, self.style = rng, style
        self.layers = int(rng.integers(3, most + 1))
        self.us = float(np.exp(rng.uniform(np.log(6), np.log(120))))
        self.width = int(rng.integers(4, 9))
        self.amp = style in (EAGER, CONVOLUTIONS) and bool(rng.random() < 0.3)
        self.experts = int(rng.choice([0, 0, 0, 4]))
        self.order = rng.integers(0, 3, 40)
        self.attention = attention or style.attention
        self.lengths: dict[Kernels, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self.tail = (
            "void cunn_SoftMaxForward<8, float, float, LogSoftMaxForwardEpilogue>",
            _AT + "nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        )

    def layer(self, attention: Kernels, products: Kernels) -> Kernels:
        style, names = self.style, []

        def product(index: int) -> None:
            names.extend([_CAST] * self.amp + [products[self.order[index] % len(products)]])

        names.append(style.norm)
        product(0)
        names.extend(attention)
        product(1)
        names.extend([style.add, style.norm])
        for index in range(2, self.width):
            product(index)
            names.append(style.activation)
        for _ in range(self.experts):
            names.extend([_AT + "index_elementwise_kernel<gather>", *products[:1]])
        return (*names, style.add)

    def forward(self, attention: Kernels = (), products: Kernels = ()) -> Kernels:
        layer = self.layer(attention or self.attention, products or self.style.products)
        head = (self.style.norm, (products or self.style.products)[-1])
        return (self.style.embedding, *layer * self.layers, *head)

    def backward(self) -> Kernels:
        norm, activation, attention, embedding = self.style.back
        turned: dict[str, Kernels] = {
            self.style.norm: (norm,),
            self.style.activation: (activation,),
        }
        turned |= dict.fromkeys(self.attention, (attention,))
        for name in self.style.products:
            turned[name] = (name, self.style.products[0])
        names = [n for name in reversed(self.forward()[1:]) for n in turned.get(name, (name,))]
        return (_AT + "nll_loss_backward_reduce_cuda_kernel_2d<float>", *names, embedding)

    def update(self, way: int) -> Kernels:
        names = OPTIMIZERS[way]
        count = self.layers * self.width if way >= _UNNAMED else 1 + self.layers // 4
        return tuple(name for name in names for _ in range(count)) if way < 4 else names * count

    def ns(self, names: Kernels) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return how long each kernel takes; a layer's are as long in every layer."""
        if names not in self.lengths:
            kind = {name: np.exp(self.rng.normal(0, 0.8)) for name in sorted(set(names))}
            self.lengths[names] = np.array([1_000 * self.us * kind[name] for name in names])
        return self.lengths[names]


class Played:
    """The ranks of a program at work: each call is one of all of them."""

    def __init__(self, seed: int, *spice: int) -> None:
        self.rng = rng = np.random.default_rng((seed, *spice))
        ranks = int(rng.choice([1, 1, 1, 1, 2]))
        self.plan = Plan(
            seed=seed,
            ranks=ranks,
            jitter=float(rng.uniform(0, 0.12)),
            launch_ns=int(rng.integers(2_500, 8_000)),
            python_ns=int(rng.integers(1_000, 15_000)),
            graph=True,
            input_copies=0,
        )
        self.turns: dict[str, list[tuple[int, int]]] = {}
        self.counts: dict[str, range] = {}
        self.cut = float(rng.choice([0, 0, 0, 0, rng.uniform(0.01, 0.1)]))
        self.log = Log()
        model = Model.of(self.plan, self.log)
        self.ranks = [Trainer(self.plan, self.log, rank, model) for rank in range(ranks)]
        for trainer in self.ranks:
            trainer.begin(Unit("step", 99))
        self.as_graph(False)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def choose(self, *of: Any) -> Any:
        return of[int(self.rng.integers(len(of)))]

    def as_graph(self, graph: bool) -> None:
        for trainer in self.ranks:
            trainer.plan = replace(self.plan, graph=graph)

    def run(self, network: Network, names: Kernels, times: float = 1, **longer: float) -> None:
        """Launch kernels; ``longer`` are factors of those whose names contain a word."""
        ids = np.array([self.log.name(name) for name in names])
        ns = network.ns(names) * times
        for word, factor in longer.items():
            ns = ns * np.where([word in name for name in names], factor, 1.0)
        for trainer in self.ranks:
            work = Work(ids, np.maximum(ns, 900).astype(np.int64))
            trainer.launch(work, trainer.main, trainer.gpu)

    def copy(self, size: int, kind: Kind = Kind.H2D) -> None:
        for trainer in self.ranks:
            trainer.copy(kind, size, max(1_200, size // 20), COMPUTE)
            trainer.python(trainer.plan.python_ns)

    def read(self) -> None:
        """Read a few bytes, and wait for them."""
        for trainer in self.ranks:
            trainer.read_loss()

    def synchronize(self) -> None:
        for trainer in self.ranks:
            trainer.synchronize()

    def pause(self, ns: float) -> None:
        for trainer in self.ranks:
            trainer.python(int(ns))

    def reduce(self) -> None:
        """Sum gradients over the ranks."""
        if len(self.ranks) > 1:
            group = [collectives.issue(trainer, trainer.main) for trainer in self.ranks]
            collectives.complete(group, 200_000)
            for trainer in self.ranks:
                collectives.join(trainer)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """A range of the host's around what is done; none where the name is empty."""
        begins = [trainer.main.now for trainer in self.ranks]
        yield
        for trainer, begin in zip(self.ranks, begins, strict=True):
            trainer.python(2_000)
            if name:
                trainer.main.range(name, begin)

    @contextmanager
    def turn(self, sort: str, name: str = "") -> Iterator[None]:
        """A turn of a loop; of a recording that is cut, those count that lie in it."""
        first = self.ranks[0]
        begin = max(first.main.now, first.gpu.free.get(COMPUTE, 0))
        with self.named(name):
            yield
        turn = begin, first.gpu.free[COMPUTE]
        self.turns.setdefault(sort, []).append(turn)

    def recording(self) -> Recording:
        """Everything done, but for a share at either end where the recording is cut."""
        log, cut = self.log, self.cut
        tables = {
            name: log.table(dtype)
            for name, dtype in (("ops", OP), ("api", API), ("sync", SYNC), ("osrt", OSRT),
                                ("nvtx", NVTX), ("states", STATES), ("collectives", COLLECTIVES))
        }  # fmt: skip
        ops = tables["ops"]
        span = int(ops["start"].min()), int(ops["end"].max())
        low, high = span[0] + cut * (span[1] - span[0]), span[1] - cut * (span[1] - span[0])
        for sort, spans in self.turns.items():
            inside = [low <= begin and end <= high for begin, end in spans]
            seen = [begin < high and end > low for begin, end in spans]
            whole = sum(inside) if cut else len(spans)
            self.counts[sort] = range(whole, max(whole, sum(seen)) + 1)

        def kept(table: Table) -> Table:
            return table[(table["start"] >= low) & (table["end"] <= high)] if cut else table

        processes = tuple(
            Process(t.rank, t.pid, ((t.gpu.device, t.gpu.gpu),), ((t.pid, "python"),))
            for t in self.ranks
        )
        tables = {name: kept(table) for name, table in tables.items()}
        return Recording(
            self.plan, processes, tuple(log.names), **tables, truth=Truth((), {}, {}, {})
        )


@dataclass(frozen=True)
class Program:
    """A recorded program: its kind, the turns that may be counted, and the layers within one."""

    kind: str
    counts: tuple[int, ...]
    layers: int
    recording: Recording
    nvtx: tuple[str, ...] = ("step", "nccl")
    profiled: bool = False
    """True where PyTorch's profiler wrote it."""


def _start(run: Played, network: Network, *, upload: bool) -> None:
    """Load libraries, make the weights or bring them."""
    for trainer in run.ranks:
        for _ in range(int(run.rng.integers(2, 9))):
            trainer.main.call("cuLibraryLoadData", int(run.rng.integers(200_000, 3_000_000)))
            trainer.python(30_000)
        for _ in range(3):
            trainer.main.call("cudaMalloc_v3020", 300_000)
    fills = (_AT + "distribution_elementwise_grid_stride_kernel<float, 4>",
             _ELEMENTWISE.format("FillFunctor<float>"))  # fmt: skip
    if upload:
        for _ in range(network.layers * 4):
            run.copy(int(run.rng.integers(4, 64)) * 65_536)
    else:
        run.run(network, fills * network.layers * 2)
    run.synchronize()


def training(seed: int) -> Program:
    if seed % 2:
        plan = random_plan(10_000 + seed)
        recording = simulate(plan)
        whole = [w for w in recording.truth.windows if w.whole and w.phase in ("warmup", "steady")]
        count = sum(w.rank == 0 for w in whole)
        ranges = ("nccl",) if plan.input_copies else ("nccl", "data")
        return Program("training", (count,), plan.layers, recording, ranges)
    run = Played(seed, 1)
    network = Network(run.rng, run.choose(*TRAINED))
    way, names = (
        int(run.rng.integers(len(OPTIMIZERS))),
        run.choose(
            "", "", "step {}", "train_step", "iteration {}", "epoch 0 step {}", "ProfilerStep#{}"
        ),
    )
    steps, inputs, micro = int(run.rng.integers(5, 30)), run.choose(0, 1, 1, 2), run.choose(1, 1, 3)
    if way >= _UNNAMED and not names:
        inputs, micro = max(inputs, 1), 1  # Nothing else could show where an update is.
    parts, reads = run.chance(0.3), run.chance(0.5)
    if run.chance(0.5):
        _start(run, network, upload=run.chance(0.3))
    for step in range(steps):
        with run.turn("turn", names.format(step)):
            for _ in range(micro):
                run.pause(run.choose(0, 2e5))
                for index in range(inputs):
                    run.copy(65_536 if index else 1 << 20)
                with run.named("forward" * parts):
                    run.run(network, network.forward() + network.tail)
                with run.named("backward" * parts):
                    run.run(network, network.backward(), 1.2)
            run.reduce()
            with run.named("optimizer" * parts):
                run.run(network, network.update(way))
            if reads:
                run.read()
    return _made("training", network, run, "turn", profiled="Profiler" in names)


def _made(kind: str, network: Network, run: Played, *sorts: str, profiled: bool = False) -> Program:
    """Return a program, whose turns may be counted as any of some sorts: ``token``, or ``prompt
    token``. A turn that the edge of a recording cuts may count or not.
    """
    recording = run.recording()
    counts: list[int] = []
    for either in sorts:
        of_sorts = [run.counts[sort] for sort in either.split() if sort in run.counts]
        counts += range(sum(c[0] for c in of_sorts), sum(c[-1] for c in of_sorts) + 1)
    return Program(kind, tuple(dict.fromkeys(counts)), network.layers, recording, profiled=profiled)


def evaluation(seed: int) -> Program:
    run = Played(seed, 2)
    network = Network(run.rng, run.choose(*TRAINED))
    names = run.choose("", "", "", "val_step {}", "eval batch {}", "inference", "ProfilerStep#{}")
    batches, copies = int(run.rng.integers(4, 40)), run.choose(0, 1, 1, 2)
    reads = run.chance(0.5) or not copies
    graph, layers = copies and run.chance(0.15), run.chance(0.2)
    if run.chance(0.5):
        _start(run, network, upload=run.chance(0.5))
    for batch in range(batches):
        last = 0.6 if batch == batches - 1 and run.chance(0.5) else 1.0
        # Passes before a graph is captured may count as its warm-up.
        with run.turn("eager" if graph and batch < 2 else "turn", names.format(batch)):
            run.pause(run.choose(0, 3e5))
            for index in range(copies):
                run.copy(4_096 if index else 1 << 20)
            run.as_graph(graph and batch > 1)  # Captured while the first ones run.
            with run.named("layer 3" * layers):
                run.run(network, network.forward(), last)
            run.as_graph(False)
            if reads:
                run.run(network, (_AT + "reduce_kernel<512, 1, ArgMaxOps<float>>",))
                run.read()
    sorts = ("turn", "eager turn")
    return _made("evaluation", network, run, *sorts, profiled="Profiler" in names)


def one_pass(seed: int) -> Program:
    run = Played(seed, 3)
    run.cut = 0
    network = Network(run.rng, run.choose(*TRAINED))
    both, updates, layers = run.chance(0.5), run.chance(0.4), run.chance(0.3)
    if run.chance(0.7):
        _start(run, network, upload=run.chance(0.6))
    if run.chance(0.5):
        run.copy(1 << 20)
    with run.turn("turn", run.choose("", "", "forward", "pass")):
        layer = network.layer(network.attention, network.style.products)
        run.run(network, network.forward()[:1])
        for index in range(network.layers):
            with run.named(run.choose("layer {}", "block.{}").format(index) if layers else ""):
                run.run(network, layer)
        run.run(network, network.forward()[-2:] + network.tail)
    if both:
        with run.named(run.choose("", "backward")):
            run.run(network, network.backward(), 1.1)
        if updates:
            with run.named(run.choose("", "optimizer")):
                run.run(network, network.update(int(run.rng.integers(4))))
    run.read()
    return _made("pass", network, run, "turn")


class Engine:
    """A network that generates: a pass over the prompt, then one pass a token."""

    def __init__(self, run: Played) -> None:
        self.run = run
        style, self.prompt, self.token, self.products = run.choose(*ENGINES)
        self.network = Network(run.rng, style, self.prompt, most=16)
        self.graph = style.norm.startswith("void vllm") and run.chance(0.5)
        self.logits = run.chance(0.3)
        self.pick = run.choose(
            (_AT + "reduce_kernel<512, 1, ArgMaxOps<float>>",),
            ("void at::native::radixSortKVInPlace<-2, -1, 128>",
             "void cunn_SoftMaxForward<4, float>",
             _AT + "distribution_elementwise_grid_stride_kernel<exponential>",
             _AT + "reduce_kernel<512, 1, ArgMaxOps<float>>"),
        )  # fmt: skip

    def answer(self, tokens: int, prefill: str = "", decode: str = "") -> None:
        """Generate so many tokens, of which the pass over the prompt makes the first."""
        run, network, length = self.run, self.network, int(self.run.rng.integers(50, 900))
        with run.turn("prompt", prefill):
            run.copy(8 * length)
            run.run(network, network.forward(), 1 + length / 200)
            self.sample()
        kernels = network.forward(self.token, self.products)
        for token in range(1, tokens):
            with run.turn("token", decode.format(token)):
                grown = (length + token) / length
                run.as_graph(self.graph)
                run.run(network, kernels, 1, attn=grown, flash=grown, Cat=grown, Decode=grown)
                run.as_graph(False)
                self.sample()

    def sample(self) -> None:
        self.run.run(self.network, self.pick)
        if self.logits:
            self.run.copy(128_256, Kind.D2H)
        self.run.read()


def generation(seed: int) -> Program:
    run = Played(seed, 4)
    engine = Engine(run)
    prefill, decode, around = run.choose(
        ("", "", ""), ("", "", ""), ("prefill", "decode", ""), ("Prefill", "decode step {}", ""),
        ("", "", "generate"), ("", "decode_step_{}", ""),
    )  # fmt: skip
    requests, tokens = run.choose(1, 1, 2, 5), int(run.rng.integers(8, 50))
    if run.chance(0.4):
        _start(run, engine.network, upload=run.chance(0.6))
    for _ in range(requests):
        with run.turn("request", around):
            engine.answer(tokens, prefill, decode)
    sorts = ("token", "prompt token", *["request"] * (requests >= 3))
    return _made("generation", engine.network, run, *sorts)


_RL_RANGES: Final[tuple[dict[str, str], ...]] = (
    {},
    {},
    {"turn": "step {}", "roll": "gen", "reward": "reward", "ref": "ref", "update": "update_actor"},
    {"roll": "generate_sequences", "ref": "compute_log_prob", "update": "update_actor"},
    {"roll": "rollout", "reward": "reward", "update": "update"},
    {"roll": "make_experience", "update": "ppo_train"},
    {"turn": "GRPO step {}", "roll": "generate", "update": "train"},
)
"""Ranges of a turn and its phases, as programs name them."""


def rl(seed: int) -> Program:
    run = Played(seed, 5)
    engine, ranges = Engine(run), run.choose(*_RL_RANGES)
    network = Network(run.rng, run.choose(EAGER, HALF, COMPILED), most=16)
    turns, updates, answers = int(run.rng.integers(4, 9)), run.choose(1, 1, 2, 4), run.choose(1, 2)
    way, host_reward = int(run.rng.integers(4)), run.chance(0.5)

    def named(phase: str, turn: int = 0) -> Any:
        return run.named(ranges[phase].format(turn)) if phase in ranges else nullcontext()

    if run.chance(0.5):
        _start(run, network, upload=True)
    for turn in range(turns):
        with run.turn("turn"), named("turn", turn):
            with named("roll"):
                for _ in range(answers):
                    engine.answer(int(run.rng.integers(10, 24)))
            with named("reward"):
                if host_reward:
                    run.pause(2e6)
                else:
                    run.copy(16_384)
                    run.run(network, network.forward())
                    run.read()
            with named("ref"):
                run.copy(16_384)
                run.run(network, network.forward())
            with named("update"):
                for _ in range(updates):
                    run.copy(32_768)
                    run.run(network, network.forward() + network.tail)
                    run.run(network, network.backward(), 1.2)
                    run.reduce()
                    run.run(network, network.update(way))
                run.read()
            with named("sync"):
                run.run(network, (_CAST,) * 2 * network.layers)
                run.synchronize()
    return _made("rl", engine.network, run, "turn")


def benchmark(seed: int) -> Program:
    run = Played(seed, 6)
    network = Network(run.rng, run.choose(*TRAINED))
    warm, names = run.choose(
        ("Warm-up Step {}", "Forward"), ("warmup", "benchmark"), ("warmup_{}", "timed_iter_{}"),
        ("", "bench_iter_{}"), ("warm up", "run {}"), ("Warmup", "measure"), ("", "trial {}"),
    )  # fmt: skip
    what = run.choose("product", "forward", "both", *["all"] * bool(warm))
    warming, measured = int(run.rng.integers(2, 6)) if warm else 0, int(run.rng.integers(5, 25))
    run.cut *= what != "all"
    if run.chance(0.5):
        _start(run, network, upload=False)

    def work() -> None:
        if what == "product":
            run.run(network, network.style.products[:1])
            return
        run.run(network, network.forward())
        if what != "forward":
            run.run(network, network.backward(), 1.2)
        if what == "all":
            run.run(network, network.update(0))

    flush = run.chance(0.2)
    for turn in range(warming + measured):
        name = warm if turn < warming else names
        number = turn if turn < warming else turn - warming
        if flush:
            run.run(network, (_ELEMENTWISE.format("FillFunctor<int>"),))
        with run.turn("warm" if turn < warming else "turn", name.format(number)):
            work()
            run.synchronize()
    return _made("benchmark", network, run, "turn")


def start_up(seed: int) -> Program:
    run = Played(seed, 7)
    run.cut = 0
    network = Network(run.rng, run.choose(*TRAINED))
    for _ in range(run.choose(1, 1, 2)):
        _start(run, network, upload=run.chance(0.5))
    for trainer in run.ranks:
        for _ in range(int(run.rng.integers(3, 10))):
            trainer.main.call("cuModuleLoadData", int(run.rng.integers(2_000_000, 9_000_000)))
            trainer.python(100_000)
    run.run(network, (_ELEMENTWISE.format("FillFunctor<float>"),) * 2)
    return _made("start-up", network, run, "turn")


PROGRAMS: Final[dict[str, Callable[[int], Program]]] = {
    "training": training,
    "evaluation": evaluation,
    "pass": one_pass,
    "generation": generation,
    "rl": rl,
    "benchmark": benchmark,
    "start-up": start_up,
}
