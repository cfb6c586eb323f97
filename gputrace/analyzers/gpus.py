"""The GPUs of a trace: which process's ordinal is which card, and whose rank it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.events import UNKNOWN, Events, Kind, concatenate
from gputrace.traces.ids import number_ids
from gputrace.traces.trace import Trace

_PEER_COLUMNS: Final = ("source_device", "destination_device")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the tables of results name it."""

    gpu: int
    """Physical index where ``gpu_known``, else the CUDA ordinal."""
    gpu_known: bool
    device: int
    """CUDA ordinal in the process that uses the GPU most."""
    process: int
    """Index of that process."""
    rank: int
    """That process's rank: as recorded, else its place among the processes by their GPU."""
    rank_known: bool
    name: str
    """The card's model, or nothing."""
    host: int
    """Tells machines apart."""
    host_name: str
    """The machine's name, or nothing."""
    pairs: tuple[tuple[int, int], ...]
    """All (process, device) that are this GPU."""


def both_ends(trace: Trace, events: Events) -> Events:
    """The events, with each peer copy also on the GPU at its other end."""
    if not (events.kind == Kind.COPY_PEER).any():
        return events
    return concatenate([events, other_ends(trace, events.columns)], events.columns)


def other_ends(trace: Trace, columns: Sequence[str]) -> Events:
    """The peer copies of a trace as they are on the GPU at their other end."""
    peers = trace.events([Kind.COPY_PEER], [*columns, *_PEER_COLUMNS])
    arrays = {name: getattr(peers, name) for name in columns}
    source, destination = peers.source_device, peers.destination_device
    arrays["device"] = np.where(peers.device == source, destination, source)
    arrays["gpu"] = _physical(trace, arrays["process"], arrays["device"])
    return Events(arrays).select((arrays["device"] != peers.device) & (arrays["device"] >= 0))


def _physical(
    trace: Trace, process: NDArray[np.int16], device: NDArray[np.int16]
) -> NDArray[np.int16]:
    pairs = zip(process.tolist(), device.tolist(), strict=True)
    known = {pair: trace.device(*pair).gpu for pair in set(pairs)}
    pairs = zip(process.tolist(), device.tolist(), strict=True)
    return np.array([known[pair] for pair in pairs], np.int16)


def find_gpus(trace: Trace, events: Events) -> tuple[list[Gpu], NDArray[np.int16]]:
    """The GPUs that do something, in order of host and index, and each event's place among them.

    Needs the columns ``process`` and ``device``.
    """
    distinct, where = number_ids(pair_keys(events))
    pairs = [pair_of(key) for key in distinct.tolist()]
    gpus = group_gpus(trace, dict(zip(pairs, np.bincount(where).tolist(), strict=True)))
    owner = {pair: index for index, gpu in enumerate(gpus) for pair in gpu.pairs}
    return gpus, np.array([owner[pair] for pair in pairs], np.int16).take(where)


_Pair = tuple[int, int]


def pair_keys(events: Events) -> NDArray[np.int32]:
    """One number for the process and the device of each event; needs these columns."""
    keys: NDArray[np.int32] = (
        events.process.astype(np.int32) << 16 | events.device.astype(np.int32) & 0xFFFF
    )
    return keys


def pair_of(key: int) -> _Pair:
    """The process and the device of a number of `pair_keys`."""
    return key >> 16, int(np.int16(np.uint16(key & 0xFFFF)))


def group_gpus(trace: Trace, work: Mapping[_Pair, int]) -> list[Gpu]:
    """The GPUs in order of host and index, by the events of each process and device, in order."""
    groups = _group(trace, work)
    ranks = _ranks(trace, groups, work)
    gpus = [_gpu(trace, pairs, ranks, work) for pairs in groups]
    return sorted(gpus, key=order_of)


def order_of(gpu: Gpu) -> tuple[int, bool, int, int]:
    """What GPUs are sorted by: host and index."""
    return gpu.host, gpu.gpu_known, gpu.gpu, gpu.rank


def _group(trace: Trace, work: Mapping[_Pair, int]) -> list[list[_Pair]]:
    """Pairs of process and device that are one card, put together.

    Where the card is not recorded, processes of a host that mostly use different ordinals see the
    same numbering, so equal ordinals are one card; processes that mostly use the same ordinal each
    see their own (CUDA_VISIBLE_DEVICES set for each), so they are different cards.
    """
    alone = _with_own_numbering(trace, work)
    groups: dict[tuple[str, int, int, str], list[_Pair]] = {}
    for process, ordinal in work:
        device = trace.device(process, ordinal)
        host = trace.processes[process].host
        if device.gpu != UNKNOWN:
            key = ("card", host, device.gpu, device.uuid)
        elif process in alone:
            key = ("ordinal of a process", process, ordinal, "")
        else:
            key = ("ordinal of a host", host, ordinal, "")
        groups.setdefault(key, []).append((process, ordinal))
    return list(groups.values())


def _with_own_numbering(trace: Trace, work: Mapping[_Pair, int]) -> set[int]:
    """The processes of hosts where two mostly use the same ordinal."""
    main = _main_devices(work)
    place = {process: (trace.processes[process].host, main[process]) for process in main}
    shared = Counter(place.values())
    hosts = {host for (host, _), processes in shared.items() if processes > 1}
    return {process for process, (host, _) in place.items() if host in hosts}


def _main_devices(work: Mapping[_Pair, int]) -> dict[int, int]:
    """The device that each process uses most."""
    main: dict[int, int] = {}
    for (process, device), count in work.items():
        if process not in main or count > work[process, main[process]]:
            main[process] = device
    return main


def _ranks(
    trace: Trace, groups: list[list[_Pair]], work: Mapping[_Pair, int]
) -> dict[int, tuple[int, bool]]:
    """Rank of each process and whether it was recorded; else by host, main GPU and pid."""
    recorded = {process: trace.processes[process].rank for process, _ in work}
    if all(rank != UNKNOWN for rank in recorded.values()):
        return {process: (rank, True) for process, rank in recorded.items()}
    main = _main_devices(work)

    def place(process: int) -> tuple[int, int, int]:
        device = trace.device(process, main[process])
        gpu = device.gpu if device.gpu != UNKNOWN else device.device
        return trace.processes[process].host, gpu, trace.processes[process].pid

    ordered = sorted(main, key=place)
    return {process: (rank, False) for rank, process in enumerate(ordered)}


def _gpu(
    trace: Trace, pairs: list[_Pair], ranks: dict[int, tuple[int, bool]], work: Mapping[_Pair, int]
) -> Gpu:
    process, ordinal = max(pairs, key=lambda pair: work[pair])
    device = trace.device(process, ordinal)
    rank, rank_known = ranks[process]
    known = device.gpu != UNKNOWN
    return Gpu(
        gpu=device.gpu if known else ordinal,
        gpu_known=known,
        device=ordinal,
        process=process,
        rank=rank,
        rank_known=rank_known,
        name=device.name,
        host=trace.processes[process].host,
        host_name=trace.processes[process].host_name,
        pairs=tuple(sorted(pairs)),
    )
