"""Pages of recordings, which many tests look at."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

import gputrace
from tests.helpers.once import once
from tests.helpers.recordings import DATA, SMALL


@pytest.fixture(scope="session")
def trace_of(
    recording: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Unpacks one of `SMALL`, or another file of tests/data, once."""
    folder = tmp_path_factory.mktemp("traces")

    def find(name: str) -> Path:
        packed, target = DATA / f"{name}.xz", folder / Path(name).name
        if name in SMALL:
            return recording(name)
        if not packed.exists():
            return DATA / name
        if not target.exists():
            target.write_bytes(lzma.decompress(packed.read_bytes()))
        return target

    return find


@pytest.fixture(scope="session")
def page_of(trace_of: Callable[[str], Path], common: Path) -> Callable[[str], Path]:
    """Writes the page of a recording, once."""

    def find(name: str) -> Path:
        def write(target: Path) -> None:
            with gputrace.open(trace_of(name)) as trace:
                trace.report(target)

        return once(common / f"{Path(name).name}.html", write)

    return find
