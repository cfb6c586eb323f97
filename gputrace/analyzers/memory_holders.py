"""Who holds the memory of a GPU: snapshots of PyTorch's allocator, replayed.

The kind of a tensor is decided by what its memory went through. The history falls into passes, by
the stacks of allocations: forward (whatever is neither of the others), backward, optimizer.

- ``temporary``: freed in the pass that allocated it.
- ``gradients``: allocated backward and kept after it; or where gradients are accumulated.
- ``activations``: allocated forward, freed backward; or allocated in a module's call and still
  held, in a program that has not run backward but frees less than half of what such calls allocate.
- ``optimizer``: allocated by an optimizer's step and kept after it.
- ``parameters``: never freed, and allocated where modules are made, moved or loaded; or in memory
  since before the passes, with as many bytes as a gradient, one for each gradient.

All else is ``unknown``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Final

from gputrace.model.memory import (
    SCHEMA_VERSION,
    DeviceMemory,
    HeldMemory,
    Holder,
    MemoryReport,
    OutOfMemory,
)
from gputrace.readers.memory_snapshot import DeviceSnapshot, Stack
from gputrace.units import format_bytes, format_share

_UNIT: Final = 512
"""Bytes of which the allocator gives multiples."""
_PAGE: Final = 2 << 20
"""Bytes of the pages that expandable segments are made of."""
_MOST_HOLDERS: Final = 12
_FOREVER: Final = 1 << 60
_SEGMENTS: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_CURES: Final = {
    "optimizer": "less memory for states of the optimizer (8 bits, sharded, or on the host)",
    "gradients": "gradients freed before the forward pass (zero_grad), or sharded",
    "parameters": "parameters of fewer bits, or sharded",
}


def report_memory(snapshots: Iterable[tuple[str, Sequence[DeviceSnapshot]]]) -> MemoryReport:
    """Return who holds the memory of each GPU, given snapshots by path."""
    devices = (_analyzed(path, device) for path, held in snapshots for device in held)
    return MemoryReport(SCHEMA_VERSION, "memory snapshot", tuple(devices))


def _analyzed(path: str, device: DeviceSnapshot) -> DeviceMemory:
    replay = _Replay(device)
    replay.name_kinds()
    refused = replay.refused
    at, name = (refused, "out of memory") if refused >= 0 else (replay.peak(), "peak")
    if not device.events:
        at, name = _FOREVER - 1, "end"
    held = replay.held_at(at)
    total = sum(tensor.size for tensor in held)
    kinds = _holders(held, total, lambda tensor: tensor.kind)
    shown = (f"{each.name} {format_share(each.held_bytes, total)}" for each in kinds[:3])
    message = f"{format_bytes(total)} are held at the {name}: {', '.join(shown)}"
    lines = _holders(held, total, lambda tensor: tensor.line)
    inside = [tensor for tensor in held if tensor.stack.module]
    modules = _holders(inside, total, lambda tensor: tensor.stack.module)
    moment, holes = replay.moment(at, name)
    moments = [moment] if name == "end" else [moment, replay.moment(_FOREVER - 1, "end")[0]]
    out = _out_of_memory(device, refused, moment, holes, kinds, lines) if refused >= 0 else None
    return DeviceMemory(
        path,
        device.device,
        len(device.events),
        out.message if out else message,
        tuple(moments),
        kinds,
        lines[:_MOST_HOLDERS],
        modules[:_MOST_HOLDERS],
        out,
    )


class _Tensor:
    """Memory of a tensor: where it was, and from which event to which it was held."""

    def __init__(self, address: int, asked: int, stack: Stack, begin: int, phase: str) -> None:
        self.address, self.asked, self.stack, self.begin = address, asked, stack, begin
        self.phase = phase
        self.size = -(-asked // _UNIT) * _UNIT
        self.end = _FOREVER
        self.kind = "unknown"

    @property
    def line(self) -> str:
        return self.stack.line or ("(before the history)" if self.begin < 0 else "")


class _Replay:
    """Replay of the history of one GPU.

    Attributes:
        refused: the last event that refused memory; -1 without one.
    """

    def __init__(self, device: DeviceSnapshot) -> None:
        self._device = device
        self._passes, self._phases = [-1], ["unknown"]  # Events that begin a pass; its phase.
        self._tensors: list[_Tensor] = []
        self.refused = -1
        self._freed: set[int] = set()
        actions = {event.action for event in device.events}
        ends = "free_completed" if "free_completed" in actions else "free_requested"
        has_stacks = any(event.stack.roles - {"no frames"} for event in device.events)
        held: dict[int, _Tensor] = {}
        for number, event in enumerate(device.events):
            if event.action in ("alloc", "oom") and has_stacks:
                # Threads of the backward pass have no frames of Python.
                phase = "backward" if "no frames" in event.stack.roles else event.stack.phase
                if phase != self._phases[-1]:
                    self._passes.append(number)
                    self._phases.append(phase)
            if event.action in ("alloc", ends) and event.address in held:
                held.pop(event.address).end = number
            elif event.action == ends:
                self._tensors.append(_Tensor(event.address, event.size, Stack(), -1, "unknown"))
                self._tensors[-1].end = number
            if event.action == "alloc":
                made = _Tensor(event.address, event.size, event.stack, number, self._phases[-1])
                held[event.address] = made
                self._tensors.append(made)
            elif event.action == "oom":
                self.refused = number
        for address, size, asked, stack in device.blocks:
            if address not in held:
                phase = stack.phase if stack.line else "unknown"
                held[address] = _Tensor(address, asked, stack, -1, phase)
                self._tensors.append(held[address])
            held[address].size = size
        # What happens after a refusal of memory, such as that all is freed, explains nothing.
        self._horizon = self.refused if self.refused >= 0 else _FOREVER - 1
        self._last = self._pass_of(self._horizon)

    def _pass_of(self, event: int) -> int:
        return bisect_right(self._passes, event) - 1

    def name_kinds(self) -> None:
        """Decide of which kind each tensor is."""
        backward = [n for n, phase in enumerate(self._phases) if phase == "backward"]
        # A pass that was refused memory is not over.
        over = [n for n in backward if n < self._last or self.refused < 0]
        kept: Counter[bool] = Counter()
        for tensor in self._tensors:
            if "module" in tensor.stack.roles and tensor.begin >= 0:
                kept[tensor.end > self._horizon] += tensor.size
        keeps = bool(backward) or kept[True] > kept[False]
        # Backward passes whose gradients were freed later: what is left of them are workspaces.
        self._freed = {
            born
            for tensor in self._tensors
            if tensor.phase == "backward" and tensor.begin >= 0 and tensor.end <= self._horizon
            if self._pass_of(tensor.end) != (born := self._pass_of(tensor.begin))
        }
        known: dict[tuple[str, str], set[str]] = defaultdict(set)
        gradients: dict[int, Counter[int]] = defaultdict(Counter)
        for tensor in self._tensors:
            tensor.kind = self._kind(tensor, keeps, over[-1] if over else -1)
            if tensor.kind != "unknown" and tensor.stack.line:
                known[tensor.stack.line, tensor.phase].add(tensor.kind)
            if tensor.kind == "gradients":
                gradients[self._pass_of(tensor.begin)][tensor.asked] += 1
        # As many tensors as the gradients of one pass have parameters of their sizes, known ones
        # among them.
        built = Counter(each.asked for each in self._tensors if each.kind == "parameters")
        pairs = max(gradients.values(), key=Counter.total, default=Counter()) - built
        for tensor in self._tensors:
            if tensor.kind != "unknown" or tensor.end <= self._horizon:
                continue
            if tensor.phase in ("backward", "optimizer"):
                # What an open pass holds is what its line always made in passes before.
                kinds = known[tensor.stack.line, tensor.phase]
                tensor.kind = next(iter(kinds)) if len(kinds) == 1 else "unknown"
            elif "module" not in tensor.stack.roles and pairs[tensor.asked]:
                pairs[tensor.asked] -= 1
                tensor.kind = "parameters"

    def _kind(self, tensor: _Tensor, keeps: bool, last_backward: int) -> str:
        roles, phase = tensor.stack.roles, tensor.phase
        born, is_held = self._pass_of(tensor.begin), tensor.end > self._horizon
        died = self._last + 1 if is_held else self._pass_of(tensor.end)
        is_open = is_held and born == self._last > 0 and self.refused >= 0
        if "gradient" in roles:
            return "gradients"
        if tensor.begin >= 0 and born == died and phase != "unknown":
            return "temporary"
        if phase == "backward" and is_held and born in self._freed and born < last_backward:
            return "unknown"
        if phase in ("backward", "optimizer"):
            known = {"backward": "gradients", "optimizer": "optimizer"}[phase]
            return known if not is_open or "state" in roles else "unknown"
        if is_held and "build" in roles:
            return "parameters"
        if not is_held and self._phases[died] == "backward":
            return "activations"
        survived = is_held and born < last_backward
        return "activations" if "module" in roles and keeps and not survived else "unknown"

    def peak(self) -> int:
        """Return the event after which most is held."""
        changes: Counter[int] = Counter()
        for tensor in self._tensors:
            changes[tensor.begin] += tensor.size
            changes[tensor.end] -= tensor.size
        numbers = sorted(changes)
        held = list(accumulate(changes[number] for number in numbers))
        return numbers[held.index(max(held))] if held else -1

    def held_at(self, event: int) -> list[_Tensor]:
        """Return what is held after an event."""
        return [tensor for tensor in self._tensors if tensor.begin <= event < tensor.end]

    def moment(self, at: int, name: str) -> tuple[HeldMemory, list[int]]:
        """Return how full the segments are after an event, and the sizes of their free parts."""
        events, held = self._device.events, self.held_at(at)
        segments = [
            (address, size, 1, not expands) for address, size, expands in self._device.segments
        ]
        segments += [
            (event.address, event.size, -_SEGMENTS[event.action], "map" not in event.action)
            for event in events[max(at, 0) :]
            if event.action in _SEGMENTS
        ]
        edges = [
            edge
            for start, size, change, splits in segments
            for edge in ((start, change, 0, splits), (start + size, -change, 0, splits))
        ]
        for tensor in held:
            edges.append((tensor.address, 0, 1, False))
            edges.append((tensor.address + tensor.size, 0, -1, False))
        holes = _holes(edges)
        last = min(max(at, 0), len(events) - 1)
        reserved = sum(size * change for _, size, change, _ in segments)
        largest = max(holes, default=0) if not self._device.reserved else None
        if self._device.reserved:
            reserved = self._device.reserved[last]
        allocated = sum(tensor.size for tensor in held)
        time = events[last].time_ns if events else 0
        sizes = allocated, reserved, max(reserved - allocated, 0), largest
        return HeldMemory(name, time, *sizes), holes


def _holes(edges: list[tuple[int, int, int, bool]]) -> list[int]:
    """Return the sizes of the parts of segments that hold nothing.

    Each edge is an address, by how much the number of segments and of tensors changes there, and
    whether it ends a segment whatever comes next.
    """
    edges.sort()
    found: list[int] = []
    reserved = held = begin = 0
    was_free = False
    for number, (address, of_segment, of_tensor, splits) in enumerate(edges):
        reserved, held = reserved + of_segment, held + of_tensor
        if number + 1 < len(edges) and edges[number + 1][0] == address and not splits:
            continue
        is_free = reserved > 0 and held <= 0
        if was_free and (splits or not is_free) and address > begin:
            found.append(address - begin)
        if is_free and (splits or not was_free):
            begin = address
        was_free = is_free
    return found


def _out_of_memory(
    device: DeviceSnapshot,
    refused: int,
    moment: HeldMemory,
    holes: Sequence[int],
    kinds: Sequence[Holder],
    lines: Sequence[Holder],
) -> OutOfMemory:
    """Return why memory was refused, and what would have avoided it as far as figures prove it."""
    event = device.events[refused]
    asked, left, line = event.size, event.device_free, event.stack.line
    missing = max(asked - left - moment.free_bytes, 0)
    advice = []
    pages = sum(hole // _PAGE * _PAGE for hole in holes)
    is_on = "expandable_segments:true" in device.settings.lower().replace(" ", "")
    if not is_on and left + pages >= asked:
        advice.append(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the free parts can then be given "
            f"back in pages, {format_bytes(pages)} of them, and with what the driver had this "
            "request fits"
        )
    held = {each.name: each.held_bytes for each in kinds}
    grows = held.get("activations", 0)
    if event.stack.phase != "optimizer" and 0 < missing < grows + asked:
        advice.append(
            f"a batch of at most {1 - missing / (grows + asked):.0%} of this one: activations "
            f"({format_bytes(grows)}) and the request shrink with it"
        )
    for row in [row for row in lines if row.kind == "activations"][:1]:
        if row.held_bytes >= missing > 0:
            advice.append(
                f"checkpointing (torch.utils.checkpoint) what {row.name} computes: its activations "
                f"hold {format_bytes(row.held_bytes)}"
            )
    advice += [
        f"{cure}: they hold {format_bytes(held[kind])}"
        for kind, cure in _CURES.items()
        if held.get(kind, 0) >= missing > 0
    ]
    needed = f"; {format_bytes(missing)} more were needed" if missing else ", enough in all"
    message = (
        f"{format_bytes(asked)} were refused{f' at {line}' if line else ''}: the driver had "
        f"{format_bytes(left)}, the allocator's segments {format_bytes(moment.free_bytes)} "
        f"free, in parts of at most {format_bytes(moment.largest_free_bytes or 0)}{needed}"
    )
    cause = "shortage" if missing else "fragmentation"
    return OutOfMemory(asked, left, missing, cause, line, message, tuple(advice))


def _holders(
    held: Sequence[_Tensor], total: int, name: Callable[[_Tensor], str]
) -> tuple[Holder, ...]:
    """Return what holds how many bytes of a total, the most first."""
    sizes: Counter[tuple[str, str]] = Counter()
    blocks = Counter((name(tensor), tensor.kind) for tensor in held)
    for tensor in held:
        sizes[name(tensor), tensor.kind] += tensor.size
    rows = (Holder(*of, size, blocks[of], size / (total or 1)) for of, size in sizes.items())
    return tuple(sorted(rows, key=lambda row: (-row.held_bytes, row.name, row.kind)))
