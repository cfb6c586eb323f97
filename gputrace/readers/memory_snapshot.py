"""Snapshots of PyTorch's CUDA allocator, as ``torch.cuda.memory._dump_snapshot`` pickles them.

A snapshot has the segments that the allocator holds, with their blocks, and the history of its
events, each with the stack that led to it (torch/csrc/cuda/memory_snapshot.cpp; versions 1.13 to
2.x). Stacks begin with the innermost frame; those of C++ have frames of C++ among Python's. A
backward pass runs on a thread without frames of Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from gputrace.errors import InputError
from gputrace.readers.flight_recorder import is_of_program
from gputrace.readers.plain_pickle import (
    MALFORMED,
    Allowance,
    Refused,
    content_of,
    plain_pickle,
    problem,
)

_SNAPSHOT: Final = "memory snapshot of PyTorch"
MOST_OPCODES: Final = 1 << 26
"""Opcodes of a snapshot: 100,000 events with stacks of 80 frames take about 10 million."""
_OF_ENTRY: Final = 3000
"""Bytes that an event, a block or a segment counts: each takes at least 50 bytes of a real file."""
_OF_CHARACTER: Final = 16
"""Bytes that a character of a frame counts: frames may refer to the same texts."""
_MOST_TEXT: Final = 400
"""Characters of a path or a function; templates of C++ have thousands."""
_MOST_NUMBER: Final = 1 << 62
_BEGINNING: Final = rb"(?s)\A\x80[\x02-\x05].{0,60}(segments|device_traces|allocator_settings)"


class Stack(NamedTuple):
    """Stack of calls that led to an allocation, in short."""

    line: str = ""
    """Innermost line of the program, ``file:line function``; else the node of the backward pass, as
    ``MmBackward0``; empty where unknown."""
    module: str = ""
    """File of the innermost ``forward`` that a module's call led to, without its suffix."""
    roles: frozenset[str] = frozenset()
    """Roles of its frames (`_ROLES`); ``no frames`` for a stack that was recorded but is empty."""

    @property
    def phase(self) -> str:
        """Return ``backward``, ``optimizer`` or ``forward``: any other code of the program."""
        if self.roles & {"backward", "gradient"}:
            return "backward"
        return "optimizer" if "optimizer" in self.roles else "forward"


class Event(NamedTuple):
    """Event of the allocator."""

    action: str
    address: int
    size: int
    """Bytes asked for; of ``oom`` those of the request that failed."""
    stack: Stack
    time_ns: int
    device_free: int
    """Bytes that the driver had left; of ``oom`` only."""


class DeviceSnapshot(NamedTuple):
    """Snapshot of the allocator of one GPU."""

    device: int
    segments: tuple[tuple[int, int, bool], ...]
    """Address and size of what the allocator holds of the driver; True if it can be extended."""
    blocks: tuple[tuple[int, int, int, Stack], ...]
    """Blocks that hold tensors at the end: address, size, and for how many bytes and where it was
    asked."""
    events: tuple[Event, ...]
    settings: str
    """Settings as the program gave them, such as ``expandable_segments:True``."""
    reserved: tuple[int, ...] = ()
    """Bytes of segments after each event, where only these are known of them."""


def is_memory_snapshot(path: Path) -> bool:
    """Return whether a file, known by its beginning, is a snapshot."""
    if not path.is_file():  # A pipe would be waited for.
        return False
    with suppress(OSError), path.open("rb") as file:
        return re.match(_BEGINNING, file.read(400)) is not None
    return False


def read_snapshot(path: Path) -> list[DeviceSnapshot]:
    """Read a snapshot: the GPUs that hold memory or have a history.

    Raises InputError for a file that is no snapshot, or holds more than plain values.
    """
    data = content_of(path, _SNAPSHOT)
    try:
        devices = SnapshotReading(len(data)).devices(plain_pickle(data, MOST_OPCODES))
    except MALFORMED as error:
        raise InputError(path, problem(error, _SNAPSHOT)) from error
    if not devices:
        raise InputError(path, "a memory snapshot without an allocation: no GPU held memory")
    return devices


_ROLES: Final = (
    ("backward", ("",), ("backward", "_engine_run_backward")),
    ("backward", ("/torch/utils/checkpoint.py",), ("unpack_hook", "recompute_fn")),
    ("optimizer", ("/optim/", "/optimizers/", "optimizer"), ("step", "wrapper")),
    ("optimizer", ("/deepspeed/runtime/",), ("step",)),
    ("state", ("/optim/",), ("_init_group",)),
    ("module", ("/torch/nn/modules/module.py",), ("_call_impl",)),
    ("build", ("/torch/nn/modules/module.py",), ("_apply",)),
    ("build", ("/torch/nn/",), ("__init__", "__new__", "reset_parameters")),
    ("build", ("",), ("from_pretrained", "load_state_dict", "to_empty")),
)
"""Roles of frames of Python, by a part of their path and their functions."""
_NATIVE_ROLES: Final = {
    "torch::autograd::Engine::": "backward",
    "torch::autograd::Node::": "backward",
    "AccumulateGrad": "gradient",
    "c10d::Reducer": "gradient",
}
_NODE: Final = re.compile(r"[A-Za-z0-9]{1,60}Backward\d?|AccumulateGrad")


