"""The race of cures: what the next run is for."""

from __future__ import annotations

from gputrace.trials.race import Costs, contenders, kept, lots, next_lot
from gputrace.trials.statistics import Verdict
from tests.helpers.tried_programs import row_of


def test_first_answers_come_first_and_then_what_could_still_be_the_best() -> None:
    best, slower = row_of("gc", [0.5, 0.51, 0.5]), row_of("staging", [0.8, 0.81, 0.8])
    unsure = row_of("bucket-view", [0.3, 0.8, 0.7])
    compiled, foretold, other = (
        row_of("compile", hope=0.1),
        row_of("graphs", hope=0.3),
        row_of("persistent"),
    )
    rows = [slower, unsure, best, compiled, other, foretold]
    assert lots(rows) == [[foretold], [other, unsure], [compiled], [best, slower]]
    assert contenders([slower, best], [other]) == [best]
    best.over = True
    assert contenders([slower, best], []) == [slower]


def test_what_may_bring_more_has_its_rounds_before_what_brings_little() -> None:
    little, more = (
        row_of("gc", [1.01, 0.985, 1.015] * 2),
        row_of("tf32", [1.0, 1.1, 0.9] * 2),
    )
    assert (little.verdict, more.verdict) == (Verdict.OPEN, Verdict.OPEN)
    assert contenders([little, more], []) == [more]
    more.over = True
    assert contenders([little, more], []) == [little]


def test_the_time_goes_to_the_best_foretold_and_keeps_first_answers_of_others() -> None:
    costs = Costs(start=5, run=8, turn=lambda _: 0.5)
    whole, graphs = row_of("threads=1", hope=0.5), row_of("graphs", hope=0.6)
    rows = [row_of("fused"), graphs, whole]
    assert costs.answer([whole]) == 6 * 8
    assert costs.answer([graphs]) == 5 + 6 * 2 * 0.5
    assert next_lot(rows, 48, costs) == [whole]
    assert next_lot(rows, 47, costs) == [graphs]
    assert next_lot(rows, 8, costs) == []
    assert kept(rows, [whole], 100, costs) == 11 + 11
    assert kept(rows, [whole], 15, costs) == 11
    both = [row_of("fused"), row_of("gc")]
    assert kept(both, [], 13.9, costs) == costs.answer(both[:1]) == 11, "one of them"
