"""Snapshots of PyTorch's allocator as programs would leave them, with what is true of each."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any, Final

MIB: Final = 1 << 20
PAGE: Final = 2 * MIB
TORCH: Final = "/x/site-packages/torch"


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


PROGRAM: Final = frame("/home/me/train.py", 9, "main")
CALL: Final = frame(f"{TORCH}/nn/modules/module.py", 1790, "_call_impl")
MALLOC: Final = frame("CUDACachingAllocator.cpp", 0, "NativeCachingAllocator::malloc(void**)")
ENGINE: Final = frame("??", 0, "torch::autograd::Engine::thread_main(GraphTask)")


def native(*frames: dict[str, Any]) -> list[dict[str, Any]]:
    return [MALLOC, *frames]


BUILD: Final = native(frame(f"{TORCH}/nn/modules/module.py", 900, "_apply"), PROGRAM)
LOAD: Final = native(frame("/home/me/train.py", 20, "batches"), PROGRAM)
ACCUMULATE: Final = native(frame("??", 0, "torch::autograd::AccumulateGrad::apply(v)"), ENGINE)
OPTIMIZER: Final = native(
    frame(f"{TORCH}/optim/adamw.py", 100, "_init_group"),
    frame(f"{TORCH}/optim/optimizer.py", 533, "wrapper"),
    PROGRAM,
)
UPDATE: Final = native(
    frame(f"{TORCH}/optim/adamw.py", 300, "step"),
    frame(f"{TORCH}/optim/optimizer.py", 533, "wrapper"),
    PROGRAM,
)


def forward(layer: int) -> list[dict[str, Any]]:
    return native(
        frame(f"{TORCH}/functional.py", 373, "einsum"),
        frame("/home/me/model.py", 100 + layer, "forward"),
        CALL,
        PROGRAM,
    )


def backward(node: str = "MmBackward0") -> list[dict[str, Any]]:
    return native(frame("??", 0, f"torch::autograd::generated::{node}::apply(v)"), ENGINE)


class Allocator:
    """Stands for the allocator of one GPU: the smallest part that fits, else a new segment.

    Attributes:
        events: of the history.
        peak: bytes by what they are for, when most were held.
    """

    def __init__(self, stacks: str = "all") -> None:
        self.stacks = stacks
        self.events: list[dict[str, Any]] = []
        self.peak: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        # Blocks of each segment by address: size, what for (empty where free) and stack.
        self._segments: dict[int, dict[int, tuple[int, str, list[dict[str, Any]]]]] = {}
        self._next = 0x7F00_0000_0000

    def _frames(self, stack: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.stacks == "all":
            return stack
        if ENGINE in stack:
            return []
        return [each for each in stack if each["filename"].endswith(".py")]

    def _record(self, action: str, address: int, size: int, stack: list[dict[str, Any]]) -> None:
        where = "device_free" if action == "oom" else "addr"
        time = 1_700_000_000_000_000 + 10 * len(self.events)
        values = {"action": action, where: address, "size": size, "stream": 0, "time_us": time}
        self.events.append(values | {"frames": self._frames(stack)})

    def alloc(self, size: int, what: str, stack: list[dict[str, Any]]) -> int:
        """Return the address of a block."""
        fits = [
            (block[0], segment, address)
            for segment, blocks in self._segments.items()
            for address, block in blocks.items()
            if not block[1] and block[0] >= size
        ]
        if fits:
            room, segment, at = min(fits)
        else:
            room = -(-size // PAGE) * PAGE
            segment = at = self._next
            self._next += room + PAGE
            self._segments[segment] = {at: (room, "", [])}
            self._record("segment_alloc", at, room, stack)
        blocks = self._segments[segment]
        blocks[at] = (size, what, stack)
        if room > size:
            blocks[at + size] = (room - size, "", [])
        self._record("alloc", at, size, stack)
        self._held[what] += size
        if self._held.total() > self.peak.total():
            self.peak = Counter(self._held)
        return at

    def free(self, *addresses: int) -> None:
        """Free blocks, and join them with what is free after and before them."""
        for at in addresses:
            blocks = next(blocks for blocks in self._segments.values() if at in blocks)
            size, what, stack = blocks[at]
            self._record("free_requested", at, size, stack)
            self._record("free_completed", at, size, stack)
            self._held[what] -= size
            blocks[at] = (size, "", [])
            for here in sorted(blocks):
                while here in blocks and not blocks[here][1]:
                    after = here + blocks[here][0]
                    if after not in blocks or blocks[after][1]:
                        break
                    blocks[here] = (blocks[here][0] + blocks.pop(after)[0], "", [])

    def refuse(self, size: int, device_free: int, stack: list[dict[str, Any]]) -> None:
        """Record that memory was refused, after the release of segments that hold nothing."""
        for segment, blocks in list(self._segments.items()):
            if len(blocks) == 1 and not blocks[segment][1]:
                self._record("segment_free", segment, blocks[segment][0], stack)
                del self._segments[segment]
        self._record("oom", device_free, size, stack)

    @property
    def holes(self) -> list[int]:
        """Sizes of the free parts of segments."""
        return [
            size
            for blocks in self._segments.values()
            for size, what, _ in blocks.values()
            if not what
        ]

    @property
    def reserved(self) -> int:
        return sum(size for blocks in self._segments.values() for size, _, _ in blocks.values())

    def content(self, forget: int = 0, settings: str = "") -> dict[str, Any]:
        """Return the snapshot, without so many of the first events, as after a short history."""
        segments = []
        for segment, blocks in self._segments.items():
            held = [
                {
                    "address": at,
                    "size": size,
                    "requested_size": size,
                    "state": "active_allocated" if what else "inactive",
                    "frames": [] if forget else self._frames(stack),
                }
                for at, (size, what, stack) in sorted(blocks.items())
            ]
            total = sum(size for size, _, _ in blocks.values())
            made: dict[str, Any] = {
                "device": 0,
                "address": segment,
                "total_size": total,
                "stream": 0,
            }
            made |= {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
            segments.append(made | {"frames": [], "blocks": held})
        return {
            "segments": segments,
            "device_traces": [self.events[forget:]],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings},
            "external_annotations": [],
        }

    def write(self, path: Path, protocol: int = 4, **settings: Any) -> Path:
        path.write_bytes(pickle.dumps(self.content(**settings), protocol))
        return path


WEIGHTS: Final = (4 * MIB, 6 * MIB, 10 * MIB, 14 * MIB)
"""Bytes of the weight of each layer; activations take five of each."""


def train(
    allocator: Allocator, steps: int = 2, refused_in: str = "", batch_bytes: int = MIB
) -> None:
    """Train; with ``refused_in``, memory is refused in that pass of the last step."""
    weights = [allocator.alloc(size, "parameters", BUILD) for size in WEIGHTS]
    states: list[int] = []
    assert len(weights) == len(WEIGHTS)
    for step in range(steps):
        stop = refused_in if step == steps - 1 else ""
        batch = allocator.alloc(batch_bytes, "unknown", LOAD)
        saved = []
        for layer, size in enumerate(WEIGHTS):
            scratch = allocator.alloc(size, "temporary", forward(layer))
            saved.append(allocator.alloc(5 * size, "activations", forward(layer)))
            allocator.free(scratch)
            if stop == "forward" and layer == len(WEIGHTS) - 2:
                allocator.refuse(64 * MIB, MIB, forward(layer + 1))
                return
        gradients = []
        for size in reversed(WEIGHTS):
            scratch = allocator.alloc(2 * size, "temporary", backward())
            gradients.append(allocator.alloc(size, "gradients", ACCUMULATE))
            allocator.free(scratch, saved.pop())
        for size in WEIGHTS if not states else ():
            states += [allocator.alloc(size, "optimizer", OPTIMIZER) for _ in range(2)]
        scratch = allocator.alloc(MIB, "temporary", UPDATE)
        allocator.free(scratch, batch, *gradients)
