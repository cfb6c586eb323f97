"""The benchmark of kinds, for a moment: generated programs are known, and layers are no turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from benchmarks.kinds import is_good, score, table
from tests.helpers.examples import few
from tests.synthetic.programs import PROGRAMS

SEEDS: Final = [*((kind, seed) for kind in PROGRAMS for seed in range(few(1))), ("generation", 172)]
"""Some of each kind; and tokens after a prompt whose pass ends as theirs do."""


@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_kinds_and_turns_of_generated_programs_are_known(kind: str, seed: int) -> None:
    found = score(kind, seed)
    assert (found.found, found.is_counted, found.counts_layers) == (kind, True, False)


def test_runs_that_are_not_right_are_listed() -> None:
    one = score("pass", 0)
    layers = replace(one, found="iterations", count=one.layers)
    assert is_good([one])
    assert not is_good([layers])
    assert table([one, layers]).splitlines()[1:] == [
        "pass,2,1,1,1",
        f"- pass 0: iterations, {one.layers} turns for (1,)",
    ]
