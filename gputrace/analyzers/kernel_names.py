"""Families of kernels and use of tensor cores, known by kernel names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

FAMILIES: Final = (
    "communication",
    "optimizer",
    "quantisation",
    "routing",
    "layout",
    "attention",
    "normalisation",
    "convolution",
    "gemm",
    "reduction",
    "elementwise",
    "other",
)
"""Families: ``quantisation`` has casts to and from FP8 and the like, with their maxima and scales;
``routing``, the choice of experts and the ordering of tokens by them."""

_COMMUNICATION: Final = re.compile(
    r"""
    (?<![a-z])                   # at the start of a word, or after the length in a mangled name
    (?: nccl\w*kernel            # NCCL and RCCL: ncclKernel_…, ncclDevKernel_…, ncclSymkDevKernel_…
      | rccl\w*kernel
      | msccl(?:pp)?\w*          # Microsoft's collectives
      | nvshmem\w* | rocshmem\w*
      | cross_device_reduce\w*   # vLLM's own
      | k?userbuffers_\w+        # Transformer Engine, below tensor-parallel products
      | deep_ep\W*\d*(?:intranode|internode|legacy|elastic)\w*\W*\d*(?!clean|get_dispatch_layout)
      | (?:intra|inter)node\w*\W*\d*(?:cached_notify|notify|dispatch|combine)  # its forks
      | (?:moe)?a2a_?(?:dispatch|combine)\w*
      | hybrid_ep\W*\d*(?:dispatch|combine)
      | ep(?:dispatch|combine)\w*          # MoRI
    )
    # PyTorch's symmetric memory, TensorRT-LLM:
    | all_?reduce | all_?gather | reduce_?scatter | all_?to_?all | symm(?:etric)?_mem(?:ory)?
    """,
    re.VERBOSE,
)

_FUSED: Final = re.compile(r"triton_(poi|red|per|for|tem|spl|mm)_fused_")
"""Inductor's fused kernels: their names list the operations they stem from, neighbours included."""

_OPTIMIZER: Final = re.compile(
    r"multi_tensor_apply|foreach|triton_for_fused|fused_?optim|optimizer"
    r"|triton_[a-z]{3}_fused_\w*(addcdiv|addcmul\w*sqrt|lerp\w*sqrt)"
    r"|(?<!h)ada(m|grad|delta|max|factor)|(?<![a-z])r?rmsprop|(?<![a-z])lamb(?![a-z])"
    r"|(?<![a-z])lars(?![a-z])|(?<![a-z])lion(?![a-z])|(?<![a-z])sgd"
    r"|apply_?(gradient|momentum)|momentum_?(sgd|update)"
)
"""Kernels of optimizers: PyTorch's foreach and fused ones, Inductor's, apex, DeepSpeed,
TensorFlow's Apply…, MXNet's …_update, Chainer's."""

_NOT_OPTIMIZER: Final = r"CopyFunctor|::Copy<|ZeroFunctor|LpNorm|_copy_|zero_|_l2norm"
"""Optimizer-like kernels that end no step: gathering shards, zeroing gradients, their norm."""

_CONVERSION: Final = (
    r"nc\w?hw\w{0,4}(to|2)\w?nhwc|n\w?hwc\w{0,4}(to|2)\w?nc\w?hw|ncdhw.?to|ndhwc.?to"
    r"|swapdimension\dand\d|shuffleintensor3|batch_transpose|transpose(?!d)"
)
"""Kernels that only turn a tensor's layout into another one."""

