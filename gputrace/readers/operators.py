"""PyTorch's operators and modules: the work of operators, by their shapes, and calls of modules.

FLOPs are those of matrix products, convolutions and attention, forward and backward, as PyTorch's
`torch.utils.flop_counter.FlopCounterMode` counts them: 2 for a multiplication with an addition, all
of the scores where attention is causal, and those that a fused backward pass computes again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from msgspec import DecodeError
from msgspec.json import decode
from numpy.typing import NDArray

from gputrace.model.events import UNKNOWN, Kind

if TYPE_CHECKING:
    from gputrace.readers.in_memory import Names

Shape = Sequence[int]


class CallWork(NamedTuple):
    """Work of one call of an operator."""

    flop: int
    traffic: int
    """Least bytes moved: each operand read once, each result written once; 0 if unknown."""


class Call(NamedTuple):
    """Arguments of a call, in order."""

    shapes: Sequence[Shape]
    """One for each tensor; empty for anything else."""
    types: Sequence[str]
    values: Sequence[str]
    """Text of each argument that is not a tensor."""


def work_of(name: str, call: Call) -> CallWork | None:
    """Return the work of an operator of `SHAPED`; None where its arguments do not say."""
    try:
        if name in MOVED:
            return CallWork(0, _moved(call, *MOVED[name]))
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
    return CallWork(flop, traffic) if is_possible else None


def _moved(call: Call, first: int, written: int, end: int | None = None) -> int:
    """Return the least bytes of an operator that computes next to nothing with each element.

    It reads the tensors from the ``first`` on once, those from the ``end`` on never (``out=``), and
    writes so many of the largest shape, of the type of the largest tensor that is no mask; raises
    ValueError where a type is unknown.
    """
    tensors = [n for n, shape in enumerate(call.shapes) if len(shape)]
    sizes = {n: _size(call.types[n]) for n in tensors}
    elements = {n: prod(call.shapes[n]) for n in tensors}
    read = range(first, len(call.shapes) if end is None else end)
    moved = sum(elements[n] * sizes[n] for n in tensors if n in read)
    values = [n for n in tensors if "bool" not in call.types[n].lower()] or tensors
    largest = max(values, key=lambda n: elements[n])
    moved += written * max(elements.values()) * sizes[largest]
    if not all(sizes.values()) or not 0 < moved < 1 << 62:
        raise ValueError("no sizes")
    return moved


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
    listed = (call.values[position].strip("[]").split(",") for position in (3, 4, 5))
    given = [[int(number) for number in numbers] for numbers in listed]
    if len(image) != len(weight) or len(image) < 3:
        raise ValueError("an image without a batch")
    spatial = range(len(image) - 2)
    # A single number is of all axes.
    each = (numbers if len(numbers) > 1 else numbers * len(spatial) for numbers in given)
    stride, padding, dilation = each
    if call.values[6] == "True":  # Transposed: each element of the input meets the whole filter.
        results = prod(image) * weight[1]
        return 2 * prod(image) * prod(weight[1:]), results
    outer = [
        (image[2 + axis] + 2 * padding[axis] - dilation[axis] * (weight[2 + axis] - 1) - 1)
        // stride[axis]
        + 1
        for axis in spatial
    ]
    results = image[0] * weight[0] * prod(outer)
    return 2 * results * prod(weight[1:]), results


def _convolution_backward(call: Call) -> tuple[int, int]:
    gradient, image, weight = call.shapes[:3]
    wanted = [text.strip() == "True" for text in call.values[10].strip("[]").split(",")]
    moved = image if call.values[7] == "True" else gradient
    flop = 2 * prod(moved) * prod(weight[1:])
    return flop * sum(wanted[:2]), prod(image) * wanted[0] + prod(weight) * wanted[1]


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

_POINTWISE: Final = {
    1: "neg abs exp log sqrt rsqrt tanh sigmoid relu gelu silu",
    2: "add sub mul div pow clamp_min",
    3: "clamp where masked_fill addcmul addcdiv lerp",
}
"""Operators on each element, by the number of their arguments that may be tensors to read."""
_PASSES: Final = (
    "native_layer_norm _fused_rms_norm native_group_norm native_batch_norm cudnn_batch_norm "
    "miopen_batch_norm native_dropout"
)
_OTHERS: Final = (
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data threshold_backward "
    "gelu_backward silu_backward tanh_backward sigmoid_backward"
)
MOVED: Final = {
    **{
        f"aten::{name}{place}": (0, 1, end)
        for end, names in _POINTWISE.items()
        for name in names.split()
        for place in ("", "_")
    },
    **{f"aten::{name}{way}": (0, 1) for name in _PASSES.split() for way in ("", "_backward")},
    **{f"aten::{name}": (0, 1) for name in _OTHERS.split()},
    **{f"aten::{name}": (0, 0, 1) for name in ("sum", "mean")},
    **{f"aten::{name}": (1, 1) for name in ("copy_", "fill_", "zero_")},
}
"""The first argument that is read, the number of tensors written, and the end of the arguments that
are read where others may follow, by operator whose time is that of moving its operands."""

SHAPED: Final = COUNTED.keys() | MOVED.keys()
"""Operators whose work their arguments say."""


class CallSpan(NamedTuple):
    """Process, thread and times of a call."""

    process: int
    thread: int
    start: int
    end: int


_BACKWARD: Final = "autograd::engine::evaluate_function: "


class Operators:
    """Calls of operators and of modules in one file, collected while it is decoded."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._works: dict[tuple[str, bytes, bytes, bytes], CallWork | None] = {}
        """By name, shapes, types and values, as text."""
        self._worked: list[tuple[int, ...]] = []
        self.modules: list[tuple[CallSpan, str]] = []
        """Calls of modules, each named by its class and a number."""
        self._forward: dict[int, CallSpan] = {}
        """Last forward operator of each sequence number, which made the node of the graph."""
        self._backward: list[tuple[CallSpan, int]] = []

    def add_work(self, name: str, shapes: bytes, types: bytes, values: bytes, at: CallSpan) -> None:
        """Add a call of an operator of `SHAPED`, with its arguments as JSON."""
        key = name, shapes, types, values
        if key not in self._works:
            try:
                texts = (decode(text) if text else [] for text in key[1:])
                self._works[key] = work_of(name, Call(*texts))
            except (DecodeError, RecursionError):
                self._works[key] = None
        if (work := self._works[key]) is not None:
            self._worked.append((*at, *work, self._names.number(name), Kind.OPERATOR))

    def add_operator(self, name: str, sequence: int, is_backward: bool, at: CallSpan) -> None:
        """Add a call with a sequence number, which a forward and a backward operator share."""
        if sequence < 0:
            return
        if is_backward:
            if name.startswith(_BACKWARD):
                self._backward.append((at, sequence))
        elif sequence not in self._forward or self._forward[sequence].start < at.start:
            self._forward[sequence] = at

    def columns(self, first: int) -> list[dict[str, NDArray[np.int64]]]:
        """Return rows of `Kind.OPERATOR` and `Kind.MODULE`, in the times of the file.

        They begin with the first of the other rows, at the earliest, so as not to move its origin.
        """
        named = (*CallSpan._fields, "correlation", "bytes", "name", "kind")
        outer: list[tuple[int, ...]] = []
        """Calls that lie within no other of their thread."""
        for row in sorted(self._worked, key=lambda row: (row[:3], -row[3])):
            if not outer or outer[-1][:2] != row[:2] or row[2] >= outer[-1][3]:
                outer.append(row)
        rows = [
            [(*row[:2], max(row[2], first), *row[3:]) for row in part if row[3] > first]
            for part in (outer, self._stretches())
        ]
        return [
            dict(zip(named, np.array(part, np.int64).T, strict=True)) for part in rows if len(part)
        ]

    def _stretches(self) -> list[tuple[int, ...]]:
        """Return the stretches of threads within each module and none of its parts.

        A backward operator belongs to the module whose forward operator made it; so does what is
        computed again within it.
        """
        path_of = _paths(self.modules)
        calls = [(at, path_of[name], False) for at, name in self.modules]
        ran = list(innermost(calls))
        keys = [at[:3] for at, *_ in ran]
        for at, sequence in self._backward if ran else ():
            if (made := self._forward.get(sequence)) is not None:
                inside, path, _ = ran[max(bisect_right(keys, made[:3]) - 1, 0)]
                if inside[:2] == made[:2] and inside.start <= made.start < inside.end:
                    calls.append((at, path, True))
        return [
            (*at, int(backward), UNKNOWN, self._names.number(path), Kind.MODULE)
            for at, path, backward in innermost(calls)
        ]


