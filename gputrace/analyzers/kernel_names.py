"""Families of kernels and use of tensor cores, known by kernel names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

FAMILIES: Final = (
    "communication",
    "optimizer",
    "layout",
    "attention",
    "normalisation",
    "convolution",
    "gemm",
    "reduction",
    "elementwise",
    "other",
)

_COMMUNICATION: Final = re.compile(
    r"""
    (?<![A-Za-z])                # at the start of a word, or after the length in a mangled name
    (?: nccl\w*Kernel            # NCCL and RCCL: ncclKernel_…, ncclDevKernel_…, ncclSymkDevKernel_…
      | rccl\w*Kernel
      | msccl(?:pp)?\w*          # Microsoft's collectives
      | nvshmem\w*
      | cross_device_reduce\w*   # vLLM's own
    )
    # PyTorch's symmetric memory, TensorRT-LLM:
    | all_?reduce | all_?gather | reduce_?scatter | all_?to_?all
    """,
    re.VERBOSE | re.IGNORECASE,
)

_OPTIMIZER: Final = re.compile(
    r"multi_tensor_apply|foreach|fused_?optim|optimizer"
    r"|ada(m|grad|delta|max|factor)|(?<![a-z])r?rmsprop|(?<![a-z])lamb(?![a-z])"
    r"|(?<![a-z])lars(?![a-z])|(?<![a-z])lion(?![a-z])|(?<![a-z])sgd"
    r"|apply_?(gradient|momentum)|momentum_?(sgd|update)",
    re.IGNORECASE,
)
"""Kernels of optimizers: PyTorch's foreach and fused ones, apex, DeepSpeed, TensorFlow's
Apply…, MXNet's …_update, Chainer's."""

_NOT_OPTIMIZER: Final = re.compile(r"CopyFunctor|ZeroFunctor|LpNorm|_copy_|zero_")
"""Optimizer-like kernels that end no step: gathering shards, zeroing gradients, their norm."""

_CONVERSION: Final = re.compile(
    r"nc\w?hw\w{0,4}(to|2)\w?nhwc|n\w?hwc\w{0,4}(to|2)\w?nc\w?hw|ncdhw.?to|ndhwc.?to"
    r"|swapdimension\dand\d|shuffleintensor3|batch_transpose|(?<!conv)(?<!conv_)(?<!cast_)transpose(?!d)",
    re.IGNORECASE,
)
"""Kernels that only turn a tensor's layout into another one."""
_LAYOUT: Final = re.compile(r"nhwcaddpadding|tensorformat|format_?convert|permute", re.IGNORECASE)
"""Others that lay a tensor out: padding channels, for one."""

_RULES: Final = (
    ("attention", r"flash|fmha|attention|(?<![a-z])(sdpa|attn)|(?<![a-z])(mha|sage)_"),
    (
        "normalisation",
        r"batch_?norm|layer_?norm|group_?norm|instance_?norm|rms_?norm|(?<![a-z])bn_(fw|bw)"
        r"|rowwisemoments|gammabeta|computeinternalgradients|computegradientfusedparams"
        r"|computefusedparams|(?<![a-z])lrn",
    ),
    (
        "convolution",
        r"fprop|dgrad|wgrad|(?<![a-z])conv(?!ert)|convol|winograd|scudnn|cudnn_|im2col|col2im"
        r"|cudnn::cnn|cask_|im2d2col|igemm_(fwd|bwd|wrw)|computeb?offsets|implicit_gemm|explicit_gemm",
    ),
    (
        "gemm",
        r"gemm|gemv|nvjet|(?<![a-z])cijk_|cutlass|splitkreduce|cublas|xmma|matmul|(?<![a-z])dot_kernel"
        r"|(?<![a-z])bmm|wgmma|(?<![a-z])mma_|triton_tem_|cublasdot",
    ),
    (
        "reduction",
        r"reduc(e|tion)|softmax|arg_?(max|min)|cumsum|scan|sort|topk|pool|loss|criterion|triton_(red|per)"
        r"|(?<![a-z])(sum|mean|norm)(?![a-z])",
    ),
    (
        "elementwise",
        r"elementwise|pointwise|eigenmetakernel|fusion|triton_poi|fill|copy|catarray|gather"
        r"|scatter|index|embedding|dropout|random|philox|distribution|convert|scale|op_?tensor"
        r"|cast_transpose|activation|relu|bias|tanh|sigmoid|arange|mxnet_op|cupy_|set_?value|memset|masked",
    ),
)
"""Patterns of the rest, the first that matches; compiled when a name is first asked for."""