_RULES: Final = (
    (
        "elementwise",
        r"reshape_and_cache|_kv_?cache|kv_indices|concat_mla|permute_(\dd|indices_weights|pooled)",
    ),
    ("quantisation", r"hadamard|rht_gemm|row_cast_col"),
    (
        "attention",
        r"flash(?!infer)|fmha|attention|(?<![a-z])(sdpa|attn|mha|mla)|sage_(?!quant)|fused_?attn"
        r"|compute_dot_do_o|convert_dq|batch(prefill|decode)|bwd_kernel_(fuse|d[kq])|bwd_preprocess"
        r"|context_parallel::thd|mergestate",
    ),
    (
        "convolution",
        r"fprop|dgrad|wgrad|(?<![a-z])conv(?!ert)|convol|winograd|scudnn|cudnn_(?!generated)"
        r"|im(\dd)?2(\dd)?col|im\dd2col|col2im|vol2col|col2vol|cudnn::cnn|cask_|computeb?offsets"
        r"|asmconv|igemm_(fwd|bwd|wrw)|implicit_gemm|explicit_gemm|xdlops_bwd_weight|fft2d_[rc]2[rc]",
    ),
    (
        "gemm",
        r"(?<!fb)gemm|gemv|nvjet|(?<![a-z])cijk_|cutlass|splitkreduce|cublas|matmul|mul_mat"
        r"|xmma(?!_pooling)"
        r"|(?<![a-z])(bmm|wgmma|mma_|fmoe|dot_kernel)|scaled_mm|fused_moe_kernel|moe_(vec_)?q\d"
        r"|marlin(?!_repack)|epilogue::impl",
    ),
    (
        "normalisation",
        r"batch_?norm|layer_?norm|group_?norm|instance_?norm|rms_?norm|(?<![a-z])bn_(fw|bw)"
        r"|rowwisemoments|gammabeta|computeinternalgradients|computegradientfusedparams|cucomputegrad"
        r"|compute(backward)?fusedparams|(?<![a-z])(lrn|ln_(fwd|bwd))|normali[sz]ation|qknorm",
    ),
    (
        "quantisation",
        r"quant(?!ile)|cast_(and_)?transpose|amax|absmax|downcast|fp8\w*(cast|qparam|to_float)"
        r"|cast\w*fp[48]|to_fp[48]|nvfp4|mxfp8|block_scal|swizzle|scale_inv|compute_scale|partial_cast"
        r"|fp8_to|zero_scales|repack|reconstruct_(gptq|exllama)",
    ),
    (
        "routing",
        r"(?<![a-z])moe(?!m)|routing|(?<![a-z])router|expert|topk_?(gating|sigmoid|forward|with)"
        r"|topk_?softmax|grouped_topk|fused_topk|(un)?permute_(kernel|mask|row|with)|row_id_map"
        r"|sort_chunks|chunk_sort|bitmatrix|get_dispatch_layout",
    ),
    ("layout", _CONVERSION + r"|nhwcaddpadding|tensorformat|format_?convert|permute"),
    (
        "reduction",
        r"reduc(e|tion)|softmax|arg_?(max|min)|cumsum|scan|(?<!ten)sort|topk|pool|loss|criterion"
        r"|(?<![a-z])(sum|mean|norm)(?![a-z])|onesweep|partition_kernel|radix|histogram|lpnorm|l2norm"
        r"|cross_?entropy|device(select|compactinit)|trampoline_kernel",
    ),
    (
        "elementwise",
        r"elementwise|pointwise|eigenmetakernel|fusion|fill|copy|catarray|chunk_cat|gather"
        r"|scatter|index|embedding|dropout|random|philox|distribution|convert|scale|op_?tensor"
        r"|(?<![a-z])d?(gated|act(?![a-z])|pad|rope|axpy|scal(?![a-z])|unary)|activation|relu|bias|tanh"
        r"|sigmoid|silu|swiglu|gelu|arange|mxnet_op|cupy_|set_?value|memset|masked|upsample|interpolat"
        r"|(replication|reflection)_pad|unpadding|tensortransform|subtensorop|transform_kernel|rotary"
        r"|compute_grad_weight|partial_segment|partials_per_segment|bucketize|offsets_range"
        r"|multi_tensor_apply|position_kernel|token_ids",
    ),
)
"""Patterns of the rest, the first that matches; compiled when a name is first asked for."""

_MATH: Final = tuple(rule for rule in _RULES if rule[0] in ("attention", "convolution", "gemm"))
"""Rules for CUTLASS's wrappers, whose template arguments hold names of all sorts."""

_FUSED_RULES: Final = (
    ("attention", r"triton_tem_.*attention"),
    ("convolution", r"triton_tem_.*conv"),
    ("gemm", r"triton_(tem|mm)_"),
    (
        "layout",
        r"triton_poi_fused_(_*(unsafe_view|transpose|permute|clone|view|reshape|contiguous|t)"
        r"(?![a-z]))+_*\d*$",
    ),
    ("normalisation", r"(layer|group|batch|rms)_?norm|(mean|sum)_\w*rsqrt"),
    ("quantisation", r"triton_(red|per)_\w*abs_\w*amax"),
    ("reduction", r"triton_(red|per|spl)"),
    ("elementwise", ""),
)
"""Patterns of Inductor's fused kernels. Their products are templates; a product or a collective
among the operations of another kernel is that which made its input."""


