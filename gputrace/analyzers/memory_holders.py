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
from typing import Final

from gputrace.model.memory import (
    SCHEMA_VERSION,
    DeviceMemory,
    HeldMemory,
    Holder,
    MemoryReport,
    OutOfMemory,
)
from gputrace.readers.memory_snapshot import DeviceSnapshot, Event, Stack
from gputrace.units import format_bytes, format_share

_UNIT: Final = 512
"""Bytes of which the allocator gives multiples."""
_PAGE: Final = 2 << 20
"""Bytes of the pages that expandable segments are made of."""
_MOST_HOLDERS: Final = 12
_OF_CATEGORY: Final = {
    "is parameter": "parameters",
    "is gradient": "gradients",
    "is optimizer_state": "optimizer",
    "is activation": "activations",
    "is temporary": "temporary",
}
_FOREVER: Final = 1 << 60


class _Tensor:
    """Memory of a tensor: where it was, and from which event to which it was held."""

    def __init__(self, address: int, asked: int, stack: Stack, begin: int, phase: str) -> None:
        self.address, self.asked, self.stack, self.begin = address, asked, stack, begin
        self.phase = phase
        self.size = -(-asked // _UNIT) * _UNIT
        self.end = _FOREVER
        self.kind = "unknown"


def report_memory(snapshots: Iterable[tuple[str, Sequence[DeviceSnapshot]]]) -> MemoryReport:
    """Return who holds the memory of each GPU, given snapshots by path."""
    devices = (_Replay(path, device).result() for path, held in snapshots for device in held)
    return MemoryReport(SCHEMA_VERSION, "memory snapshot", tuple(devices))


class _Replay:
    """Replay of the history of one GPU."""

    def __init__(self, path: str, device: DeviceSnapshot) -> None:
        self._path, self._device = path, device
        events = device.events
        ends = "free_completed"
        if not any(event.action == ends for event in events):
            ends = "free_requested"
        has_stacks = any(e.stack.roles - {"no frames"} or e.stack.line for e in events)
        self._passes = [-1]  # Events that begin a pass, and its phase.
        self._phases = ["unknown"]
        self.tensors: list[_Tensor] = []
        held: dict[int, _Tensor] = {}
        for number, event in enumerate(events):
            if event.action in ("alloc", "oom"):
                phase = self._phase(event.stack, has_stacks)
                if phase != self._phases[-1]:
                    self._passes.append(number)
                    self._phases.append(phase)
            if event.action in ("alloc", ends) and event.address in held:
                held.pop(event.address).end = number
            elif event.action == ends:
                self._add(_Tensor(event.address, event.size, Stack(), -1, "unknown")).end = number
            if event.action == "alloc":
                made = _Tensor(event.address, event.size, event.stack, number, self._phases[-1])
                held[event.address] = self._add(made)
        for block in device.blocks:
            tensor = held.get(block.address)
            if tensor is None:
                phase = block.stack.phase if block.stack.roles - {"no frames"} else "unknown"
                asked = block.requested, block.stack, -1, phase
                tensor = self._add(_Tensor(block.address, *asked))
            tensor.size = block.size
        # What happens after a refusal of memory, such as that all is freed, explains nothing.
        self._refused = max((n for n, e in enumerate(events) if e.action == "oom"), default=-1)
        self._horizon = self._refused if self._refused >= 0 else _FOREVER - 1
        self._name_kinds()

    def _add(self, tensor: _Tensor) -> _Tensor:
        self.tensors.append(tensor)
        return tensor

    @staticmethod
    def _phase(stack: Stack, has_stacks: bool) -> str:
        if not has_stacks:
            return "unknown"
        # Threads of the backward pass have no frames of Python.
        return "backward" if "no frames" in stack.roles else stack.phase

    def _pass_of(self, event: int) -> int:
        return bisect_right(self._passes, event) - 1

    def _name_kinds(self) -> None:
        backward = [n for n, phase in enumerate(self._phases) if phase == "backward"]
        self._last = self._pass_of(self._horizon)
        # A pass that was refused memory is not over.
        over = [n for n in backward if n < self._last or self._refused < 0]
        self._ran_backward = over[-1] if over else -1
        made = [0, 0]
        for tensor in self.tensors:
            if "module" in tensor.stack.roles and tensor.begin >= 0:
                made[tensor.end > self._horizon] += tensor.size
        keeps = "backward" in self._phases or made[1] > made[0]
        for tensor in self.tensors:
            tensor.kind = self._kind(tensor, keeps)
        # What the open pass holds is what its lines made in passes before.
        known: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for tensor in self.tensors:
            known[tensor.stack.line, tensor.phase][tensor.kind] += tensor.size
        made_in: dict[int, Counter[int]] = defaultdict(Counter)
        for tensor in self.tensors:
            if tensor.kind == "gradients":
                made_in[self._pass_of(tensor.begin)][tensor.asked] += 1
        gradients = max(made_in.values(), key=_bytes, default=Counter())
        for tensor in self.tensors:
            if tensor.kind != "unknown":
                continue
            if tensor.phase in ("unknown", "forward") and tensor.end > self._horizon:
                if "module" not in tensor.stack.roles and gradients[tensor.asked]:
                    gradients[tensor.asked] -= 1
                    tensor.kind = "parameters"
            elif tensor.stack.line and tensor.end > self._horizon:
                of = known[tensor.stack.line, tensor.phase]
                del of["unknown"]
                tensor.kind = of.most_common(1)[0][0] if of else "unknown"

    def _kind(self, tensor: _Tensor, keeps: bool) -> str:
        roles, phase = tensor.stack.roles, tensor.phase
        if category := roles & _OF_CATEGORY.keys():
            return _OF_CATEGORY[next(iter(category))]
        if "gradient" in roles:
            return "gradients"
        born, is_held = self._pass_of(tensor.begin), tensor.end > self._horizon
        died = self._last + 1 if is_held else self._pass_of(tensor.end)
        if tensor.begin >= 0 and born == died and phase != "unknown":
            return "temporary"
        if is_held and born == self._last > 0 and self._refused >= 0:
            if "state" in roles:
                return "optimizer"
            if phase in ("backward", "optimizer"):
                return "unknown"
        if phase == "backward":
            return "gradients"
        if phase == "optimizer":
            return "optimizer"
        if is_held and "build" in roles:
            return "parameters"
        if not is_held and self._phases[died] == "backward":
            return "activations"
        if "module" in roles:
            survived = is_held and born < self._ran_backward
            return "activations" if keeps and not survived else "unknown"
        return "unknown"

    def result(self) -> DeviceMemory:
        """Return who holds memory at the peak, or when it was refused."""
        refused = self._refused
        at, name = (refused, "out of memory") if refused >= 0 else (self._peak(), "peak")
        held = [tensor for tensor in self.tensors if tensor.begin <= at < tensor.end]
        total = sum(tensor.size for tensor in held)
        kinds = _holders(held, lambda tensor: tensor.kind)
        shown = [f"{each.name} {format_share(each.held_bytes, total)}" for each in kinds[:3]]
        lines = _holders(held, lambda tensor: tensor.stack.line or _before(tensor))
        moment = self._moment(at, name, held)
        ending = self._moment(
            len(self._device.events), "end", [t for t in self.tensors if t.end == _FOREVER]
        )
        out = self._out_of_memory(moment, held, kinds, lines) if refused >= 0 else None
        message = f"{format_bytes(total)} are held at the peak: {', '.join(shown)}"
        if out is not None:
            message = out.message
        modules = _holders(
            [t for t in held if t.stack.module], lambda tensor: tensor.stack.module, total
        )
        return DeviceMemory(
            self._path,
            self._device.device,
            len(self._device.events),
            message,
            (moment, ending),
            kinds,
            lines[:_MOST_HOLDERS],
            modules[:_MOST_HOLDERS],
            out,
        )

    def _peak(self) -> int:
        changes: Counter[int] = Counter()
        for tensor in self.tensors:
            changes[tensor.begin] += tensor.size
            changes[tensor.end] -= tensor.size
        held = most = 0
        at = -1
        for number in sorted(changes):
            held += changes[number]
            if held > most:
                most, at = held, number
        return at

    def _moment(self, at: int, name: str, held: Sequence[_Tensor]) -> HeldMemory:
        """Return how full the segments are when these tensors are held."""
        events = self._device.events
        edges: list[tuple[int, int, int, bool]] = []
        reserved = 0

        def reserve(address: int, size: int, change: int, splits: bool) -> None:
            nonlocal reserved
            reserved += change * size
            edges.append((address, change, 0, splits))
            edges.append((address + size, -change, 0, splits))

        for segment in self._device.segments:
            reserve(segment.address, segment.size, 1, not segment.is_expandable)
        for event in events[max(at, 0) :]:
            if event.action in _SEGMENTS:
                change = _SEGMENTS[event.action]
                reserve(event.address, event.size, -change, "map" not in event.action)
        for tensor in held:
            edges.append((tensor.address, 0, 1, False))
            edges.append((tensor.address + tensor.size, 0, -1, False))
        time = events[min(max(at, 0), len(events) - 1)].time_ns if events else 0
        allocated = sum(tensor.size for tensor in held)
        self._holes = _holes(edges)
        free = max(reserved - allocated, 0)
        return HeldMemory(name, time, allocated, reserved, free, max(self._holes, default=0))

    def _out_of_memory(
        self,
        moment: HeldMemory,
        held: Sequence[_Tensor],
        kinds: Sequence[Holder],
        lines: Sequence[Holder],
    ) -> OutOfMemory:
        event = self._device.events[self._refused]
        asked, left = event.size, event.device_free
        missing = max(asked - left - moment.free_bytes, 0)
        line = event.stack.line
        needed = f"; {format_bytes(missing)} more were needed" if missing else ", enough in all"
        message = (
            f"{format_bytes(asked)} were refused{f' at {line}' if line else ''}: the driver had "
            f"{format_bytes(left)}, the allocator's segments {format_bytes(moment.free_bytes)} "
            f"free, in parts of at most {format_bytes(moment.largest_free_bytes)}{needed}"
        )
        advice = _advice(self._device, event, missing, left, self._holes, kinds, lines)
        cause = "shortage" if missing else "fragmentation"
        return OutOfMemory(asked, left, missing, cause, line, message, tuple(advice))


_SEGMENTS: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _holes(edges: list[tuple[int, int, int, bool]]) -> list[int]:
    """Return the sizes of the parts of segments that hold nothing, given where both change."""
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


def _advice(
    device: DeviceSnapshot,
    event: Event,
    missing: int,
    left: int,
    holes: Sequence[int],
    kinds: Sequence[Holder],
    lines: Sequence[Holder],
) -> list[str]:
    """Return what would have avoided a refusal, as far as its figures prove it."""
    advice = []
    pages = sum(hole // _PAGE * _PAGE for hole in holes)
    is_on = "expandable_segments:true" in device.settings.lower().replace(" ", "")
    if not is_on and left + pages >= event.size:
        advice.append(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the free parts can then be given "
            f"back in pages, {format_bytes(pages)} of them, and with what the driver had this "
            "request fits"
        )
    held = {each.name: each.held_bytes for each in kinds}
    needed = max(event.size - left, 0)
    grows = held.get("activations", 0)
    if event.stack.phase != "optimizer" and 0 < missing < grows + event.size:
        fits = 1 - missing / (grows + event.size)
        advice.append(
            f"a batch of at most {fits:.0%} of this one: activations ({format_bytes(grows)}) and "
            "the request shrink with it"
        )
    line = next((each for each in lines if each.kind == "activations"), None)
    if line is not None and line.held_bytes >= missing > 0:
        advice.append(
            f"checkpointing (torch.utils.checkpoint) what {line.name} computes: its activations "
            f"hold {format_bytes(line.held_bytes)}"
        )
    for kind, cure in _OF_KIND.items():
        if held.get(kind, 0) >= missing > 0:
            advice.append(f"{cure}: they hold {format_bytes(held[kind])}")
    if missing and not advice:
        advice.append(f"no single kind of tensors holds the {format_bytes(needed)} that lack")
    return advice


_OF_KIND: Final = {
    "optimizer": "less memory for states of the optimizer (8 bits, sharded, or on the host)",
    "gradients": "gradients freed before the forward pass (zero_grad), or sharded",
    "parameters": "parameters of fewer bits, or sharded",
}


def _before(tensor: _Tensor) -> str:
    return "(before the history)" if tensor.begin < 0 else ""


def _bytes(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _holders(
    held: Sequence[_Tensor], name: Callable[[_Tensor], str], total: int = 0
) -> tuple[Holder, ...]:
    """Return what holds so many bytes, of ``total`` or of their sum, the most first."""
    sizes: Counter[tuple[str, str]] = Counter()
    blocks: Counter[tuple[str, str]] = Counter()
    for tensor in held:
        sizes[name(tensor), tensor.kind] += tensor.size
        blocks[name(tensor), tensor.kind] += 1
    whole = total or sizes.total() or 1
    rows = (Holder(*of, size, blocks[of], size / whole) for of, size in sizes.items())
    return tuple(sorted(rows, key=lambda row: (-row.held_bytes, row.name, row.kind)))
