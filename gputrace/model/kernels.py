"""Results about kernels. Times are integer nanoseconds; field names are those of the JSON."""

from __future__ import annotations

from typing import ClassVar

from gputrace.model.struct import Column, Columns, Struct
from gputrace.units import format_number


class KernelOnGpu(Struct, frozen=True):
    """Launches of one kernel on one GPU."""

    gpu: int
    rank: int
    count: int
    total_ns: int
    median_ns: int
    max_ns: int
    """Longest launch."""
    flop: float | None = None
    """Floating-point operations of all launches, by the shapes of operators; None if unknown."""
    traffic_bytes: float | None = None
    """Least bytes that they move, likewise."""
    alone_ns: int | None = None
    """Time in which nothing else runs, of kernels that wait or leave most SMs without work."""
    COLUMNS: ClassVar[Columns] = (
        Column("", "gpu", "gpu {}"),
        Column("launches", "count"),
        Column("median", "median_ns"),
        Column("longest", "max_ns"),
        Column("total", "total_ns"),
    )


class Roofline(Struct, frozen=True):
    """Speed of a kernel whose operands have known shapes, beside the peak of its cards."""

    flop_per_s: float
    """0 for kernels that multiply no matrices."""
    flop_per_byte: float | None
    """Arithmetic intensity, if each operand is read once and each result written once."""
    limit: str | None
    """``compute`` or ``memory``, whichever bounds a kernel of that intensity more; None if the
    peaks of the cards are unknown."""
    limit_flop_per_s: float | None
    """Speed at that bound."""
    of_limit: float | None
    """``flop_per_s`` as a fraction of it; without FLOPs, ``bytes_per_s`` of the memory's peak."""
    bytes_per_s: float | None = None
    """Least bytes moved, each operand read once and each result written once, by the time."""

    @property
    def speed(self) -> str:
        """FLOPs per second, or bytes of a kernel that multiplies no matrices, as text."""
        if self.flop_per_s:
            return f"{format_number(self.flop_per_s / 1e12)} TFLOP/s"
        return f"{(self.bytes_per_s or 0) / 1e9:,.4g} GB/s"

    @property
    def reached(self) -> str:
        """Share of the limit that is reached, such as ``40% memory``; empty if unknown."""
        return "" if self.of_limit is None else f"{self.of_limit:.0%} {self.limit}"


class KernelActivity(Struct, frozen=True):
    """Activity of a card while a kernel runs, by counters that cover 100 ms at a time."""

    readings: int
    """Readings of the counters in which it runs."""
    sms: float
    """Part of the SMs' time with a warp of it."""
    tensor_cores: float
    """Part of the time that the tensor cores work."""
    arithmetic: float
    """Part of the time that pipes for floats work, the tensor cores among them."""
    memory: float
    """Bytes of the card's memory moved, as a fraction of its bandwidth."""
    nvlink_bytes_per_s: float
    """Both ways, as ``pcie_bytes_per_s``."""
    pcie_bytes_per_s: float
    error: float
    """Largest standard error of the fractions."""
    does: str | None
    """``waits`` if it computes and moves next to nothing, ``few SMs`` if it leaves 95 % of the SMs
    without work, ``exchanges`` if it moves 10 GB/s and more between cards or with the host; None
    if that is not certain, as of other work."""

    @property
    def text(self) -> str:
        """The fractions, such as ``SMs 98% active, arithmetic 0%, memory 0%``."""
        sms = f"{self.sms:.0%}" if self.sms >= 0.01 else "under 1%"
        return f"SMs {sms} active, arithmetic {self.arithmetic:.0%}, memory {self.memory:.0%}"


