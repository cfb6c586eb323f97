"""Progress of this process, for ``gputrace record --hang``: readable from outside while it hangs.

A shared mapping holds counts of steps and collectives, and the last collectives that the program
has called of torch.distributed, with the line that called them. It is written where the call is
made, in some 5 µs, and outlives a process that is killed. Stacks are written by faulthandler, at a
signal of the recorder's: no thread of ours waits for it, and the GIL may be held by whoever hangs.
"""

import atexit
import faulthandler
import os
import signal
import struct
import sys
from functools import partial, wraps
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE

from . import FOLDER, steps
from .host_file import Suppress, assert_fits, open_high, time_ns
from .recorder import note_ours, on_fork
from .wrappers import ours, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, ModuleType
    from typing import Any

HEADER = struct.Struct("<8sIIiiQQQQQi")
"""Magic, version, process, rank, ranks in all, when it began and ended, steps, collectives entered
and left, descriptor of the stacks' file."""
SLOT = struct.Struct("<QQQqqH")
"""Number of the collective, of its group, of the step; start, end (0 while under way); length of
the text: group, operation, line, members, between zero bytes."""
COUNTS = struct.Struct("<QQ")
COUNTS_AT = struct.calcsize("<8sIIiiQQQ")
"""Collectives entered and left, in the header."""
START = struct.Struct("<QQ")
END = struct.Struct("<q")
END_AT = struct.calcsize("<QQQq")
MAGIC = b"GPTRHANG"
SLOTS, SLOT_BYTES, FIRST = 256, 512, 128
SIGNAL = signal.SIGRTMIN + 21

_COLLECTIVES = """
    init_process_group all_gather all_gather_coalesced all_gather_into_tensor all_gather_object
    all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier broadcast
    broadcast_object_list gather gather_object monitored_barrier reduce reduce_scatter
    reduce_scatter_tensor scatter scatter_object_list send recv isend irecv
    """.split()  # noqa: SIM905 (as a list, it is a line each)
_parameters: "dict[str, tuple[str, ...]]" = {}
"""Names of the parameters of each of them."""
_PEER = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
_standard = os.path.dirname(os.__file__) + os.sep
_package = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MOST_FRAMES = 60


def _mapped(path: str) -> "Any":
    """Map a new file into memory for as long as the process lives.

    Python's mmap would keep a descriptor, and close one of that number when a child is forked.
    """
    import ctypes

    size = FIRST + SLOTS * SLOT_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    integers = (ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.argtypes = (ctypes.c_void_p, *integers)
    with open(path, "w+b") as file:
        # Not a hole: to write into one on a full disk ends a process.
        assert_fits(size)
        os.posix_fallocate(file.fileno(), 0, size)
        at = libc.mmap(None, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.fileno(), 0)
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "cannot be mapped")
    return (ctypes.c_char * size).from_address(at)


class _Ring:
    """The mapping of one process."""

    def __init__(self) -> None:
        base = os.path.join(FOLDER, str(os.getpid()))
        self.map = _mapped(base + ".hang")
        self.stacks = -1
        if signal.getsignal(SIGNAL) == signal.SIG_DFL:
            self.stacks = open_high(base + ".stacks", os.O_CREAT)
            faulthandler.register(SIGNAL, self.stacks, all_threads=True)
        self.began, self.ended = time_ns(), 0
        rank = os.environ.get("RANK", "")
        self.rank, self.ranks = int(rank) if rank.isdigit() else -1, 0
        self.steps = self.entered = self.left = 0
        self.by_group: dict[str, int] = {}
        self.write()

    def write(self) -> None:
        counts = self.steps, self.entered, self.left
        words = os.getpid(), self.rank, self.ranks, self.began, self.ended, *counts, self.stacks
        HEADER.pack_into(self.map, 0, MAGIC, 1, *words)

    def enter(self, group: str, text: bytes) -> "tuple[int, int, int]":
        """Note a collective of a group; give what `leave` takes."""
        number = self.by_group[group] = self.by_group.get(group, 0) + 1
        serial = self.entered
        at = FIRST + serial % SLOTS * SLOT_BYTES
        SLOT.pack_into(self.map, at, serial, number, self.steps, time_ns(), 0, len(text))
        struct.pack_into(f"{len(text)}s", self.map, at + SLOT.size, text)
        self.entered = serial + 1
        COUNTS.pack_into(self.map, COUNTS_AT, self.entered, self.left)
        return (at, serial, number)

    def leave(self, at: int, serial: int, number: int) -> None:
        """Note the end of a collective, unless others have taken its slot since."""
        self.left += 1
        if START.unpack_from(self.map, at) == (serial, number):
            END.pack_into(self.map, at + END_AT, time_ns())
        COUNTS.pack_into(self.map, COUNTS_AT, self.entered, self.left)


_rings: "list[_Ring | None]" = []
_inside: "list[None]" = []
"""Not empty within a collective: some are made of others."""


def _ring() -> "_Ring | None":
    """The ring of this process; None where none can be made, as on a full disk."""
    if not _rings:
        ring = None
        try:
            ring = _Ring()
        except (OSError, ImportError):
            note_ours("looking for hangs")
        _rings.append(ring)
    return _rings[0]


def _step_ended(_rank: int, _end: int) -> None:
    ring = _ring()
    if ring is not None:
        ring.steps += 1
        ring.write()


def install() -> None:
    """Count steps from now on."""
    steps.on_step.append(_step_ended)


