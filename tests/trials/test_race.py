"""The race of cures: what the next run is for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gputrace.trials.history import History, Request, Row
from gputrace.trials.race import (
    Costs,
    after,
    contenders,
    costs_of,
    has_one_run,
    kept,
    lots,
    next_lot,
    next_run,
    next_turns,
    sharing,
)
from gputrace.trials.runs import WHOLE, Change, Turn
from gputrace.trials.statistics import Verdict
from tests.helpers.tried_programs import row_of


def test_first_answers_come_first_and_then_what_could_still_be_the_best() -> None:
    best, slower = row_of("gc", [0.5, 0.51, 0.5]), row_of("staging", [0.8, 0.81, 0.8])
    unsure = row_of("bucket-view", [0.3, 0.8, 0.7])
    compiled, foretold, other = (
        row_of("compile", hope=0.1),
        row_of("workers=4", hope=0.3),
        row_of("async-checkpoint"),
    )
    rows = [slower, unsure, best, compiled, other, foretold]
    assert lots(rows) == [[foretold], [other, unsure], [compiled], [best]]
    assert contenders([slower, best], [other]) == [best]
    best.over = True
    assert contenders([slower, best], []) == [], "it cannot beat a clear winner"
    little = row_of("gc", [0.9, 0.901, 0.9])
    little.over = True
    assert contenders([little, slower], []) == [slower]


def test_what_may_bring_more_has_its_rounds_before_what_brings_little() -> None:
    little, more = (
        row_of("gc", [1.01, 0.99, 1.01] * 2),
        row_of("tf32", [1.0, 1.1, 0.9] * 2),
    )
    assert (little.verdict, more.verdict) == (Verdict.OPEN, Verdict.OPEN)
    assert contenders([little, more], []) == [more]
    more.over = True
    assert contenders([little, more], []) == [], "it gains nothing that is worthwhile"


def test_the_time_goes_to_the_best_foretold_and_keeps_first_answers_of_others() -> None:
    costs = Costs(start=5, run=8, turn=lambda _: 0.5)
    whole, loader = row_of("threads=1", hope=0.5), row_of("workers=4", hope=0.6)
    rows = [row_of("fused"), loader, whole]
    assert costs.answer([whole]) == 6 * 8
    answer = costs.answer([loader])
    assert answer == 5 + 6 * (1 + 0.6) * 0.5, "turns with a cure are as long as it is foretold"
    assert next_lot(rows, 48, costs) == [whole]
    assert next_lot(rows, 47, costs) == [loader]
    three = 5 + 3 * (1 + 0.6) * 0.5
    assert next_lot([loader], three, costs) == [loader], "three rounds show as much"
    assert next_lot([loader], three - 0.1, costs) == []
    little = row_of("workers=4", hope=0.8)
    assert next_lot([little], 5 + 4 * (1 + 0.8) * 0.5 - 0.1, costs) == []
    assert next_lot(rows, 7, costs) == []
    assert kept([row for row in rows if row is not whole], 100, costs) == answer + 11
    assert kept([row for row in rows if row is not whole], 15, costs) == answer
    both = [row_of("fused"), row_of("gc")]
    assert kept(both, 13.9, costs) == costs.answer(both[:1]) == 11, "one of them"


def test_graphs_share_a_run_with_what_does_not_change_the_forward_pass() -> None:
    graphs, less, tf32, bf16 = (
        row_of(cure) for cure in ("graphs", "less-often=train.py:9", "tf32", "bf16")
    )
    assert sharing([graphs, less, tf32, bf16]) == [[graphs, less], [tf32, bf16]]
    assert sharing([less, tf32, graphs]) == [[less, tf32], [graphs]]
    alone = [row_of(cure) for cure in ("compile", "workers=4", "gc")]
    assert sharing(alone) == [[row] for row in alone]


def started(*rows: Row) -> History:
    """A program of steps of 10 ms that starts in 4 s, so that a run of 40 steps takes 4.5 s."""
    history = History(Request(("x",)), list(rows))
    history.pilot = SimpleNamespace(  # type: ignore[assignment]
        step_ns=10_000_000, start_s=4.0, buffered=0
    )
    return history


def test_without_any_round_so_far_the_first_row_has_a_run_however_short_the_time() -> None:
    gc, persistent = row_of("gc", hope=0.5), row_of("async-checkpoint")
    history = started(gc, persistent)
    assert next_run(history, history.rows, 1.0) == [gc]
    gc.cured, gc.bare = [0.5], [1.0]
    assert next_run(history, history.rows, 1.0) == []
    assert next_run(history, history.rows, 100.0) == [gc]


def test_what_promises_far_more_than_all_others_has_its_runs_first() -> None:
    """By the first run, in which all is compiled anew, a run takes 4.5 s; there are 60 s in all."""
    dynamic, gc = row_of("dynamic", hope=0.5), row_of("gc", hope=0.95)
    history = started(gc, dynamic)
    history.request = Request(("x",), budget_s=60.0)
    assert history.trial_s([dynamic]) == pytest.approx(60 * 0.5 / 0.55)
    assert history.trial_s([gc]) == 30.0, "as always of two"
    assert next_run(history, history.rows, 9.0) == [dynamic], "a round"
    dynamic.cured, dynamic.bare, dynamic.seconds = [0.05], [1.0], 4.5
    assert next_run(history, history.rows, 8.0) == [dynamic], "one more may decide"
    dynamic.cured = [0.9]
    assert next_run(history, history.rows, 8.0) == [gc]


def test_what_takes_most_of_a_step_has_one_run_if_there_is_no_time_for_more() -> None:
    """A run takes 4.5 s, so that two rounds take 18 s."""
    dynamic, gc = row_of("dynamic", hope=0.5), row_of("gc", hope=0.95)
    history = started(gc, dynamic)
    assert not has_one_run(history, dynamic, 8.0), "nothing is charged to its causes"
    dynamic.cost = 0.6
    assert not has_one_run(history, dynamic, 18.0)
    assert has_one_run(history, dynamic, 17.9)
    assert next_run(history, history.rows, 4.0) == [dynamic]
    dynamic.bare, dynamic.cured = [1.0], [0.1]
    assert not has_one_run(history, dynamic, 8.0)


def test_what_goes_on_in_a_run_is_decided_without_a_trace_in_its_rows() -> None:
    gc, tf32 = row_of("gc"), row_of("tf32")
    costs, clear, noisy = costs_of(started(gc, tf32)), [0.5, 0.501] * 3, [0.5, 1.5] * 3
    pairs = [[Turn(1.0, cured) for cured in each] for each in (clear, noisy)]
    changes = [Change(cure, "f", "", -1, "", "", "", 0) for cure in ("gc", "tf32")]
    run: Any = SimpleNamespace(changes=changes, seconds=9.0, turns=pairs, reasons={})
    later = after([gc, tf32], run)
    assert next_turns(later, [], 60.0, 0.0, 60.0, costs) == [2]
    assert next_turns(later, [], 60.0, 60.0, 60.0, costs) == [], "kept for others"
    winner, adds = row_of("graphs", [0.3] * 3), row_of("no-sync", [0.97, 0.9, 0.94])
    winner.over = True
    assert (adds.verdict, contenders([winner, adds], [])) == (Verdict.OPEN, [])
    assert next_turns([winner, adds], [], 60.0, 0.0, 60.0, costs) == [2], "it may add to that"
    adds.cured, adds.bare = adds.cured * 2, adds.bare * 2
    assert next_turns([winner, adds], [], 60.0, 0.0, 60.0, costs) == []
    assert (gc.cured, gc.ratio, tf32.cured, tf32.ratio) == ([], None, [], None)


def test_of_whole_runs_the_first_may_be_all_that_there_is_time_for() -> None:
    """A run takes 4.5 s: two are too many for an answer of three rounds, or of two rows."""
    threads, pinned = row_of("threads=1", hope=0.5), row_of("pin-threads", hope=0.5)
    history = started(row_of("gc", hope=0.95), threads, pinned)
    history.request = Request(("x",), budget_s=60.0)
    assert next_run(history, history.rows, 20.0) == [threads]
    assert next_run(history, history.rows, 60.0) == [threads, pinned]


def test_a_loader_that_cannot_take_turns_keeps_those_of_epochs() -> None:
    workers, prefetch, persistent = (
        row_of(cure) for cure in ("workers=4", "prefetch=4", "persistent")
    )
    run: Any = SimpleNamespace(
        changes=[], seconds=9.0, turns=((),), reasons={"workers": f"{WHOLE}short"}, losses=()
    )
    history = started(workers, prefetch, persistent)
    history.add_turns([workers], run, history.turns([workers]), [prefetch, persistent])
    assert [row.within for row in history.rows] == [False, False, True]


def test_what_runs_in_no_step_of_a_turn_is_taken_to_run_in_one_of_fifty() -> None:
    less, gc = row_of("less-often=train.py:9"), row_of("gc")
    run: Any = SimpleNamespace(changes=[], seconds=9.0, turns=((),), reasons={}, losses=())
    for row in (less, gc):
        row.take(run, [Turn(100.0, 50.0), Turn(100.0, 110.0)])
    assert (less.cured, gc.cured) == ([51.0, 110.0], [50.0, 110.0])


def test_two_rounds_of_turns_tell_what_is_many_times_as_fast() -> None:
    change = Change("workers", "f", "", -1, "", "", "", 0)
    for cured, verdict in ((30.0, Verdict.FASTER), (60.0, Verdict.OPEN)):
        row = row_of("workers=4", hope=0.4)
        run: Any = SimpleNamespace(changes=[change], seconds=9.0, turns=((),), reasons={})
        row.take(run, [Turn(100.0, cured), Turn(101.0, cured + 1)])
        assert (row.verdict, row.over) == (verdict, False)
    costs = Costs(start=5, run=8, turn=lambda _: 10.0)
    row = row_of("workers=4", hope=0.4)
    assert next_lot([row], 5 + 2 * (1 + 0.4) * 10, costs) == [row]
    assert next_lot([row], 5 + 2 * (1 + 0.4) * 10 - 0.1, costs) == []
