"""What NVML says once: each card's description, and how the cards hang together.

Numbers and names are those of nvml.h (CUDA 12.4 to 13.x) and of `nvidia-smi topo`. What a driver
does not support or does not allow is None here and NULL in the file, never 0.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

DEVICE: Final = {
    "gpu": "index of the card, as NVML counts",
    "uuid": "GPU-…, as CUDA_VISIBLE_DEVICES takes it",
    "name": "what the card is called",
    "pciBusId": "domain:bus:device.function, small letters: 0000:06:00.0",
    "memoryTotal": "bytes",
    "smClockMax": "MHz",
    "memoryClockMax": "MHz",
    "smClockApplication": "MHz that the card is set to run at under load",
    "memoryClockApplication": "MHz",
    "pcieGenMax": "generation that card and slot agree on at most",
    "pcieWidthMax": "lanes that card and slot agree on at most",
    "powerLimit": "mW that the driver enforces",
    "migMode": "1 where the card is partitioned (MIG), else 0",
    "cpuAffinity": "CPUs near the card: 0-31,64-95",
    "numaNode": "node of the host's memory that is nearest",
}
"""Columns of a card's description. In the .jsonl file `cpuAffinity` is a list of CPU numbers."""

TOPOLOGY: Final = {
    "gpu": "index of the one card",
    "peer": "index of the other; every ordered pair has a row, a card with itself too",
    "link": "X (itself), NV# (so many NVLinks), or the ancestor: what nvidia-smi topo -m shows",
    "ancestor": "X, INT (one board), PIX (one PCIe switch), PXB (several), PHB (host bridge), "
    "NODE (one NUMA node), SYS (across NUMA nodes)",
    "nvlinks": "active NVLinks to the peer, straight or through NVSwitch",
    "p2pRead": "OK, or why not: CNS chipset, GNS card, TNS topology, DR turned off, NS, U unknown",
    "p2pWrite": "the same for writing",
    "p2pNvlink": "the same for access through NVLink",
}
"""Columns of a pair of cards."""

REFUSED: Final = frozenset({2, 3, 4, 13, 25, 26})
"""InvalidArgument, NotSupported, NoPermission, FunctionNotFound, ArgumentVersionMismatch and
Deprecated: who asks again gets the same answer."""

LOST: Final = frozenset({15, 16, 28})
"""GpuIsLost, ResetRequired, GpuNotFound: nothing more will come from that card."""

Pair = tuple[int, int, str | None, str | None, int | None, str | None, str | None, str | None]

_ANCESTORS: Final = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P: Final = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
# The binding's own READ is a tuple, by a stray comma.
_READ, _WRITE, _NVLINK = 0, 1, 2
_SM, _MEMORY = 1, 2
_NODE_SCOPE: Final = 0
_CPU_WORDS: Final = 64  # 4096 CPUs; the driver writes as many words as it is told there are.
_NODE_WORDS: Final = 16
_SWITCH: Final = "switch"
_SWITCH_TYPE: Final = 2
MAX_LINKS: Final = 36
"""NVLinks of one card, at most."""


def ask(nv: Any, name: str, *arguments: Any) -> Any:
    """What a function of pynvml (`nv`) answers; None where driver or binding has no answer.

    A card that could not be opened is None among the arguments, and is not asked.
    """
    if any(argument is None for argument in arguments):
        return None
    try:
        return getattr(nv, name)(*arguments)
    except (nv.NVMLError, AttributeError):
        return None