def is_communication(kernel: str) -> bool:
    """Return whether a kernel's name, demangled or not, is that of a collective or a send/receive.

    Only the function's own name counts, not the types among its template arguments.
    """
    return _COMMUNICATION.search(kernel.partition("<")[0] or kernel) is not None


def is_optimizer(kernel: str) -> bool:
    """Return whether a kernel is an optimizer's, by its name."""
    return bool(_OPTIMIZER.search(kernel) and not _NOT_OPTIMIZER.search(kernel))


def family_of(name: str) -> str:
    """The one of `FAMILIES` that a kernel belongs to by its name; ``other`` where none is told."""
    if is_communication(name):
        return "communication"
    if is_optimizer(name):
        return "optimizer"
    if converts_layout(name) or _LAYOUT.search(_plain(name)):
        return "layout"
    own = bare_name(name)
    return next((family for family, rule in _RULES if re.search(rule, own, re.IGNORECASE)), "other")


def converts_layout(name: str) -> bool:
    """Return whether a kernel only converts a tensor's layout."""
    return _CONVERSION.search(_plain(name)) is not None


_FUSED: Final = re.compile(r"triton_[a-z]{3}_fused_")
_MOVING: Final = re.compile(
    r"triton_poi_fused_(_*(unsafe_view|transpose|permute|clone|view|reshape|contiguous|t)(?![a-z]))+"
    r"_*\d*"
)
"""Inductor's fused kernels, whose names list what they do, and those that only move data."""


def _plain(name: str) -> str:
    """Return the function's own name; empty for kernels in whose names layouts are no purpose:
    CUTLASS's, whose types name them, and fused ones that compute as well.
    """
    own = function_name(name)
    computes = "cutlass" in own or (_FUSED.match(own) and not _MOVING.fullmatch(own))
    return "" if computes else own


_UNNAMED: Final = re.compile(r"(\(anonymous namespace\)|<unnamed>|\{anonymous\})::")
_RETURNS: Final = re.compile(r"^(std::enable_if<.*?>::type|void|bool|int)\s+")
_WRAPPER: Final = re.compile(r"(^|::)(Kernel2?|device_kernel|GemmUniversal|run_kernel|kernel)$")
"""Functions of CUTLASS that carry the name of the kernel proper as a template argument."""
_CUTLASS: Final = re.compile(r"cutlass\w*_(tensorop|simt|wmma)\w*|cutlass\w*?_\d+_\w+")
_TEMPLATE: Final = re.compile(r"\w+(?=<)")
_INSIDE: Final = re.compile(r"\w*(Functor\w*|_kernel_cuda|_kernel_impl|Ops)\b")
"""Operation of an elementwise or reducing kernel of PyTorch, among its template arguments."""

_LONGEST: Final = 120


def function_name(name: str) -> str:
    """The function's name with its namespaces, without types and arguments."""
    return re.split(r"[<(]", _bare(name), maxsplit=1)[0].strip()


def bare_name(name: str) -> str:
    """Return the `function_name`, but keep the types of CUTLASS's wrappers, which say what they
    are.
    """
    own = function_name(name)
    return _bare(name) if not own or _WRAPPER.search(own) else own


def _bare(name: str) -> str:
    return _RETURNS.sub("", _UNNAMED.sub("", name))


def short_name(name: str) -> str:
    """A name for people: ``vectorized_elementwise: CUDAFunctor_add``."""
    bare, own = _bare(name), function_name(name)
    inside = bare[len(own) + 1 :]
    if _WRAPPER.search(own):
        known = _CUTLASS.search(inside) or _TEMPLATE.search(inside)
        return known[0] if known else bare[:_LONGEST]
    found = _INSIDE.search(inside)
    base = own.rsplit("::", 1)[-1] or bare
    told = f"{base.removesuffix('_kernel')}: {found[0]}" if found else base
    return told[:_LONGEST]


PRODUCTS: Final = ("gemm", "convolution", "attention")
"""Families whose kernels multiply matrices."""

_HELPER: Final = re.compile(
    r"splitk_?reduce|reducesplitk|reduce_wgrad|reduce_1block|offsets|im2col|col2im|workspace"
    r"|winograd(Forward|Wgrad|Dgrad)?(Data|Filter|Output|Delta)|generatewinograd|precompute_indices"
    r"|gemv|dot_kernel|depthwise|dwconv|scalepacked|converttensor",
    re.IGNORECASE,
)
"""Kernels beside a product: they prepare or sum up, or multiply by a vector, channel by channel."""