def follow_collectives(module: "ModuleType") -> None:
    """Wrap the functions of torch.distributed that the program calls.

    Those that DistributedDataParallel calls are in C++; PyTorch's flight recorder knows them.
    """
    _have_pipe()
    for name in _COLLECTIVES:
        wrap(module, name, partial(_noted, module, name))


def _have_pipe() -> None:
    """Have PyTorch dump its flight recorder of NCCL when its pipe is written to.

    PyTorch ends the program where it cannot make the pipe, so that is tried first.
    """
    sizes = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    if {*sizes, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"} & os.environ.keys():
        return
    stem = os.path.join(FOLDER, f"{os.getpid()}.nccl-")
    version = getattr(sys.modules.get("torch"), "__version__", "").split(".")
    with Suppress(OSError):
        os.mkfifo(stem)
        os.unlink(stem)
        os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = stem
        # From 2.13 on it has its recorder on, and warns of the old variable.
        if [part.zfill(2) for part in version[:2]] < ["02", "13"]:
            os.environ[sizes[0]] = "2000"


def _noted(module: "Any", name: str, function: "Any") -> "Any":
    inner = function
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    _parameters[name] = inner.__code__.co_varnames[: inner.__code__.co_argcount]

    @wraps(function)
    def call(*args: "Any", **keywords: "Any") -> "Any":
        if _inside:
            return function(*args, **keywords)
        _inside.append(None)
        try:
            slot = _enter(module, name, args, keywords)
            try:
                return function(*args, **keywords)
            finally:
                if slot is not None:
                    _leave(module, slot)
        finally:
            _inside.pop()

    return ours(call)


def _enter(module: "Any", name: str, args: "Any", keywords: "Any") -> "tuple[int, int, int] | None":
    try:
        ring = _rings[0] if _rings else _ring()
        if ring is None:
            return None
        group = _given("group", name, args, keywords)
        other = _given(_PEER[name], name, args, keywords) if name in _PEER else None
        frame = program_frame(sys._getframe(2))
        # What stays the same from call to call is put into words once.
        of_group = None if group is None else getattr(group, "group_name", "") or id(group)
        at_line = (name, of_group, other, ring.ranks, frame.f_code, frame.f_lineno)
        known = _texts.get(at_line)
        if known is None:
            if len(_texts) >= _MOST_TEXTS:
                _texts.clear()
            known = _texts[at_line] = _describe(module, ring, name, group, other, frame)
        return ring.enter(*known)
    except Exception:
        note_ours("noting collectives")
        return None


def _given(argument: str, name: str, args: "Any", keywords: "Any") -> "Any":
    """Return an argument that may be given by its name or its place; None if it is not."""
    if argument in keywords:
        return keywords[argument]
    here = _parameters[name][: len(args)]
    return args[here.index(argument)] if argument in here else None


_MOST_TEXTS = 2000
_texts: "dict[tuple[Any, ...], tuple[str, bytes]]" = {}


def _describe(
    module: "Any", ring: _Ring, name: str, group: "Any", other: "Any", frame: "FrameType"
) -> "tuple[str, bytes]":
    """Return the group's name, and all that a slot says of a collective."""
    key, members = "default", f"0-{ring.ranks - 1}"
    if not ring.ranks:
        key, members = "the start", "0-{}".format(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    if group is not None:
        key = str(getattr(group, "group_name", id(group)))
        members = _ranges(module.get_process_group_ranks(group))
    if isinstance(other, int):
        ends = (ring.rank, other) if _PEER[name] == "dst" else (other, ring.rank)
        key, members = "{} to {} ({})".format(*ends, key), "{},{}".format(*ends)
    line = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
    text = "\0".join((key, name, line, members)).encode("utf-8", "replace")
    room = SLOT_BYTES - SLOT.size
    # A number that is cut would be another rank.
    return key, text if len(text) <= room else text[:room].rpartition(b",")[0] or text[:room]


def _ranges(ranks: "list[int]") -> str:
    """Return ranks as text, as ``0-12/4`` for each fourth."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if ranks == list(range(ranks[0], ranks[-1] + 1, max(stride, 1))):
        return f"{ranks[0]}-{ranks[-1]}/{stride}"
    return ",".join(map(str, ranks))


def _leave(module: "Any", slot: "tuple[Any, ...]") -> None:
    try:
        ring = _ring()
        if ring is None:
            return
        if not ring.ranks and module.is_initialized():
            ring.rank, ring.ranks = module.get_rank(), module.get_world_size()
        ring.leave(*slot)
    except Exception:
        note_ours("noting collectives")


_is_program: "dict[str, bool]" = {}


def program_frame(frame: "FrameType") -> "FrameType":
    """The innermost frame of the program proper, from a frame outwards; else the frame."""
    outer: FrameType | None = frame
    for _ in range(_MOST_FRAMES):
        if outer is None:
            break
        file = outer.f_code.co_filename
        known = _is_program.get(file)
        if known is None:
            within = "/site-packages/" in file or "/dist-packages/" in file
            starts = (_standard, _package, "<frozen")
            known = _is_program[file] = not (within or file.startswith(starts))
        if known:
            return outer
        outer = outer.f_back
    return frame


def _at_end() -> None:
    ring = _rings[0] if _rings else None
    if ring is not None:
        ring.ended = time_ns()
        ring.write()


def _in_forked_child() -> None:
    if _rings:
        ring = _rings.pop()
        if ring is not None and ring.stacks >= 0:
            faulthandler.unregister(SIGNAL)
    del _inside[:]


on_fork.append(_in_forked_child)
atexit.register(_at_end)
