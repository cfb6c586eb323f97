"""Traces of object stores: they are fetched into the cache folder, once, and read from there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gputrace
from gputrace.cli import run
from gputrace.errors import ExitCode, InputError
from tests.synthetic import Plan, simulate, write_kineto, write_nsys

fsspec: Any = pytest.importorskip("fsspec")


@pytest.fixture
def store() -> Iterator[Any]:
    """An object store in this process's memory."""
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_nsys(simulate(Plan(steps=4, kernels_per_step=20)), tmp_path / "run.sqlite")
    return tmp_path / "run.sqlite"


def test_a_file_reads_as_it_does_here(store: Any, trace: Path) -> None:
    store.pipe("/bucket/run.sqlite", trace.read_bytes())
    with gputrace.open("memory://bucket/run.sqlite") as there, gputrace.open(trace) as here:
        one, other = there.analyze(), here.analyze()
    assert (one.breakdown, one.findings) == (other.breakdown, other.findings)


def test_a_folder_stands_for_the_traces_in_it(store: Any, tmp_path: Path) -> None:
    plan = Plan(steps=4, ranks=2, kernels_per_step=20, allreduces=1)
    for path in write_kineto(simulate(plan), tmp_path):
        store.pipe(f"/bucket/run/{path.name}", path.read_bytes())
    store.pipe("/bucket/run/notes.txt", b"no trace")
    with gputrace.open("memory://bucket/run") as found:
        assert {gpu.rank for gpu in found.analyze().gpus} == {0, 1}


def test_the_command_takes_a_url(store: Any, trace: Path) -> None:
    store.pipe("/bucket/run.sqlite", trace.read_bytes())
    assert run(["analyze", "memory://bucket/run.sqlite"]) == ExitCode.DONE


def test_a_url_of_a_file_here_is_the_file(trace: Path) -> None:
    with gputrace.open(f"file://{trace}") as found:
        assert found.analyze().path == str(trace)


def test_what_has_not_changed_is_not_fetched_again(store: Any, trace: Path) -> None:
    told: list[tuple[int, int]] = []
    data = trace.read_bytes()
    store.pipe("/bucket/again.sqlite", data)
    for _ in range(2):
        gputrace.open(
            "memory://bucket/again.sqlite", progress=lambda *done: told.append(done)
        ).close()
    assert told == [(len(data), len(data))]


def test_what_has_changed_is(store: Any, trace: Path, tmp_path: Path) -> None:
    counts = []
    for steps in (4, 7):
        path = tmp_path / f"{steps}.sqlite"
        write_nsys(simulate(Plan(steps=steps, kernels_per_step=20)), path)
        store.pipe("/bucket/changing.sqlite", path.read_bytes())
        with gputrace.open("memory://bucket/changing.sqlite") as found:
            counts.append(found.analyze().steps.count)
    assert counts == [4, 7]


def test_a_file_that_is_not_there(store: Any) -> None:
    with pytest.raises(InputError, match=r"memory://bucket/none\.sqlite: no such file"):
        gputrace.open("memory://bucket/none.sqlite")


def test_a_fetch_that_fails_leaves_nothing(
    store: Any, trace: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pipe("/bucket/failing.sqlite", trace.read_bytes())

    def open_(*_: object, **__: object) -> None:
        raise ConnectionError("the line is down")

    monkeypatch.setattr(type(store), "open", open_)
    with pytest.raises(InputError, match="the line is down"):
        gputrace.open("memory://bucket/failing.sqlite")
    assert not list((cache / "gputrace" / "fetched").glob("*/*failing*"))


@pytest.mark.parametrize("lacking", ["fsspec", "fsspec.core"])
def test_without_the_extra(
    lacking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, lacking, None)
    assert run(["analyze", "s3://bucket/run.sqlite"]) == ExitCode.MISSING_HERE
    assert "gputrace[remote]" in capsys.readouterr().err
