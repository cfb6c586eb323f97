"""What a kernel does, by its name: one table of rules, the first that fits counts.

The names are those of

- cuBLAS and cuDNN: ``ampere_sgemm_…``, ``volta_scudnn_…``, ``sm90_xmma_fprop_…``, ``nvjet_…``,
  ``cudnn::bn_fw_tr_…``, ``cudnn::ops::nchwToNhwcKernel``;
- CUTLASS (its functionality and profiler pages): ``cutlass_80_tensorop_s1688gemm_…``;
- frameworks: PyTorch's ``at::native``, Inductor's ``triton_poi_…``, TensorFlow's
  ``functor::SwapDimension1And2InTensor3…`` and ``EigenMetaKernel``, XLA's ``loop_add_fusion``,
  MXNet's ``mxnet_op``, CuPy's ``cupy_…``.
"""

from __future__ import annotations

import re
from typing import Final

from gputrace.analyzers.classes import is_communication
from gputrace.analyzers.kernels.naming import function_name, own_name
from gputrace.analyzers.steps.anchors import is_optimizer

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

_CONVERSION: Final = re.compile(
    r"nc\w?hw\w{0,4}(to|2)\w?nhwc|n\w?hwc\w{0,4}(to|2)\w?nc\w?hw|ncdhw.?to|ndhwc.?to"
    r"|swapdimension\dand\d|shuffleintensor3|batch_transpose|(?<!conv)(?<!conv_)transpose(?!d)",
    re.IGNORECASE,
)
"""Kernels that only turn a tensor's layout into another one."""
_LAYOUT: Final = re.compile(r"nhwcaddpadding|tensorformat|format_?convert|permute", re.IGNORECASE)
"""Others that lay a tensor out: padding channels, for one."""

_RULES: Final = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        ("attention", r"flash|fmha|attention|(?<![a-z])sdpa|(?<![a-z])mha_"),
        (
            "normalisation",
            r"batch_?norm|layer_?norm|group_?norm|instance_?norm|rms_?norm|(?<![a-z])bn_(fw|bw)"
            r"|rowwisemoments|gammabeta|computeinternalgradients|computegradientfusedparams"
            r"|computefusedparams|(?<![a-z])lrn",
        ),
        (
            "convolution",
            r"fprop|dgrad|wgrad|(?<![a-z])conv(?!ert)|convol|winograd|scudnn|cudnn_|im2col|col2im"
            r"|cudnn::cnn|cask_|computeb?offsets|implicit_gemm|explicit_gemm",
        ),
        (
            "gemm",
            r"gemm|gemv|nvjet|cutlass|splitkreduce|cublas|xmma|matmul|(?<![a-z])dot_kernel"
            r"|(?<![a-z])bmm|wgmma|(?<![a-z])mma_|triton_tem_|cublasdot",
        ),
        (
            "reduction",
            r"reduce|softmax|arg_?(max|min)|cumsum|scan|sort|topk|pool|loss|criterion|triton_(red|per)"
            r"|(?<![a-z])(sum|mean|norm)(?![a-z])",
        ),
        (
            "elementwise",
            r"elementwise|pointwise|eigenmetakernel|fusion|triton_poi|fill|copy|catarray|gather"
            r"|scatter|index|embedding|dropout|random|philox|distribution|convert|scale|op_?tensor"
            r"|activation|relu|bias|tanh|sigmoid|arange|mxnet_op|cupy_|set_?value|memset|masked",
        ),
    )
)


def family_of(name: str) -> str:
    """The one of `FAMILIES` that a kernel belongs to by its name; ``other`` where none is told."""
    if is_communication(name):
        return "communication"
    if is_optimizer(name):
        return "optimizer"
    if converts_layout(name) or _LAYOUT.search(_plain(name)):
        return "layout"
    own = own_name(name)
    return next((family for family, rule in _RULES if rule.search(own)), "other")


def converts_layout(name: str) -> bool:
    """Whether a kernel does nothing but turn a tensor's layout into another one."""
    return _CONVERSION.search(_plain(name)) is not None


def _plain(name: str) -> str:
    """The function's own name; nothing of CUTLASS's kernels, whose types are about layouts."""
    own = function_name(name)
    return "" if "cutlass" in own else own