_LONGEST_READ: Final = 1 << 11
"""Characters of a name that rules look at: some take a time that grows with its square or cube, and
what a real kernel is stands in the first 1,500."""
_MOST_NAMES: Final = 1 << 12
"""Names whose answers are kept: each GPU asks for nearly the same."""


def is_communication(kernel: str) -> bool:
    """Return whether a kernel's name, demangled or not, is that of a collective or a send/receive.

    Only the function's own name counts, not the types among its template arguments. A product that
    gathers its operands or scatters what it makes computes.
    """
    base = (kernel.partition("<")[0] or kernel)[:_LONGEST_READ].lower()
    if _COMMUNICATION.search(base) is None or _FUSED.match(base):
        return False
    return "gemm" not in base and "matmul" not in base


@lru_cache(_MOST_NAMES)
def is_optimizer(kernel: str) -> bool:
    """Return whether a kernel is an optimizer's, by its name."""
    read = kernel[:_LONGEST_READ]
    return bool(_OPTIMIZER.search(read.lower()) and not re.search(_NOT_OPTIMIZER, read))


@lru_cache(_MOST_NAMES)
def family_of(name: str) -> str:
    """Return the family of `FAMILIES` that a kernel's name shows; ``other`` if none."""
    if is_communication(name):
        return "communication"
    if is_optimizer(name):
        return "optimizer"
    base = bare_name(name)
    if _FUSED.match(base.lower()):
        return _first(_FUSED_RULES, base) or "elementwise"
    if _WRAPPER.search(function_name(name)) and "cutlass" in base:
        return _first(_MATH, base) or "gemm"
    # A namespace counts only where the function itself says nothing.
    family = _first(_RULES, base.rsplit("::", 1)[-1]) or _first(_RULES, base) or "other"
    # The functor that PyTorch's general kernels apply, where it says more than they do:
    if family in ("elementwise", "reduction"):
        inside = _bare(name)[len(base) :]
        if "_norm_" in inside or "NormKernelImpl" in inside or "NormBackwardKernelImpl" in inside:
            return "normalisation"
        if "LpNorm" in inside:
            return "reduction"
    return family


def _first(rules: tuple[tuple[str, str], ...], name: str) -> str | None:
    """Return the family of the first rule that a name matches."""
    return next((family for family, rule in rules if _has(rule, name)), None)


def _has(rule: str, text: str) -> bool:
    """Return whether a text's first `_LONGEST_READ` characters match a rule in lower case, which is
    compiled when it is first used: to ignore case would take twice as long.
    """
    return re.search(rule, text[:_LONGEST_READ].lower()) is not None


def converts_layout(name: str) -> bool:
    """Return whether a kernel only converts a tensor's layout."""
    return family_of(name) == "layout" and _has(_CONVERSION, function_name(name))


_UNNAMED: Final = re.compile(r"(\(anonymous namespace\)|<unnamed>|\{anonymous\})::")
_RETURNS: Final = re.compile(r"^(std::enable_if<.*?>::type|void|bool|int)\s+")
_WRAPPER: Final = re.compile(
    r"(^|::)(Kernel2?|device_kernel|GemmUniversal|run_kernel|kernel|kentry)$"
)
"""Wrappers of CUTLASS and AMD's ck_tile, whose kernel proper is a template argument."""
_CUTLASS: Final = r"cutlass\w*_(tensorop|simt|wmma)\w*|cutlass\w*?_\d+_\w+"
_TEMPLATE: Final = r"(?<!\w)(\w+::\w+(?=::Kernel_traits<)|\w+(?=<))"
_INSIDE: Final = re.compile(r"(?<!\w)\w*(Functor\w*|_kernel_cuda|_kernel_impl|Ops)\b")
"""Operation of an elementwise or reducing kernel of PyTorch, among its template arguments."""

_LENGTH: Final = re.compile(r"\d{1,9}")
_LONGEST: Final = 200