class KernelUse(Struct, frozen=True):
    """All launches of one kernel in the measured steps, on all GPUs."""

    name: str
    """Name as recorded."""
    short: str
    """Common name: without namespaces, types and arguments."""
    family: str
    """One of `FAMILIES`."""
    tensor_cores: str | None
    """``yes``, ``no`` or ``unknown``, by the name; None for a kernel that multiplies no
    matrices."""
    converts_layout: bool
    """True if it only converts NCHW to NHWC or back, or otherwise transposes a tensor."""
    count: int
    total_ns: int
    """Sum of the durations; concurrent kernels each count in full."""
    median_ns: int
    max_ns: int
    """Longest launch."""
    share: float
    """``total_ns`` as a fraction of the measured time of all GPUs."""
    by_gpu: tuple[KernelOnGpu, ...]
    roofline: Roofline | None = None
    """None for kernels whose work is unknown."""
    activity: KernelActivity | None = None
    """None where the card has no counters, or they do not show what this kernel does."""
    line: str = ""
    """Line at which Triton's function of that name is defined, such as ``ops.py:48 softmax``; empty
    for other kernels, and if unknown."""


class CountedFlop(Struct, frozen=True):
    """Floating-point operations of one GPU's kernels in the measured steps, by shapes."""

    gpu: int
    rank: int
    steps: int
    flop: float
    known: float
    """Fraction of the time of matrix products, convolutions and attention whose work is known."""


class Family(Struct, frozen=True):
    """All kernels of one family in the measured steps, on all GPUs."""

    family: str
    count: int
    total_ns: int
    share: float


class Product(Struct, frozen=True):
    """Matrix products and convolutions of one kind: on tensor cores or not, in a precision."""

    tensor_cores: str
    """``yes``, ``no`` or ``unknown``."""
    precision: str
    """``fp4``, ``fp8``, ``int8``, ``bf16``, ``fp16``, ``half`` (16 bits of either kind), ``tf32``,
    ``fp32``, ``fp64`` or ``unknown``, by the names."""
    count: int
    total_ns: int
    share: float


class LaunchCost(Struct, frozen=True):
    """Cost of kernel launches, and the number of kernels that are hardly worth one."""

    tiny_limit_ns: int
    """Duration below which a kernel is called tiny."""
    tiny_count: int
    tiny_ns: int
    call_ns: int | None
    """Median duration of a launching call; None where no calls were recorded."""
    latency_ns: int | None
    """Median time from the start of a call to the start of its kernel on a GPU that had run out of
    work; None where that never happened or no calls were recorded."""


class LongestLaunch(Struct, frozen=True):
    """Longest launch of any kernel in the measured steps, on all GPUs."""

    name: str
    """Name of the kernel, as recorded."""
    gpu: int
    rank: int
    start_ns: int
    duration_ns: int
    step: int | None
    """Step in which it starts; None without steps."""


class Kernels(Struct, frozen=True):
    """Kernels of the measured steps, or of the whole span where there are none."""

    steps: int
    """Measured steps of all GPUs together; 0 where the figures cover the whole span."""
    total_ns: int
    """Measured time of all GPUs, the denominator of shares."""
    count: int
    distinct: int
    """Number of different names."""
    top: tuple[KernelUse, ...]
    """Kernels that take most time, most first, at most 50; those of the longest launches are among
    them."""
    rest_count: int
    rest_ns: int
    """Launches and durations of the kernels that are not in ``top``."""
    families: tuple[Family, ...]
    """All kernels by family, the longest total first."""
    products: tuple[Product, ...]
    has_tensor_cores: bool | None
    """True if all cards have tensor cores; None if unknown."""
    has_tf32: bool | None
    """True if all cards multiply fp32 matrices as TF32 (compute capability 8.0 and newer)."""
    first_gpu_only: tuple[KernelUse, ...]
    """Kernels that only the first of several GPUs runs, at most 20, the longest first."""
    launches: LaunchCost
    longest: LongestLaunch
    """Where `gputrace kernel TRACE longest` looks."""
    longest_compute: LongestLaunch | None = None
    """Longest launch of a kernel that computes, as communication may wait for other GPUs; None
    where none does."""
    flop: tuple[CountedFlop, ...] = ()
    """By GPU, where the trace has shapes of operators."""
