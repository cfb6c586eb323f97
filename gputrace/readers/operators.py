"""Floating-point operations and least memory traffic of PyTorch's operators, from their shapes.

Counted are matrix products, convolutions and attention, forward and backward, as PyTorch's
`torch.utils.flop_counter.FlopCounterMode` counts them: 2 for a multiplication with an addition, all
of the scores where attention is causal, and the scores that a fused backward pass computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Final, NamedTuple

Shape = Sequence[int]


class Work(NamedTuple):
    """Work of one call of an operator."""

    flop: int
    traffic: int
    """Least bytes moved: each operand read once, each result written once; 0 if unknown."""


class Call(NamedTuple):
    """Arguments of a call, in order."""

    shapes: Sequence[Shape]
    """Of each tensor; empty for anything else."""
    types: Sequence[str]
    values: Sequence[str]
    """Text of each argument that is no tensor."""

    def integers(self, position: int) -> list[int]:
        """Return a list of integers, such as a stride; raise ValueError where it is none."""
        return [int(number) for number in self.values[position].strip("[]").split(",")]


def work_of(name: str, call: Call) -> Work | None:
    """Return the work of an operator of `COUNTED`; None where its arguments do not say."""
    try:
        flop, results = COUNTED[name](call)
        sizes = [_size(text) for text in call.types]
        tensors = [n for n, shape in enumerate(call.shapes) if len(shape)]
        known = all(n < len(sizes) and sizes[n] for n in tensors)
        read = sum(prod(call.shapes[n]) * sizes[n] for n in tensors) if known else 0
    except (AttributeError, IndexError, ValueError, TypeError):
        return None
    # Matrices of 8 bits give results of 16.
    traffic = read + results * max(2, sizes[tensors[-1]]) if known else 0
    is_possible = 0 < flop < 1 << 62 and 0 <= traffic < 1 << 62
    return Work(flop, traffic) if is_possible else None


_SIZES: Final = (
    ("float8", 1), ("char", 1), ("bool", 1), ("bfloat16", 2), ("half", 2), ("short", 2),
    ("double", 8), ("long", 8), ("float", 4), ("int", 4),
)  # fmt: skip
"""Bytes of an element by what its type, in C++, has in its name; the first that fits."""


def _size(type: str) -> int:
    return next((size for word, size in _SIZES if word in type.lower()), 0)


def _product(first: int) -> Callable[[Call], tuple[int, int]]:
    """Return the counter of a product of two matrices, or batches of them, at a position."""

    def count(call: Call) -> tuple[int, int]:
        a, b = call.shapes[first : first + 2]
        batch = prod(a[:-2]) if len(b) == len(a) else 1
        if len(a) < 2 or len(b) < 2:
            raise ValueError("not matrices")
        results = batch * a[-2] * b[-1]
        return 2 * results * a[-1], results

    return count


def _convolution(call: Call) -> tuple[int, int]:
    image, weight = call.shapes[:2]
    stride, padding, dilation = (call.integers(position) for position in (3, 4, 5))
    if len(image) != len(weight) or len(image) < 3:
        raise ValueError("an image without a batch")
    spatial = range(len(image) - 2)

    def of(numbers: list[int], axis: int) -> int:
        return numbers[axis] if len(numbers) > 1 else numbers[0]

    if call.values[6] == "True":  # Transposed: each element of the input meets the whole filter.
        results = prod(image) * weight[1]
        return 2 * prod(image) * prod(weight[1:]), results
    outer = [
        (image[2 + axis] + 2 * of(padding, axis) - of(dilation, axis) * (weight[2 + axis] - 1) - 1)
        // of(stride, axis)
        + 1
        for axis in spatial
    ]
    results = image[0] * weight[0] * prod(outer)
    return 2 * results * prod(weight[1:]), results


def _convolution_backward(call: Call) -> tuple[int, int]:
    gradient, image, weight = call.shapes[:3]
    wanted = [text.strip() == "True" for text in call.values[10].strip("[]").split(",")]
    moved = image if call.values[7] == "True" else gradient
    one = 2 * prod(moved) * prod(weight[1:])
    return one * sum(wanted[:2]), prod(image) * wanted[0] + prod(weight) * wanted[1]


def _attention(
    first: int, heads: int = 1, backward: bool = False
) -> Callable[[Call], tuple[int, int]]:
    """Return the counter of attention, of which the query is at a position.

    Args:
        first: position of the query; key and value follow.
        heads: axis of the heads; the sequence has the other one of 1 and 2.
        backward: True where the scores and all gradients are computed.
    """

    def count(call: Call) -> tuple[int, int]:
        query, key, value = call.shapes[first : first + 3]
        if not len(query) == len(key) == len(value) == 4:
            raise ValueError("not a batch of heads")
        scores = query[0] * query[heads] * query[3 - heads] * key[3 - heads]
        depths = (3 * query[3] + 2 * value[3]) if backward else query[3] + value[3]
        results = prod(query) + prod(key) + prod(value) if backward else prod(query)
        return 2 * scores * depths, results

    return count


COUNTED: Final = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_int_mm"), _product(0)),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _product(0)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::_addmm_activation"), _product(1)),
    **dict.fromkeys(("aten::convolution", "aten::_convolution"), _convolution),
    "aten::convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            "aten::scaled_dot_product_attention",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
        ),
        _attention(0),
    ),
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            "aten::_scaled_dot_product_efficient_attention_backward",
            "aten::_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention(1, backward=True),
    ),
    **dict.fromkeys(
        ("aten::_flash_attention_forward", "flash_attn::_flash_attn_forward"),
        _attention(0, heads=2),
    ),
    **dict.fromkeys(
        ("aten::_flash_attention_backward", "flash_attn::_flash_attn_backward"),
        _attention(1, heads=2, backward=True),
    ),
}
"""Counter of the FLOPs, and of the elements of the results, by operator. Of operators within each
other the outer one counts."""
