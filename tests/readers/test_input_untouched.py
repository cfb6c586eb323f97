"""A trace is opened wherever it lies, whatever it is called, and nothing is left beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gputrace
from tests.helpers import command
from tests.helpers.command import state
from tests.helpers.exports import Export


def test_the_command_leaves_the_folder_as_it_was(h100: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    path.write_bytes(h100.read_bytes())
    path.chmod(0o444)
    before = state(tmp_path)
    assert command.gputrace("analyze", path).code == 0
    assert state(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        "two words.sqlite",
        "run#3.sqlite",
        "really?.sqlite",
        "100%.sqlite",
        "a%20b.sqlite",
        "a&mode=rwc.sqlite",
        "Läufe – 7.sqlite",
        "no suffix",
        "-v",
        "two\nlines.sqlite",
        os.fsdecode(b"not-utf-8-\xff.sqlite"),
    ],
)
def test_any_name_will_do(name: str, tmp_path: Path) -> None:
    path = Export().kernel(0, 10).kernel(20, 30).write(tmp_path / "trace.sqlite")
    path = path.rename(tmp_path / name)
    before = state(tmp_path)
    with gputrace.open(path) as trace:
        assert trace.analyze().gpus[0].idle_ns == 10
    assert state(tmp_path) == before


def test_a_relative_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Export().kernel(0, 10).write(tmp_path / "trace.sqlite")
    monkeypatch.chdir(tmp_path)
    with gputrace.open("trace.sqlite") as trace:
        assert trace.analyze().span_ns == 10


def test_a_link_leads_to_the_trace(tmp_path: Path) -> None:
    target = Export().kernel(0, 10).write(tmp_path / "trace.sqlite")
    link = tmp_path / "latest"
    link.symlink_to(target)
    with gputrace.open(link) as trace:
        assert trace.analyze().span_ns == 10


def test_the_suffix_means_nothing(tmp_path: Path) -> None:
    path = Export().kernel(0, 10).write(tmp_path / "trace.db")
    with gputrace.open(path) as trace:
        assert trace.analyze().source == "nsys"