def describe(nv: Any, gpu: int, handle: Any) -> dict[str, Any]:
    """The columns of DEVICE for one card."""
    of_pci = ask(nv, "nvmlDeviceGetPciInfo", handle)
    bus = None if of_pci is None else address(of_pci)
    memory = ask(nv, "nvmlDeviceGetMemoryInfo", handle)
    mig = ask(nv, "nvmlDeviceGetMigMode", handle)
    return {
        "gpu": gpu,
        "uuid": ask(nv, "nvmlDeviceGetUUID", handle),
        "name": ask(nv, "nvmlDeviceGetName", handle),
        "pciBusId": bus,
        "memoryTotal": None if memory is None else int(memory.total),
        "smClockMax": ask(nv, "nvmlDeviceGetMaxClockInfo", handle, _SM),
        "memoryClockMax": ask(nv, "nvmlDeviceGetMaxClockInfo", handle, _MEMORY),
        "smClockApplication": ask(nv, "nvmlDeviceGetApplicationsClock", handle, _SM),
        "memoryClockApplication": ask(nv, "nvmlDeviceGetApplicationsClock", handle, _MEMORY),
        "pcieGenMax": ask(nv, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcieWidthMax": ask(nv, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        "powerLimit": ask(nv, "nvmlDeviceGetEnforcedPowerLimit", handle),
        "migMode": None if mig is None else mig[0],
        "cpuAffinity": _bits(ask(nv, "nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS)) or None,
        "numaNode": _numa_node(nv, handle, bus),
    }


def address(of_pci: Any) -> str:
    """PCI address as Linux writes it; NVML gives the domain eight digits."""
    raw = of_pci.busId
    text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    domain, _, rest = text.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return text.lower()


def relate(nv: Any, handles: Sequence[Any], buses: Sequence[str | None]) -> list[Pair]:
    """The columns of TOPOLOGY for every ordered pair of cards."""
    ends = [_link_ends(nv, handle) for handle in handles]
    return [
        _pair(nv, handles, a, b, _links_between(ends[a], ends[b], buses[b]))
        for a in range(len(handles))
        for b in range(len(handles))
    ]


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 8 as `0-2,8`, the way nvidia-smi and taskset write CPUs."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _pair(nv: Any, handles: Sequence[Any], a: int, b: int, nvlinks: int | None) -> Pair:
    if a == b:
        return a, b, "X", "X", None, None, None, None
    level = ask(nv, "nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b])
    ancestor = _ANCESTORS.get(level)
    read, write, nvlink = (
        _p2p_status(nv, handles[a], handles[b], what) for what in (_READ, _WRITE, _NVLINK)
    )
    return a, b, f"NV{nvlinks}" if nvlinks else ancestor, ancestor, nvlinks, read, write, nvlink


def _p2p_status(nv: Any, one: Any, other: Any, what: int) -> str | None:
    try:
        status = ask(nv, "nvmlDeviceGetP2PStatus", one, other, what)
    except TypeError:
        # Some releases of the binding want a place for the answer.
        place = ctypes.c_uint(len(_P2P))
        ask(nv, "nvmlDeviceGetP2PStatus", one, other, what, ctypes.byref(place))
        status = place.value
    return _P2P[status] if isinstance(status, int) and status < len(_P2P) else None


def _link_ends(nv: Any, handle: Any) -> Counter[str] | None:
    """Active NVLinks by what is at their other end: a PCI address, or NVSwitch."""
    states = [ask(nv, "nvmlDeviceGetNvLinkState", handle, link) for link in range(MAX_LINKS)]
    if all(state is None for state in states):
        return None
    return Counter(_link_end(nv, handle, link) for link, state in enumerate(states) if state)


def _link_end(nv: Any, handle: Any, link: int) -> str:
    if ask(nv, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _SWITCH_TYPE:
        return _SWITCH
    of_pci = ask(nv, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    return "" if of_pci is None else address(of_pci)


def _links_between(a: Counter[str] | None, b: Counter[str] | None, bus: str | None) -> int | None:
    """Straight links from a to the card at `bus`, else those that both have to NVSwitch."""
    if a is None or b is None:
        return None
    straight = a[bus] if bus else 0
    return straight or min(a[_SWITCH], b[_SWITCH])


def _bits(words: Iterable[int] | None) -> list[int]:
    """Numbers of the bits set in words of 64 bits."""
    return [
        64 * at + bit for at, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1
    ]


def _numa_node(nv: Any, handle: Any, bus: str | None) -> int | None:
    """nvmlDeviceGetNumaNodeId would be the node that the card's own memory is (Grace)."""
    words = ask(nv, "nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _NODE_SCOPE)
    nodes = _bits(words)
    if len(nodes) == 1:
        return nodes[0]
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
