"""Cache of a trace for its next opening: never of another file, nor too large."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gputrace.analyzers.timeline_model import Scene, read_scene
from gputrace.analyzers.timeline_model.gaps import describe_gap
from gputrace.model.results import CauseNode
from gputrace.readers.registry import open_trace
from gputrace.store import cache
from gputrace.store.cache import Kept, dump_columns, key_of, load, load_columns, store
from tests.helpers import command

STARVED = "h200x4-ddp-starved-9-15.sqlite"
ENTRY = Kept(b"text", [np.arange(5), np.array([], np.int16), np.array([True, False])])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("GPUTRACE_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.sqlite"
    path.write_bytes(b"a trace")
    return path


def scene_of(path: Path) -> Scene:
    with open_trace(path) as trace:
        return read_scene(trace)


def test_an_entry_comes_back_as_it_was(folder: Path, trace: Path) -> None:
    key = key_of([trace], "scene")
    assert load(key) is None
    store(key, ENTRY)
    kept = load(key)
    assert kept is not None
    assert kept.text == ENTRY.text
    for column, before in zip(kept.columns, ENTRY.columns, strict=True):
        assert column.dtype == before.dtype
        assert column.tolist() == before.tolist()


def test_what_is_still_being_written_is_waited_for(
    folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*entry: Any) -> None:
        time.sleep(0.2)
        store(*entry)

    monkeypatch.setattr(cache, "store", slow)
    node = CauseNode("data-feeding", "", "waiting for the next batch")
    cache.ResultCache([trace]).keep(node, "options")
    assert cache.ResultCache([trace]).find(CauseNode, "options") == node


def test_a_file_that_changed_has_no_entry(folder: Path, trace: Path) -> None:
    store(key_of([trace], "scene"), ENTRY)
    status = trace.stat()
    trace.write_bytes(b"another")
    os.utime(trace, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert load(key_of([trace], "scene")) is None
    assert load(key_of([trace], "other")) is None


def test_only_the_owner_may_read_entries(folder: Path, trace: Path) -> None:
    store(key_of([trace], "scene"), ENTRY)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("left", [0, 1, 100, -1, -100])
def test_a_broken_entry_counts_as_none_and_is_removed(folder: Path, trace: Path, left: int) -> None:
    key = key_of([trace], "scene")
    store(key, ENTRY)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:left])
    assert load(key) is None
    assert not path.exists()


def test_an_entry_of_other_bytes_is_no_scene(folder: Path) -> None:
    for text in (b"", b"{}", b'["o","Scene",[]]', b'["o","Path",["/"]]', b'["c",7]', b"[1]"):
        assert load_columns(Kept(text, []), Scene) is None


def test_nothing_is_kept_where_the_cache_is_off(
    folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRACE_CACHE", "off")
    store(key_of([trace], "scene"), ENTRY)
    assert load(key_of([trace], "scene")) is None
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_does_no_harm(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRACE_CACHE", str(trace / "below a file"))
    store(key_of([trace], "scene"), ENTRY)
    assert load(key_of([trace], "scene")) is None


def test_a_folder_that_cannot_be_looked_into_does_no_harm(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To root nothing is forbidden; a name that is too long is refused to anybody."""
    monkeypatch.setenv("GPUTRACE_CACHE", str(tmp_path / ("long" * 100)))
    store(key_of([trace], "scene"), ENTRY)
    assert load(key_of([trace], "scene")) is None


def test_entries_not_used_for_longest_make_room(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for number in range(3):
        path = tmp_path / f"{number}.sqlite"
        path.write_bytes(b"x")
        keys.append(key_of([path], "scene"))
    large = Kept(b"", [np.zeros(1_000)])
    for number, key in enumerate(keys[:2]):
        store(key, large)
        for path in folder.iterdir():
            os.utime(path, (number, number))
    assert load(keys[0]) is not None
    monkeypatch.setattr(cache, "MOST_BYTES", 20_000)
    store(keys[2], large)
    assert load(keys[0]) is not None
    assert load(keys[1]) is None
    assert load(keys[2]) is not None


def test_a_scene_is_the_same_after_it_was_kept(
    folder: Path, recording: Callable[[str], Path]
) -> None:
    path = recording(STARVED)
    scene = scene_of(path)
    key = key_of([path], "scene")
    store(key, dump_columns(scene))
    kept = load(key)
    again = load_columns(kept, Scene) if kept else None
    assert again is not None
    assert again.analysis == scene.analysis
    assert (again.title, again.span, again.names) == (scene.title, scene.span, scene.names)
    edges = np.linspace(*scene.span, 50).astype(np.int64)
    for lane, before in zip(again.lanes, scene.lanes, strict=True):
        assert (lane.layers.split(edges) == before.layers.split(edges)).all()
    longest = int(scene.gaps.length.argmax())
    with open_trace(path) as one, open_trace(path) as other:
        assert describe_gap(one, again, longest) == describe_gap(other, scene, longest)


DECODED_TWICE: Final = """
import sys, threading
from gputrace.analyzers.timeline_model import Scene
from gputrace.store.cache import load, load_columns

sys.setswitchinterval(1e-6)
kept, both, titles = load(sys.argv[1]), threading.Barrier(2), []

def decode():
    both.wait()
    titles.append(load_columns(kept, Scene).title)

threads = [threading.Thread(target=decode) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*titles, sep="\\n")
"""


def test_two_threads_may_be_the_first_to_decode_a_type(
    folder: Path, recording: Callable[[str], Path]
) -> None:
    """As the browser's do with two traces side by side: msgspec crashes then."""
    scene = scene_of(recording(STARVED))
    store("scene-1", dump_columns(scene))
    ran = command.python("-c", DECODED_TWICE, "scene-1", env={"GPUTRACE_CACHE": str(folder)})
    assert (ran.code, ran.out.splitlines()) == (0, [scene.title] * 2)
