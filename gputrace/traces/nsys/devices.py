"""Which physical GPU a process means by a CUDA ordinal, as far as an nsys export tells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gputrace.traces.events import UNKNOWN
from gputrace.traces.nvml.model import plain_uuid
from gputrace.traces.nvml.tables import read_cards
from gputrace.traces.sqlite import Database

_VISIBLE: Final = re.compile(r"\bCUDA_VISIBLE_DEVICES\b\s*[=:]\s*['\"]?(\d{1,9}(?:,\d{1,9})*)\b")


@dataclass(frozen=True, slots=True)
class Card:
    """A row of TARGET_INFO_GPU."""

    id: int
    name: str
    bus: str
    uuid: str


class DeviceMap:
    """Answers for one export.

    NVML counts cards in the order of their PCI addresses, nsys in an order of its own (an A100
    node: id 3 at 03:00.0, id 0 at c1:00.0); so where all addresses are known, they decide. Where
    NVML itself was asked, it does: processes may have seen some of the cards only.
    """

    def __init__(self, database: Database) -> None:
        cards = _cards(database)
        self._cards = {card.id: card for card in cards}
        self._indices = _nvml_indices(cards) | _by_nvml(database, cards)
        self._ids = _ids_by_process(database)
        self._visible = _visible_devices(database)

    def find(self, pid: int, ordinal: int) -> tuple[int, str, str]:
        """Physical index (or UNKNOWN), name and uuid (or nothing) of a process's CUDA ordinal."""
        id = self._ids.get((pid, ordinal))
        if id is None and not self._ids and len(self._cards) == 1 and ordinal == 0:
            id = next(iter(self._cards))
        if id is not None:
            card = self._cards.get(id, Card(id, "", "", ""))
            return self._indices.get(id, id), card.name, card.uuid
        same = {card.name for card in self._cards.values()}
        name = same.pop() if len(same) == 1 else ""
        known = 0 <= ordinal < len(self._visible)
        return (self._visible[ordinal] if known else UNKNOWN), name, ""


def _cards(database: Database) -> list[Card]:
    if not database.has("TARGET_INFO_GPU", "id", "name"):
        return []
    bus, uuid = (
        name if database.has("TARGET_INFO_GPU", name) else "''" for name in ("busLocation", "uuid")
    )
    columns = f"id, name, {bus}, {uuid}"
    rows = database.query(f"SELECT {columns} FROM TARGET_INFO_GPU WHERE typeof(id) = 'integer'")
    return [Card(id, *(str(text or "") for text in texts)) for id, *texts in rows]


def _nvml_indices(cards: list[Card]) -> dict[int, int]:
    """By nsys id; the id itself where the table does not list every card with an address."""
    ids, addresses = {card.id for card in cards}, {card.bus for card in cards}
    if ids != set(range(len(cards))) or len(addresses) < len(cards) or "" in addresses:
        return {id: id for id in ids}
    ordered = sorted(cards, key=lambda card: card.bus.lower())
    return {card.id: index for index, card in enumerate(ordered)}


def _by_nvml(database: Database, cards: list[Card]) -> dict[int, int]:
    """By nsys id, for the cards that NVML knows by their uuid."""
    known = {plain_uuid(card.uuid): card.gpu for card in read_cards(database)}
    uuids = {card.id: plain_uuid(card.uuid) for card in cards}
    return {id: known[uuid] for id, uuid in uuids.items() if uuid and uuid in known}


def _ids_by_process(database: Database) -> dict[tuple[int, int], int]:
    if not database.has("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"):
        return {}
    rows = database.query(
        "SELECT pid, cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE "
        "WHERE typeof(pid) = 'integer' AND typeof(cudaId) = 'integer' AND typeof(gpuId) = 'integer'"
    )
    return {(pid, ordinal): gpu for pid, ordinal, gpu in rows}


def _visible_devices(database: Database) -> list[int]:
    """CUDA_VISIBLE_DEVICES of the capture, where it was written down as plain numbers."""
    if not database.has("META_DATA_CAPTURE", "name", "value"):
        return []
    for name, value in database.query("SELECT name, value FROM META_DATA_CAPTURE"):
        if found := _VISIBLE.search(f"{name}={value}"):
            return [int(number) for number in found[1].split(",")]
    return []
