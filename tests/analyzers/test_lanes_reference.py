"""Real recordings give, to the nanosecond, what a plain union of intervals gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gputrace
from tests.helpers.recordings import CUTS, REFERENCE, SMALL, packed, unpack


def partition(path: Path) -> dict[str, dict[str, int]]:
    """Return gputrace's figures of a file, in the form of the reference."""
    with gputrace.open(path) as trace:
        gpus: Any = trace.analyze(gaps=0).gpus
    names = next(iter(next(iter(REFERENCE.values())).values()))
    return {str(gpu.device): {name: getattr(gpu, name) for name in names} for gpu in gpus}


@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_a_recording_has_the_partition_that_is_known_of_it(
    name: str, recording: Callable[[str], Path], tmp_path: Path
) -> None:
    if not packed(name).exists():
        pytest.skip(f"{packed(name)} is not on this machine")
    path = recording(name) if name in SMALL else unpack(name, tmp_path)
    try:
        assert partition(path) == REFERENCE[name]
    finally:
        if name not in SMALL:
            path.unlink()


def test_every_whole_recording_in_the_checkout_is_checked() -> None:
    assert set(SMALL) - REFERENCE.keys() == set(CUTS)
