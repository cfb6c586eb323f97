"""Fixtures of the tests of trials."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputrace.collectors.session import HOOKS
from tests.helpers.tried_programs import PROGRAM, InProgram, Real, Simulated


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Real:
    return Real(tmp_path, monkeypatch)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[InProgram]:
    monkeypatch.syspath_prepend(HOOKS)
    before = set(sys.modules)
    yield InProgram()
    for name in set(sys.modules) - before:
        if name.startswith("_gputrace_hooks"):
            del sys.modules[name]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Simulated:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return Simulated(monkeypatch, path)