class _Frame(NamedTuple):
    line: str
    """Empty for frames that are not the program's."""
    function: str
    """Function of Python; empty for frames of C++."""
    file: str
    roles: frozenset[str]
    node: str


class SnapshotReading:
    """Reads a snapshot; each frame is looked at once, however many stacks it is in."""

    def __init__(self, size: int) -> None:
        self._allowance = Allowance(size)
        self._frames: dict[int, _Frame] = {}
        self._stacks: dict[int, Stack] = {}

    def devices(self, content: Any) -> list[DeviceSnapshot]:
        """Return what each GPU holds; raises one of `MALFORMED` for what is no snapshot."""
        traces = content.get("device_traces", ())
        if "segments" not in content or not isinstance(traces, Sequence):
            raise ValueError("no segments")
        settings = content.get("allocator_settings") or {}
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        given = next((settings[name] for name in names if settings.get(name)), "")
        by_device: dict[int, list[Any]] = {number: [] for number, each in enumerate(traces) if each}
        for segment in content["segments"]:
            by_device.setdefault(_number(segment.get("device", 0)), []).append(segment)
        return [
            DeviceSnapshot(
                device,
                tuple(map(self._segment, segments)),
                tuple(block for each in segments for block in self._blocks(each)),
                tuple(map(self._event, traces[device])) if device < len(traces) else (),
                _text(given)[:_MOST_TEXT],
            )
            for device, segments in sorted(by_device.items())
        ]

    def _segment(self, segment: dict[str, Any]) -> tuple[int, int, bool]:
        self._allowance.spend(_OF_ENTRY)
        sizes = _number(segment["address"]), _number(segment["total_size"])
        return *sizes, bool(segment.get("is_expandable"))

    def _blocks(self, segment: dict[str, Any]) -> list[tuple[int, int, int, Stack]]:
        at, found = _number(segment["address"]), []
        for block in segment["blocks"]:
            self._allowance.spend(_OF_ENTRY)
            size = _number(block["size"])
            if block["state"] != "inactive":
                # The first versions have a list of what the block was used for.
                of = (block.get("history") or [block])[0]
                asked = block.get("requested_size", of.get("real_size", size))
                stack = self.stack(of.get("frames"))
                found.append((_number(block.get("address", at)), size, _number(asked), stack))
            at += size
        return found

    def _event(self, entry: dict[str, Any]) -> Event:
        self._allowance.spend(_OF_ENTRY)
        size, action = _number(entry.get("size", 0)), _text(entry["action"])
        free = _number(entry.get("device_free", 0))
        time = 1000 * _number(entry.get("time_us", 0))
        frames = entry.get("frames") if action in ("alloc", "oom") else None
        address = _number(entry.get("addr", 0))
        return Event(action, address, size, self.stack(frames), time, free)

    def stack(self, frames: Any) -> Stack:
        """Return the stack of a list of frames, the innermost first, which must stay alive."""
        if not frames:
            return Stack(roles=frozenset() if frames is None else frozenset(("no frames",)))
        if id(frames) not in self._stacks:
            found = [self._frame(frame) for frame in frames]
            line = next((each.line for each in found if each.line), "")
            node = next((each.node for each in found if each.node), "")
            pairs = pairwise(each for each in found if each.function)
            calls = (
                inner.file
                for inner, outer in pairs
                if inner.function == "forward" and "module" in outer.roles
            )
            roles = frozenset().union(*(each.roles for each in found))
            # A closure that an optimizer calls runs the model.
            decisive = (each.roles & {"module", "optimizer"} for each in found)
            if "module" in next(filter(None, decisive), ()):
                roles -= {"optimizer", "state"}
            self._stacks[id(frames)] = Stack(line or node, next(calls, ""), roles)
        return self._stacks[id(frames)]

    def _frame(self, frame: dict[str, Any]) -> _Frame:
        if id(frame) not in self._frames:
            name, path = _text(frame["name"]), _text(frame["filename"])
            self._allowance.spend(_OF_CHARACTER * (len(name) + len(path)))
            name, path = name[:_MOST_TEXT], path[-_MOST_TEXT:].replace("\\", "/")
            file = path.rpartition("/")[2]
            if path.endswith(".py") or path.startswith("<"):
                roles = {
                    role
                    for role, parts, names in _ROLES
                    if name in names and any(part in path for part in parts)
                }
                line = f"{path}:{_number(frame['line'])} {name}" if is_of_program(path) else ""
                found = _Frame(line, name, file.removesuffix(".py"), frozenset(roles), "")
            else:
                roles = {role for part, role in _NATIVE_ROLES.items() if part in name}
                node = _NODE.search(name)
                found = _Frame("", "", "", frozenset(roles), node[0] if node else "")
            self._frames[id(frame)] = found
        return self._frames[id(frame)]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _MOST_NUMBER:
        raise Refused("it holds a size or an address that no memory has")
    return value