_NO: Final = re.compile(r"ffma|dfma|simt", re.IGNORECASE)
_YES: Final = re.compile(
    r"tensorop|wmma|hmma|imma|dmma|gmma|tcgen05|nvjet|warpgroup|tensor\d+x\d+x\d+|_tensor1688"
    r"|[hsicbf]?(?<!\d)(884|8816|8832|1688|16816|16832|161616)(?!\d)|tf32|first_layer_wgrad_kernel"
    r"|conv2d_c1_k1|dgrad_1x1_stride_2x2|flash_(fwd|bwd)|flash_attn|sdpa_sm\d"
    r"|fmha_cutlass[fb]_b?f16\w*sm(7|8|9)",
    re.IGNORECASE,
)
_PLAIN: Final = re.compile(
    r"[sdchz]gemm|scudnn|convolve_[sd]gemm|(dgrad|wgrad|fprop|dgrad2d|wgrad2d)\w*_engine|wgrad_alg\d"
    r"|convolve_common_engine|winograd|fmha_cutlass[fb]_f32\w*sm50",
    re.IGNORECASE,
)

_HALF: Final = re.compile(
    r"half|bfloat16|(?<![a-z])b?f16|fp16|bf16|e4m3|e5m2|hgemm|nvjet_(sm\d+_)?[htq]", re.IGNORECASE
)
_DOUBLE: Final = re.compile(r"double|(?<![a-z])d(gemm|fma)|(?<![a-z])[fd]64|zgemm", re.IGNORECASE)
_SINGLE: Final = re.compile(
    r"float|f32|tf32|sgemm|scudnn|(?<![a-z])s\d+gemm|nvjet_(sm\d+_)?s", re.IGNORECASE
)

_WITHOUT: Final = re.compile(
    r"(?<![a-z0-9])(K[248]0|M[46]0?|P(4|6|40|100)|GTX|GT ?\d+|TITAN (X|Xp|Black|Z)|Quadro [KMP]\d+"
    r"|Tesla [CKMP]\d+|MX\d+|T(4|5|6|10|12|20)00|Jetson (TX|Nano|TK))(?![0-9])",
    re.IGNORECASE,
)
"""Cards older than Volta, and the small ones of Turing, which have no tensor cores."""
_VOLTA: Final = re.compile(
    r"V100|TITAN V|GV100|(?<![a-z0-9])T4(?![0-9])|T40|RTX 20\d\d|TITAN RTX|Quadro RTX|Xavier",
    re.IGNORECASE,
)
"""Volta and Turing: tensor cores for fp16, none for TF32 and bf16."""
_AMPERE: Final = re.compile(
    r"(?<![a-z0-9])(A|L|H|B|GB|GH)\d{1,3}[a-z]?(?![0-9])|RTX ([3-9]0\d\d|A\d|PRO|\d{4} Ada)"
    r"|Orin|Thor",
    re.IGNORECASE,
)
"""Ampere and newer."""
_NEWER_KERNEL: Final = re.compile(r"(?<![a-z0-9])(ampere_|sm(8\d|9\d|1\d\d)_|nvjet)|tf32", re.I)
_VOLTA_KERNEL: Final = re.compile(_NEWER_KERNEL.pattern + r"|(?<![a-z0-9])(volta|turing)_", re.I)
"""Kernels built for compute capability 8.0, and 7.0: they run on no older card."""


def on_tensor_cores(name: str, family: str) -> str | None:
    """``yes``, ``no`` or ``unknown``; None of a kernel that multiplies no matrices."""
    if family not in PRODUCTS or _HELPER.search(bare_name(name)):
        return None
    if _NO.search(name):
        return "no"
    if _YES.search(name):
        return "yes"
    return "no" if _PLAIN.search(name) else "unknown"


def precision_of(name: str) -> str:
    """Return the precision of what is multiplied: ``half``, ``fp32``, ``fp64``, or ``unknown``."""
    rules = (("half", _HALF), ("fp64", _DOUBLE), ("fp32", _SINGLE))
    return next((precision for precision, rule in rules if rule.search(name)), "unknown")


def generation(card: str, kernels: Iterable[str] = ()) -> int | None:
    """Return the tensor-core generation of a card: 0 no tensor cores, 7 for fp16, 8 for TF32 and
    bf16 too.

    By the card's model; where that is not known, by kernels that run on newer cards alone. None
    where neither tells.
    """
    for told, rule in ((0, _WITHOUT), (7, _VOLTA), (8, _AMPERE)):
        if rule.search(card):
            return told
    telling = [name for name in kernels if _VOLTA_KERNEL.search(name)]
    if any(_NEWER_KERNEL.search(name) for name in telling):
        return 8
    return 7 if telling else None
