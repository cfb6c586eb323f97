"""What the name ids of an nsys export stand for: StringIds, or texts in the rows of NVTX."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cached_property

import numpy as np

from gputrace.traces.arrow import NULL, Integers
from gputrace.traces.events import UNKNOWN, Column
from gputrace.traces.names import bounded
from gputrace.traces.nsys.queries import GRAPHS, INLINE_TEXT
from gputrace.traces.sqlite import Database
from gputrace.traces.texts import Texts, read_texts


class Names:
    """Of one export."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def texts(self, ids: Collection[int] | Column) -> dict[int, str]:
        """The text of each id; as `Trace.names`."""
        wanted = sorted({int(id) for id in ids})
        text: dict[int, str] = {}
        if self._database.has("StringIds", "id", "value"):
            sql = "SELECT id, value FROM StringIds WHERE id IN (SELECT value FROM json_each(?))"
            listed = json.dumps([id for id in wanted if id >= 0])
            text = {id: plain(value) for id, value in self._database.query(sql, (listed,))}
        text |= {id: f"CUDA graph {GRAPHS - id}" for id in wanted if id <= GRAPHS}
        inline = [INLINE_TEXT - id for id in wanted if GRAPHS < id <= INLINE_TEXT]
        if inline:
            text |= {INLINE_TEXT - n: text for n, text in self._inline.texts(inline).items()}
        return {id: text.get(id, f"<name {id}>") for id in wanted}

    def matching(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        """The text of those in which a pattern is found; as `Trace.search`."""
        all_ids = np.fromiter(ids, np.int64, len(ids))
        inline = (all_ids > GRAPHS) & (all_ids <= INLINE_TEXT)
        listed = self.texts(all_ids[~inline])
        found = {id: text for id, text in listed.items() if pattern.search(text)}
        if inline.any():
            numbers = self._inline.matching(pattern, INLINE_TEXT - all_ids[inline])
            found |= self.texts(INLINE_TEXT - numbers)
        return found

    def numbered(self, names: Integers) -> Integers:
        """Names with the number of the text, which equal texts share, in place of the rowid."""
        inline = names <= INLINE_TEXT
        if not inline.any():
            return names
        numbers = self._inline.numbers(INLINE_TEXT - names[inline].astype(np.int64))
        names[inline] = np.where(numbers == NULL, UNKNOWN, INLINE_TEXT - numbers)
        return names

    @cached_property
    def _inline(self) -> Texts:
        """The texts of NVTX rows that are not in StringIds."""
        return read_texts(self._database, "NVTX_EVENTS", "text", "textId IS NULL")


def plain(value: object) -> str:
    """A text of the export, which need not be UTF-8, nor of any length that can be shown."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return bounded(text)
