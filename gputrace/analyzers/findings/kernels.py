"""Findings about what the kernels are: layouts that are turned, products beside tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gputrace.analyzers.findings.facts import MEDIUM, Facts, severity_of
from gputrace.analyzers.kernels import Kernels
from gputrace.analyzers.results import Finding
from gputrace.units import format_ns

_LAYOUT_WORTH: Final = 0.02
"""Part of the time from which turning layouts is worth a word."""
_PRODUCTS_WORTH: Final = MEDIUM
_PRODUCTS_MEDIUM: Final = 0.5
"""Parts of the time that products beside tensor cores take, from which they are told as low and
as medium: another precision is a choice about the training, which a wait for data is not."""
_FASTER: Final = 2
"""Times as fast that products on tensor cores are taken to be: less than any card promises."""
_SHOWN: Final = 2

_KEEP_LAYOUT: Final = {
    "pytorch": "keep one layout: model and batches .to(memory_format=torch.channels_last), with "
    "mixed precision; no permute and contiguous between layers",
    "tensorflow": "keep one layout: data_format='channels_last' in all layers with mixed precision",
    "jax": "keep one layout: NHWC and HWIO as dimension numbers of convolutions",
    "mxnet": "keep one layout: layout='NHWC' in all layers with fp16 (multi_precision)",
}
_AS_TF32: Final = {
    "pytorch": 'torch.set_float32_matmul_precision("high") and '
    "torch.backends.cudnn.allow_tf32 = True for TF32",
    "tensorflow": "tf.config.experimental.enable_tensor_float_32_execution(True) for TF32",
    "jax": 'jax.config.update("jax_default_matmul_precision", "tensorfloat32") for TF32',
}
_AS_HALF: Final = {
    "pytorch": "torch.autocast with {type}",
    "tensorflow": "tf.keras.mixed_precision.set_global_policy('mixed_{type}')",
    "jax": "computing in {type} (jnp.{type}) with fp32 parameters",
    "mxnet": "amp.init() for fp16",
    "chainer": "chainer.global_config.dtype = chainer.mixed16 for fp16",
}


def layout_transposes(facts: Facts) -> Iterator[Finding]:
    """Kernels that only turn one layout into another (NCHW, NHWC) take 2 % of the time.

    Cost: their duration.
    """
    kernels = facts.kernels
    if kernels is None:
        return
    turning = [use for use in kernels.top if use.converts_layout]
    spent, count = sum(use.total_ns for use in turning), sum(use.count for use in turning)
    share = spent / max(kernels.total_ns, 1)
    if share < _LAYOUT_WORTH:
        return
    each = max(kernels.steps, 1)
    names = ", ".join(dict.fromkeys(use.short for use in turning[:_SHOWN]))
    advice = _KEEP_LAYOUT.get(facts.framework, "keep one layout, NHWC where tensor cores multiply")
    yield facts.finding(
        "layout-transposes",
        severity_of(share) or "low",
        spent // each,
        f"{format_ns(spent // each)} of {facts.per} ({share:.0%}) go to {count // each:,} kernels "
        f"that turn one layout into another ({names})",
        advice,
        {"share": round(share, 4), "layout_ns": spent // each, "kernels": count // each},
    )


def no_tensor_cores(facts: Facts) -> Iterator[Finding]:
    """On cards with tensor cores, 5 % of the time goes to matrix products and convolutions that
    are known not to use them: fp32, or half precision of odd sizes; `low`, `medium` from 50 %,
    since another precision is a choice about the training.

    Cost: half of their duration: tensor cores are taken to be twice as fast.
    """
    kernels = facts.kernels
    if kernels is None or not kernels.has_tensor_cores:
        return
    single, half = (_beside(kernels, precision) for precision in ("fp32", "half"))
    touched = single + half
    share = touched / max(kernels.total_ns, 1)
    if share < _PRODUCTS_WORTH:
        return
    each = max(kernels.steps, 1)
    what = "half-precision" if half > single else "fp32"
    yield facts.finding(
        "no-tensor-cores",
        "medium" if share >= _PRODUCTS_MEDIUM else "low",
        touched // each * (_FASTER - 1) // _FASTER,
        f"{format_ns(touched // each)} of {facts.per} ({share:.0%}) go to {what} matrix products "
        f"and convolutions that do not use the tensor cores ({_names(kernels)})",
        _how_to_use_them(facts, kernels, what),
        {
            "share": round(share, 4),
            "touched_ns": touched // each,
            "fp32_ns": single // each,
            "half_ns": half // each,
            "on_tensor_cores_ns": _of_sort(kernels, "yes") // each,
            "unknown_ns": _of_sort(kernels, "unknown") // each,
        },
    )


def _beside(kernels: Kernels, precision: str) -> int:
    """Nanoseconds of products in a precision that are known not to run on tensor cores."""
    sort = ("no", precision)
    return sum(p.total_ns for p in kernels.products if (p.tensor_cores, p.precision) == sort)


def _of_sort(kernels: Kernels, sort: str) -> int:
    return sum(product.total_ns for product in kernels.products if product.tensor_cores == sort)


def _names(kernels: Kernels) -> str:
    beside = [use.short for use in kernels.top if use.tensor_cores == "no"]
    shown = list(dict.fromkeys(beside))[:_SHOWN]
    return ", ".join(shown) or "none of them among the longest kernels"


def _how_to_use_them(facts: Facts, kernels: Kernels, what: str) -> str:
    if what != "fp32":
        return (
            "give the matrices sizes that tensor cores take: batch, channels and features in "
            "multiples of 8; newer libraries"
        )
    small = "bfloat16" if kernels.has_tf32 else "float16"
    ways = [_AS_HALF.get(facts.framework, "mixed precision in {type}").format(type=small)]
    if kernels.has_tf32:
        ways.insert(0, _AS_TF32.get(facts.framework, "TF32 for fp32 products"))
    scaled = "" if kernels.has_tf32 else ", with the loss scaled"
    return f"where the training allows it: {'; or '.join(ways)}{scaled}"