def function_name(name: str) -> str:
    """Return the function's name with its namespaces, without types and arguments."""
    return re.split(r"[<(]", _bare(name), maxsplit=1)[0].strip()


def bare_name(name: str) -> str:
    """Return the `function_name`, but keep the types of CUTLASS's wrappers, which say what they
    are.
    """
    function = function_name(name)
    return _bare(name) if not function or _WRAPPER.search(function) else function


def _bare(name: str) -> str:
    """Return the first `_LONGEST_READ` characters of a name without what is no part of it."""
    # AMD's symbol of a kernel's descriptor ends in .kd.
    name = name.removesuffix(".kd")[:_LONGEST_READ]
    if name.startswith("_Z"):
        # A mangled name with its function in clear, `a::b<` and the rest as it is.
        at, parts = 3 if name.startswith("_ZN") else 2, []
        while (digits := _LENGTH.match(name, at)) is not None:
            at = digits.end() + int(digits[0])
            parts.append(name[digits.end() : at])
        return "::".join(part for part in parts if "_GLOBAL__N_" not in part) + "<" + name[at:]
    return _RETURNS.sub("", _UNNAMED.sub("", name))


def short_name(name: str) -> str:
    """Return a name for people: ``vectorized_elementwise: CUDAFunctor_add``."""
    bare, function = _bare(name), function_name(name)
    inside = bare[len(function) + 1 :]
    if _WRAPPER.search(function):
        known = re.search(_CUTLASS, inside) or re.search(_TEMPLATE, inside)
        return known[0] if known else bare[:_LONGEST]
    match = _INSIDE.search(inside)
    base = function.rsplit("::", 1)[-1] or bare
    label = f"{base.removesuffix('_kernel')}: {match[0]}" if match else base
    return label[:_LONGEST]


PRODUCTS: Final = ("gemm", "convolution", "attention")
"""Families whose kernels multiply matrices."""

_HELPER: Final = (
    r"splitk_?reduce|reducesplitk|reduce_wgrad|reduce_1block|offsets|im2col|col2im|workspace"
    r"|winograd(forward|wgrad|dgrad)?(data|filter|output|delta)|generatewinograd|precompute_indices"
    r"|gemv|dot_kernel|depthwise|dwconv|scalepacked|converttensor|_gemm_starts|gemmprecompute"
    r"|compute_dot_do_o|convert_dq|(combine|metadata)\w*_kernel|prepare_|fused_attn::|::thd_"
)
"""Kernels beside a product: they prepare or sum up, or multiply by a vector, channel by channel."""

_NO: Final = r"ffma|dfma|simt"
_YES: Final = (
    r"tensorop|wmma|hmma|imma|dmma|gmma|tcgen05|nvjet|warpgroup|tensor\d+x\d+x\d+|_tensor1688"
    r"|[hsicbf]?(?<!\d)(884|8816|8832|1688|16816|16832|161616)(?!\d)|tf32|first_layer_wgrad_kernel"
    r"|conv2d_c1_k1|dgrad_1x1_stride_2x2|flash_(fwd|bwd)|flash_attn|sdpa_sm\d"
    r"|fmha_cutlass[fb]_b?f16\w*sm(7|8|9)"
)
_PLAIN: Final = (
    r"(?<![a-z])[sdchz]gemm|scudnn|convolve_[sd]gemm|(dgrad|wgrad|fprop|dgrad2d|wgrad2d)\w*_engine|wgrad_alg\d"
    r"|convolve_common_engine|winograd|fmha_cutlass[fb]_f32\w*sm50"
)

