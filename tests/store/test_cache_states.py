"""Whatever happens to a trace and to the cache: an entry is what was kept of that very file."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gputrace.store.cache import Kept, key_of, load, store

Content = tuple[bytes, int]
TRACES = ("a.sqlite", "b.sqlite")


class Cache(RuleBasedStateMachine):
    """Traces that change, the entries kept of them, and a folder that others write to."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="gputrace-states-"))
        self.entries = self.folder / "entries"
        self.environment = patch.dict(os.environ, GPUTRACE_CACHE=str(self.entries))
        self.environment.start()
        self.kept: dict[str, set[Content]] = {}
        self.version = 0
        for name in TRACES:
            self._write(name)

    def teardown(self) -> None:
        self.environment.stop()
        shutil.rmtree(self.folder)

    def _write(self, name: str) -> None:
        """Another content; a clock too coarse for two writes must not make them look alike."""
        self.version += 1
        path = self.folder / name
        path.write_bytes(b"trace %d" % self.version)
        os.utime(path, ns=(0, self.version))

    def _key(self, name: str) -> str:
        key = key_of([self.folder / name], "scene")
        assert key is not None
        return key

    def _entry(self, key: str) -> Path:
        return self.entries / f"{key}.entry"

    def _entries(self) -> list[Path]:
        """Return the existing entries, in the order of their first time, which no run changes."""
        return [path for path in map(self._entry, self.kept) if path.exists()]

    @rule(name=st.sampled_from(TRACES))
    def change_the_trace(self, name: str) -> None:
        self._write(name)

    @rule(name=st.sampled_from(TRACES), text=st.binary(max_size=40), rows=st.integers(0, 2000))
    def keep_it(self, name: str, text: bytes, rows: int) -> None:
        key = self._key(name)
        store(key, Kept(text, [np.arange(rows), np.array([True, False])]))
        self.kept[key] = {(text, rows)}
        assert load(key) is not None

    @rule(name=st.sampled_from(TRACES), rows=st.lists(st.integers(0, 99), min_size=2, max_size=4))
    def keep_it_in_several_processes_at_once(self, name: str, rows: list[int]) -> None:
        key = self._key(name)
        contents = [(b"%d" % place, count) for place, count in enumerate(rows)]

        def write(content: tuple[bytes, int]) -> None:
            with patch("os.getpid", lambda: 10**9 + int(content[0])):
                store(key, Kept(content[0], [np.arange(content[1]), np.array([True, False])]))

        for content in contents:
            write(content)
        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(load, key) for _ in range(4)]
            pool.submit(store, key, Kept(b"last", [np.arange(3), np.array([True, False])])).result()
        found = {self._content(reader.result()) for reader in readers}
        assert found <= {contents[-1], (b"last", 3)}
        self.kept[key] = {(b"last", 3)}

    @precondition(lambda self: bool(self._entries()))
    @rule(left=st.floats(0, 0.99), data=st.data())
    def cut_an_entry_short(self, left: float, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self._entries()))
        os.truncate(path, int(left * path.stat().st_size))

    @precondition(lambda self: bool(self._entries()))
    @rule(junk=st.binary(max_size=200), data=st.data())
    def replace_an_entry_by_junk(self, junk: bytes, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self._entries())).write_bytes(junk)

    @rule()
    def clear_the_cache(self) -> None:
        shutil.rmtree(self.entries, ignore_errors=True)

    @rule(data=st.data())
    def leave_one_unfinished(self, data: st.DataObject) -> None:
        """Leave what a killed process leaves."""
        self.entries.mkdir(exist_ok=True)
        (self.entries / ".0.entry.999999999").write_bytes(b"half")

    @invariant()
    def an_entry_is_of_its_file_or_there_is_none(self) -> None:
        for name in TRACES:
            key = self._key(name)
            found = load(key)
            if found is None:
                assert not self._entry(key).exists()
            else:
                assert self._content(found) in self.kept[key]

    def _content(self, kept: Kept | None) -> tuple[bytes, int]:
        assert kept is not None
        rows, flags = kept.columns
        assert rows.tolist() == list(range(len(rows)))
        assert flags.tolist() == [True, False]
        return kept.text, len(rows)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