def _paths(modules: Sequence[tuple[CallSpan, str]]) -> dict[str, str]:
    """Return the path of each module, through those that call it, by its name."""
    paths: dict[str, str] = {}
    around: list[tuple[CallSpan, str]] = []
    for at, name in sorted(modules, key=_outer_first):
        while around and (around[-1][0][:2] != at[:2] or around[-1][0].end <= at.start):
            around.pop()
        path = f"{around[-1][1]}/{name}" if around else name
        around.append((at, path))
        # What a backward pass computes again is called by no module.
        if path.count("/") >= paths.get(name, "").count("/"):
            paths[name] = path
    return paths


def innermost(calls: Iterable[tuple[CallSpan, str, bool]]) -> Iterator[tuple[CallSpan, str, bool]]:
    """Yield the stretches in which each call is the innermost of its thread, in order.

    Yields the stretch, the call's path, and whether it or one around it is of a backward pass.
    """
    around: list[tuple[CallSpan, str, bool]] = []
    done = 0

    def until(time: int) -> Iterator[tuple[CallSpan, str, bool]]:
        nonlocal done
        at, path, backward = around[-1]
        if time > done:
            yield at._replace(start=done, end=time), path, backward
            done = time

    for at, path, backward in sorted(calls, key=_outer_first):
        while around and (around[-1][0][:2] != at[:2] or around[-1][0].end <= at.start):
            yield from until(around[-1][0].end)
            around.pop()
        if around:
            yield from until(at.start)
            at = at._replace(end=min(at.end, around[-1][0].end))
            backward |= around[-1][2]
        around.append((at, path, backward))
        done = at.start
    while around:
        yield from until(around[-1][0].end)
        around.pop()


def _outer_first(
    call: tuple[CallSpan, Any] | tuple[CallSpan, Any, Any],
) -> tuple[int, int, int, int]:
    process, thread, start, end = call[0]
    return process, thread, start, -end