_PRECISIONS: Final = (
    # Weights of fewer bits are widened first: the activations say what is multiplied.
    ("bf16", r"(?<![a-z])bf16x(bf16x)?mxfp4|bmm_bfloat16|marlin\w*<__nv_bfloat16"),
    ("fp4", r"nvfp4|mxfp4|e2m1|float_e2m1|(?<![a-z0-9])fp4"),
    ("fp8", r"e4m3|e5m2|fp8|(?<![a-z])f8|qgmma|nvjet_(sm\d+_)?q|cijk_a\w{3}_b\w{3}_[fb]8"),
    ("bf16", r"bf16|bfloat16|df16b|nvjet_(sm\d+_)?t|cijk_a\w{3}_b\w{3}_b(?!8)"),
    ("half", r"native_sdpa\w*_f16"),
    (
        "fp16",
        r"half|(?<![a-z])f16|fp16|hgemm|(?<![a-z])h\d+(gemm|cudnn|fprop|dgrad|wgrad)"
        r"|nvjet_(sm\d+_)?h|cijk_a\w{3}_b\w{3}_h",
    ),
    ("int8", r"int8|imma|i8i8|s8s8|[is]8gemm|cijk_a\w{3}_b\w{3}_i8|mul_mat_q"),
    ("fp64", r"double|(?<![a-z])d\d*(gemm|fma)|(?<![a-z])[fd]64|zgemm|cijk_a\w{3}_b\w{3}_[dz]"),
    ("tf32", r"tf32|xf32|tfloat32|nvjet_(sm\d+_)?s|tensorop_s1688(gemm|fprop|dgrad|wgrad)"),
    ("fp32", r"float|f32|sgemm|scudnn|(?<![a-z])s\d+gemm|gcgemm|cijk_\w*?(?<![a-z])s_?b"),
)
"""Precisions of what is multiplied; ``half`` has 16 bits of either kind. cuBLAS's nvjet names the
types of its operands by a letter each, AMD's Tensile after the layouts."""

SIXTEEN: Final = ("half", "fp16", "bf16")
"""Precisions of 16 bits."""

_WITHOUT: Final = (
    r"(?<![a-z0-9])(k[248]0|m[46]0?|p(4|6|40|100)|gtx|gt ?\d+|titan (x|xp|black|z)|quadro [kmp]\d+"
    r"|tesla [ckmp]\d+|mx\d+|t(4|5|6|10|12|20)00|jetson (tx|nano|tk))(?![0-9])"
)
"""Cards older than Volta, and the small ones of Turing, which have no tensor cores."""
_VOLTA: Final = (
    r"v100|titan v|gv100|(?<![a-z0-9])t4(?![0-9])|t40|rtx 20\d\d|titan rtx|quadro rtx|xavier"
)
"""Volta and Turing: tensor cores for fp16, none for TF32 and bf16."""
_AMPERE: Final = (
    r"(?<![a-z0-9])(a|l|h|b|gb|gh)\d{1,3}[a-z]?(?![0-9])|rtx ([3-9]0\d\d|a\d|pro|\d{4} ada)"
    r"|orin|thor"
)
"""Ampere and newer."""
_NEWER_KERNEL: Final = r"(?<![a-z0-9])(ampere_|sm(8\d|9\d|1\d\d)_|nvjet)|tf32"
_VOLTA_KERNEL: Final = _NEWER_KERNEL + r"|(?<![a-z0-9])(volta|turing)_"
"""Kernels built for compute capability 8.0, and 7.0: they run on no older card."""


def on_tensor_cores(name: str, family: str) -> str | None:
    """``yes``, ``no`` or ``unknown``; None of a kernel that multiplies no matrices."""
    if family not in PRODUCTS or _has(_HELPER, bare_name(name)):
        return None
    if _has(_NO, name):
        return "no"
    if _has(_YES, name):
        return "yes"
    return "no" if _has(_PLAIN, name) else "unknown"


def is_unaligned(name: str, precision: str) -> bool:
    """Return whether a product in 16 bits reads less than eight numbers at a time, as its sizes are
    no multiples of 8: tensor cores then wait for memory.
    """
    return precision in SIXTEEN and _has(r"_(align[ac]?|ldg)[124](?!\d)", name)


def precision_of(name: str) -> str:
    """Return the precision of what is multiplied, of `_PRECISIONS`, or ``unknown``."""
    return _first(_PRECISIONS, name) or "unknown"


def generation(card: str, kernels: Iterable[str] = ()) -> int | None:
    """Return the tensor-core generation of a card: 0 no tensor cores, 7 for fp16, 8 for TF32 and
    bf16 too.

    By the card's model; where that is not known, by kernels that run on newer cards alone. None
    where neither tells.
    """
    for number, rule in ((0, _WITHOUT), (7, _VOLTA), (8, _AMPERE)):
        if _has(rule, card):
            return number
    telling = [name for name in kernels if _has(_VOLTA_KERNEL, name)]
    if any(_has(_NEWER_KERNEL, name) for name in telling):
        return 8
    return 7 if telling else None
