"""Memory of GPUs as a snapshot of PyTorch's allocator shows it: the result of analyzing one."""

from __future__ import annotations

from typing import ClassVar, Final

from gputrace.model.struct import Column, Columns, Struct

SCHEMA_VERSION: Final = 1


class Holder(Struct, frozen=True):
    """Holder of memory at a moment: a kind of tensor, a line of the program, or a module."""

    name: str
    """The kind; or the line as ``file:line function``, the node of the backward pass or the file of
    the module; empty where that is unknown."""
    kind: str
    """Kind of the tensors: ``parameters``, ``gradients``, ``optimizer``,
    ``activations``, ``temporary`` or ``unknown``."""
    held_bytes: int
    """Bytes held."""
    blocks: int
    """Number of blocks."""
    share: float
    """Fraction of all bytes held then, 0 to 1."""

    COLUMNS: ClassVar[Columns] = (
        Column("held", "held_bytes"),
        Column("share", "share", "{:.1%}"),
        Column("blocks", "blocks"),
    )


class HeldMemory(Struct, frozen=True):
    """Memory of one GPU at a moment."""

    moment: str
    """``peak``, ``out of memory`` or ``end``."""
    time_ns: int
    """Since the Unix epoch; 0 where unknown."""
    allocated_bytes: int
    """Bytes of the blocks that hold tensors."""
    reserved_bytes: int
    """Bytes of the segments that the allocator holds of the driver."""
    free_bytes: int
    """Bytes of its segments that hold no tensor."""
    largest_free_bytes: int | None
    """Bytes of the largest part of a segment that holds no tensor; None where only their sum is
    known."""

    COLUMNS: ClassVar[Columns] = (
        Column("", "moment"),
        Column("allocated", "allocated_bytes"),
        Column("reserved", "reserved_bytes"),
        Column("free in segments", "free_bytes"),
        Column("largest part", "largest_free_bytes"),
    )


class OutOfMemory(Struct, frozen=True):
    """Why memory was refused."""

    requested_bytes: int
    """Bytes asked for."""
    device_free_bytes: int
    """Bytes that the driver had left on the GPU."""
    missing_bytes: int
    """Bytes that would have to be free in addition, were all that is free in one piece."""
    cause: str
    """``fragmentation`` where enough was free, but not in one piece; else ``shortage``."""
    line: str
    """Line of the program that asked; empty where unknown."""
    message: str
    """Why, in a sentence without its full stop."""
    advice: tuple[str, ...]
    """Changes that would have avoided it, by these figures."""


class DeviceMemory(Struct, frozen=True):
    """Memory of one GPU: who holds it at the peak, or when it was refused."""

    path: str
    device: int
    events: int
    """Events of the recorded history."""
    message: str
    """Answer in a sentence without its full stop."""
    moments: tuple[HeldMemory, ...]
    """The moment that the holders are of: the last refusal, else the peak; and the end."""
    kinds: tuple[Holder, ...]
    """Kinds of tensors, the one that holds most first."""
    lines: tuple[Holder, ...]
    """At most 12 lines of the program, the one that holds most first."""
    modules: tuple[Holder, ...]
    """At most 12 modules whose ``forward`` allocated what is held."""
    out_of_memory: OutOfMemory | None
    """The last time that memory was refused; None where it never was."""


class MemoryReport(Struct, frozen=True):
    """Result of the analysis of snapshots of memory."""

    schema_version: int
    source: str
    """``memory snapshot``."""
    devices: tuple[DeviceMemory, ...]
    """GPUs, in the order of files."""
