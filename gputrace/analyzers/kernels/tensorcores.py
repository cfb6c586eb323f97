"""Whether a kernel multiplies on tensor cores, and whether a card has some, by names.

What the names say was gathered from

- CUTLASS: the opcode class is part of the name, ``tensorop`` and ``wmma`` against ``simt``, and
  so is the shape of the instruction (``s16816``: m16n8k16, summed in fp32);
- cuBLAS and cuDNN: the same shapes (``h884``, ``s1688``, ``h16816``), ``hmma`` and ``imma``,
  ``tensor16x8x16`` and ``warpgroup`` in xmma's names against ``ffma``; ``sgemm`` and ``scudnn``
  run on the fp32 pipes; ``nvjet`` are Hopper's and newer's products;
- PyProf's and TensorFlow's lists of names that use tensor cores.

xmma alone proves nothing: ``sm80_xmma_gemm_f32f32_…_ffma_…`` does not use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from gputrace.analyzers.kernels.naming import own_name

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
    if family not in PRODUCTS or _HELPER.search(own_name(name)):
        return None
    if _NO.search(name):
        return "no"
    if _YES.search(name):
        return "yes"
    return "no" if _PLAIN.search(name) else "unknown"


def precision_of(name: str) -> str:
    """Of what is multiplied: ``half``, ``fp32``, ``fp64``, or ``unknown``."""
    rules = (("half", _HALF), ("fp64", _DOUBLE), ("fp32", _SINGLE))
    return next((precision for precision, rule in rules if rule.search(name)), "unknown")


def generation(card: str, kernels: Iterable[str] = ()) -> int | None:
    """How a card multiplies: 0 no tensor cores, 7 for fp16, 8 for TF32 and bf16 too.

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
