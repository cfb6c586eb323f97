"""What is told about the kernels of the measured steps. Field names are those of the JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelOnGpu:
    """A kernel on one of the GPUs."""

    gpu: int
    rank: int
    count: int
    total_ns: int
    median_ns: int


@dataclass(frozen=True, slots=True)
class KernelUse:
    """All launches of one kernel in the measured steps, on all GPUs."""

    name: str
    """As recorded."""
    short: str
    """What people call it: without namespaces, types and arguments."""
    family: str
    """One of `FAMILIES`."""
    tensor_cores: str | None
    """``yes``, ``no`` or ``unknown``, by the name; None of a kernel that multiplies no matrices."""
    converts_layout: bool
    """Whether it only turns NCHW into NHWC, back, or otherwise transposes a tensor."""
    count: int
    total_ns: int
    """Sum of the durations; kernels that run side by side count each."""
    median_ns: int
    share: float
    """``total_ns`` as a part of the measured time of all GPUs."""
    by_gpu: tuple[KernelOnGpu, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """All kernels of one family in the measured steps, on all GPUs."""

    family: str
    count: int
    total_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products and convolutions of one sort: on tensor cores or not, in a precision."""

    tensor_cores: str
    """``yes``, ``no`` or ``unknown``."""
    precision: str
    """``half``, ``fp32``, ``fp64`` or ``unknown``, as the names say."""
    count: int
    total_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """What it costs to launch kernels, and how many are hardly worth it."""

    tiny_limit_ns: int
    """Shorter kernels than this are called tiny."""
    tiny_count: int
    tiny_ns: int
    call_ns: int | None
    """Median length of a launching call; None where no calls were recorded."""
    latency_ns: int | None
    """Median time from the beginning of a call to the start of its kernel on a GPU that had
    nothing left to do; None where that never happened or no calls were recorded."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of the measured steps, or of the whole span where there are none."""

    steps: int
    """Measured steps of all GPUs together; 0 where the figures are of the whole span."""
    total_ns: int
    """The measured time of all GPUs, of which shares are parts."""
    count: int
    distinct: int
    """Different names."""
    top: tuple[KernelUse, ...]
    """The kernels that take most time, most first, at most 50."""
    rest_count: int
    rest_ns: int
    """Launches and durations of the kernels that are not in ``top``."""
    families: tuple[Family, ...]
    """All kernels by family, in order of time."""
    products: tuple[Product, ...]
    has_tensor_cores: bool | None
    """Whether all the cards have some; None where that is not known."""
    has_tf32: bool | None
    """Whether they multiply fp32 matrices as TF32 (compute capability 8.0 and newer)."""
    first_gpu_only: tuple[KernelUse, ...]
    """Of several GPUs, the kernels that only the first one runs: at most 20, by time."""
    launches: LaunchCost
