"""``gputrace try``: cures applied to programs from outside, measured in turns, and remembered."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from errno import ENOSPC
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import numpy as np
import pytest

import gputrace
from benchmarks import budgets
from benchmarks.trials import NOISES, tally
from gputrace.analyzers.whatif import calibration
from gputrace.cli import console
from gputrace.cli import run as run_command
from gputrace.cli.try_ import _progress
from gputrace.collectors.session import HOOKS
from gputrace.errors import InputError, UsageError
from gputrace.studies.runner import Failed
from gputrace.trials import ledger, runs
from gputrace.trials.cures import (
    CURES,
    Candidate,
    Prediction,
    all_cures,
    combine,
    cures_for,
    predict,
    read_candidates,
)
from gputrace.trials.history import History, Request, Row
from gputrace.trials.patch import apply, make_patch
from gputrace.trials.race import Costs, contenders, kept, lots, next_lot, order
from gputrace.trials.runs import Change, Measured, Spent, Turn, Turns
from gputrace.trials.runs import Program as ProgramToTry
from gputrace.trials.statistics import (
    ALIKE,
    MOST,
    Verdict,
    across,
    compare,
    losses_differ,
    turn_losses_differ,
)
from gputrace.trials.trial import Trial
from tests.helpers import command
from tests.helpers.command import Ran, assert_refused
from tests.helpers.installed_packages import install
from tests.helpers.recordings import unpack
from tests.helpers.study_scripts import Bench
from tests.test_hooks import torch_python

FASTER, NOT_FASTER, USAGE, UNREADABLE, INTERRUPTED = 0, 1, 2, 3, 130

TORCH: Final = {
    "torch/__init__.py": "__version__ = '2.13.0'",
    "torch/optim/__init__.py": "from .optimizer import Optimizer, SGD",
    "torch/optim/optimizer.py": """
_hooks = []
def register_optimizer_step_post_hook(hook): _hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in _hooks: hook(self, (), {})
class SGD(Optimizer):
    def __init__(self, params, lr=0.1, *, foreach=None): self.foreach = foreach
""",
    "torch/utils/data/__init__.py": "from .dataloader import DataLoader",
    "torch/utils/data/dataloader.py": """
import time
class DataLoader:
    def __init__(self, dataset, batch_size=1, num_workers=0, prefetch_factor=None,
                 persistent_workers=False, pin_memory=False):
        if num_workers > 8: raise RuntimeError(f"no room for {num_workers} workers")
        self.dataset, self.num_workers = dataset, num_workers
    def __iter__(self):
        for item in self.dataset:
            time.sleep(0.016 / max(self.num_workers, 1))
            yield item
""",
}
"""Stands for torch: a batch takes 16 ms, which workers share."""

PROGRAM: Final = """\
import sys
from torch.optim import SGD
from torch.utils.data import DataLoader

optimizer = SGD([], 0.1)
loader = DataLoader(range(500), num_workers=1)
for item in loader:
    optimizer.step()
print("done")
"""


class Real:
    """Makes runs of a program, with modules that stand for torch, in real processes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.script = folder, folder / "train.py"
        for name, source in TORCH.items():
            path = folder / "modules" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        (folder / "modules" / "torch" / "utils" / "__init__.py").touch()
        paths = os.pathsep.join([str(folder / "modules"), str(command.ROOT)])
        monkeypatch.setenv("PYTHONPATH", paths)
        monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))

    def run(self, cures: str, program: str = PROGRAM, **how: Any) -> Measured:
        """Makes a run with all cures together."""
        self.script.write_text(program, encoding="utf-8")
        words = how.pop("command", (sys.executable, str(self.script)))
        candidate = combine(read_candidates(cures))
        return ProgramToTry(tuple(words), **how).run(candidate, warmup=2, steps=8)


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Real:
    return Real(tmp_path, monkeypatch)


# ---- one run ----


def test_a_run_is_changed_measured_and_stopped_after_its_steps(real: Real) -> None:
    log = real.folder / "log"
    order_of_end = (
        f"import atexit, pathlib\nlog = pathlib.Path({str(log)!r})\n"
        "atexit.register(lambda: log.write_text('ended in order'))\n"
    )
    bare = real.run("", order_of_end + PROGRAM)
    assert log.read_text() == "ended in order"
    run = real.run("workers=4,foreach,pinned,persistent")
    assert (bare.steps, run.steps, run.ended, run.versions) == (8, 8, True, {"torch": "2.13.0"})
    # A batch takes 16 ms, of 4 workers 4 ms, at the least.
    assert bare.step_ns > 16e6
    assert run.step_ns > 4e6
    assert {(c.cure, c.argument, c.old, c.new, c.line) for c in run.changes} == {
        ("foreach", "foreach", "None", "True", 5),
        ("workers", "num_workers", "1", "4", 6),
        ("persistent", "persistent_workers", "False", "True", 6),
    }
    assert run.reasons["pinned"] == "torch sees no GPU"
    assert {change.file for change in run.changes} == {str(real.script)}


def test_what_is_so_already_is_no_change(real: Real) -> None:
    run = real.run("workers=1,gc")
    assert run.reasons["workers"] == "num_workers is 1 already"
    assert [change.cure for change in run.changes] == ["gc"]
    run = real.run("gc", f"import gc; gc.disable()\n{PROGRAM}print(gc.isenabled())\n")
    assert run.reasons == {"gc": "the program has the collector off already"}
    assert not run.changes


@pytest.mark.parametrize(
    ("cures", "program", "said"),
    [
        ("", "print('no step')", "no step was seen"),
        ("", "raise ValueError('planted')", "exit code 1: ValueError: planted"),
        ("", PROGRAM.replace("500", "5"), "it makes 5 steps in all, too few"),
        ("workers=99", PROGRAM, "exit code 1: RuntimeError: no room for 99 workers"),
    ],
)
def test_a_run_that_cannot_be_measured_says_why(
    real: Real, cures: str, program: str, said: str
) -> None:
    with pytest.raises(Failed, match=said):
        real.run(cures, program)


def test_a_program_that_catches_its_end_is_ended_by_a_signal(real: Real) -> None:
    stubborn = PROGRAM.replace(
        "    optimizer.step()\n",
        "    try: optimizer.step()\n    except BaseException: print('caught')\n",
    )
    assert real.run("foreach", stubborn).steps == 8


def test_a_cure_is_switched_off_and_on_within_a_run(real: Real) -> None:
    log = real.folder / "log"
    step = "    optimizer.step()\n"
    program = PROGRAM.replace(
        step, f"    log.write(str(int(gc.isenabled())))\n{step}    log.flush()\n"
    )
    real.script.write_text(f"import gc\nlog = open({str(log)!r}, 'w')\n{program}")
    trial = ProgramToTry((sys.executable, str(real.script)))
    [gc] = read_candidates("gc")
    run = trial.run(gc, 2, 6 * 8, turns=Turns((gc,), 6))
    assert (len(run.turns[0]), run.ended) == (4, True)
    # The first step begins before any ended. Warm-up is with the cure.
    off, on = "1" * 6, "0" * 6
    by_turns = [(off, on)[turn] for order in Turns((gc,), 6).orders[:4] for turn in order]
    assert log.read_text() == "10" + "".join(by_turns)


def test_a_cure_that_could_not_be_switched_off_has_no_answer(real: Real) -> None:
    """What was measured as the program without it may have had it."""
    spoils = "    if item == 12: gc.unfreeze = None\n    optimizer.step()\n"
    real.script.write_text("import gc\n" + PROGRAM.replace("    optimizer.step()\n", spoils))
    [gc] = read_candidates("gc")
    trial = ProgramToTry((sys.executable, str(real.script)))
    run = trial.run(gc, 2, 6 * 8, turns=Turns((gc,), 6))
    row = Row(gc)
    row.take(run, run.turns[0])
    assert (row.verdict, row.ratio) == (Verdict.FAILED, None)
    assert "not callable" in row.why


WAITS: Final = """\
import json, os, time
{}
    if item == 20:
        path = json.loads(os.environ["GPUTRACE_TRY"])["folder"] + "/going"
        while not os.path.exists(path): time.sleep(0.01)
    optimizer.step()
"""
"""Waits in its second round until it was said what goes on."""


def test_a_run_ends_after_the_round_by_which_all_is_decided(real: Real) -> None:
    head = PROGRAM.partition("    optimizer.step()\n")[0].replace("num_workers=1", "num_workers=8")
    real.script.write_text(WAITS.format(head))
    [gc] = read_candidates("gc")
    trial = ProgramToTry((sys.executable, str(real.script)))
    run = trial.run(gc, 2, 12 * 29, turns=Turns((gc,), 6), going=lambda _: [])
    assert run.ended
    assert 1 <= len(run.turns[0]) <= 2


def test_what_is_decided_has_no_more_turns_in_a_run(real: Real) -> None:
    head = PROGRAM.partition("    optimizer.step()\n")[0].replace("num_workers=1", "num_workers=8")
    real.script.write_text(WAITS.format(head))
    gc, foreach = read_candidates("gc,foreach")
    trial, turns = ProgramToTry((sys.executable, str(real.script))), Turns((gc, foreach), 6)
    run = trial.run(combine((gc, foreach)), 2, 18 * 8, turns=turns, going=lambda _: [2])
    assert run.ended
    assert 1 <= len(run.turns[0]) <= 2
    assert len(run.turns[1]) > 8


def test_ranks_that_no_launcher_counts_have_all_turns(tmp_path: Path) -> None:
    """Of two that drop a turn in different rounds, one would have it while the other has not."""
    for pid in (1, 2):
        (tmp_path / f"node.{pid}.turns").write_text("{}")
    runs._chooser(tmp_path, lambda: [2])()
    assert not (tmp_path / "going").exists()
    runs._chooser(tmp_path, lambda: [])()
    assert (tmp_path / "going").read_text() == "[]"


@pytest.mark.parametrize("words", [["gc"], []])
@pytest.mark.parametrize("sleeps", ["1", "30"])
def test_a_python_without_the_hooks_is_said_to_be_why_no_step_was_seen(
    real: Real, words: list[str], sleeps: str
) -> None:
    program = [sys.executable, "-I", "-c", f"import time; time.sleep({sleeps})"]
    with pytest.raises(InputError, match=r"ran without the hooks.* started with -I"):
        gputrace.try_cures(program, *words, budget="3s")


def test_the_bar_goes_on_within_a_run(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown: list[tuple[str, float | None]] = []
    update = console._LateBar.update

    def seen(bar: console._LateBar, done: int, total: int, what: str = "") -> None:
        update(bar, done, total, what)
        assert bar._bar is not None
        shown.append((bar._bar.tasks[0].description, bar._bar.tasks[0].total))

    monkeypatch.setattr(console._LateBar, "update", seen)
    real.script.write_text(PROGRAM)
    with _progress() as progress:
        request = Request((sys.executable, str(real.script)), budget_s=2)
        Trial(replace(request, candidates=tuple(read_candidates("gc"))), progress).run()
    assert shown.count(("run 1, recording", 2)) > 2


def test_a_program_that_leaves_without_its_exit_handlers_is_measured(real: Real) -> None:
    leaves = PROGRAM.replace("range(500)", "range(60)").replace('print("done")', "os._exit(0)")
    real.script.write_text("import os\n" + leaves)
    trial = ProgramToTry((sys.executable, str(real.script)))
    assert trial.run(Candidate(), 2, 600).steps == 58
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "gc", budget="2min")
    assert [row.verdict for row in outcome.rows] != ["failed"]
    assert outcome.rows[0].rounds >= 3


def test_a_run_is_ended_when_the_time_is_over(real: Real) -> None:
    real.script.write_text("import time\ntime.sleep(600)\n")
    trial = ProgramToTry((sys.executable, str(real.script)))
    with pytest.raises(Spent):
        trial.run(Candidate(), 2, 8, left_s=0.2)


STAYS: Final = """\
import atexit, signal, subprocess, sys
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
signal.signal(signal.SIGTERM, lambda *_: (open("asked", "w").close(), child.kill()))
atexit.register(child.wait)
"""
"""Waits for a child at its end, and ends that one when it is asked to."""


def test_a_recorded_program_that_waits_for_a_child_is_ended_and_its_recording_kept(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_GRACE_S", 3.0)
    monkeypatch.chdir(real.folder)
    real.script.write_text(STAYS + PROGRAM)
    trial, trace = ProgramToTry((sys.executable, str(real.script))), real.folder / "t.sqlite"
    run = trial.run(Candidate(), 2, 8, trace, left_s=120.0)
    assert (run.steps, run.ended) == (8, False)
    assert (real.folder / "asked").exists(), "it was asked before it was killed"
    assert trace.exists()


def test_a_first_run_longer_than_the_budget_is_ended_and_said_of_each_cure(real: Real) -> None:
    slow = PROGRAM.replace("range(500)", "range(500000)")
    real.script.write_text(slow)
    command = [sys.executable, str(real.script)]
    assert len(gputrace.try_cures(command, budget="1s", steps=100000).notes) == 1
    outcome = gputrace.try_cures(command, "workers=4,gc", budget="4s", steps=100000)
    assert outcome.seconds < 1.03 * 4 + 2 * runs._SIGNAL_S + runs._GRACE_S
    assert outcome.runs == 1
    assert [(row.cure, row.verdict, row.why) for row in outcome.rows] == [
        ("workers=4", "cannot tell yet", "the budget ended within the first run"),
        ("gc", "cannot tell yet", "the budget ended within the first run"),
    ]
    [note] = outcome.notes
    assert "the first run took longer than the budget" in note
    assert "no step was seen" not in note


def test_a_first_run_without_any_step_is_said_to_have_none(real: Real) -> None:
    real.script.write_text("import time\ntime.sleep(60)\n")
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "gc", budget="4s")
    [note] = outcome.notes
    assert "by then no step was seen; the hooks know steps of PyTorch" in note


def test_a_program_that_trains_for_a_short_time_is_measured_by_several_runs(real: Real) -> None:
    ends = "    if time.monotonic() > begun + 1.5: break\n    optimizer.step()\n"
    program = PROGRAM.replace("    optimizer.step()\n", ends).replace("=1)", "=8)")
    real.script.write_text("import time\nbegun = time.monotonic()\n" + program)
    command = [sys.executable, str(real.script)]
    outcome = gputrace.try_cures(command, "gc,set-to-none,foreach", budget="12s")
    rows = {row.cure: row for row in outcome.rows}
    assert rows["gc"].rounds >= 6
    assert rows["gc"].verdict not in ("failed", "changes nothing")


FAILS: Final = PROGRAM.replace("range(500)", "range(120)").replace('print("done")', "sys.exit(3)")
"""Ends with an exit code of its own after 120 steps: in the run of turns, not in the first."""


def test_a_program_that_fails_after_its_steps_as_it_is_fails_by_no_cure(real: Real) -> None:
    real.script.write_text(FAILS)
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "gc", budget="2min")
    [row] = outcome.rows
    assert row.verdict != "failed"
    assert row.rounds >= 3
    said = "the program also fails without cures, after 120 steps; those before count: exit code 3"
    assert said in outcome.notes


def test_a_program_that_fails_with_a_cure_alone_fails_by_it(real: Real) -> None:
    """The same exit code, but not as far; the program as it is also fails, at its end."""
    cured = "    if item > 60 and not gc.isenabled(): sys.exit(3)\n    optimizer.step()\n"
    real.script.write_text("import gc\n" + FAILS.replace("    optimizer.step()\n", cured))
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "gc", budget="2min")
    assert [(row.verdict, row.why) for row in outcome.rows] == [("failed", "exit code 3")]


class InProgram:
    """What changes a program, as it would load it, with cures that are on."""

    def __init__(self) -> None:
        names = ("_gputrace_hooks.cures." + name for name in ("host", "model", "trial"))
        self.host, self.model, self.state = map(importlib.import_module, names)

    def start(self, *cures: str) -> None:
        self.state.cures.update(dict.fromkeys(cures, True))
        self.state._on.update(cures)

    @property
    def changes(self) -> list[dict[str, Any]]:
        return list(self.state.trial.changes)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[InProgram]:
    monkeypatch.syspath_prepend(HOOKS)
    before = set(sys.modules)
    yield InProgram()
    for name in set(sys.modules) - before:
        if name.startswith("_gputrace_hooks"):
            del sys.modules[name]


def test_turns_are_measured_in_the_order_in_which_they_are_switched(
    hooks: InProgram, tmp_path: Path
) -> None:
    """A step takes 10 with no cure, 7 with gc, 4 with bf16; the first of a turn takes long.

    After two rounds the second cure has no more turns. Another process makes a few steps too.
    """
    turns = Turns(tuple(read_candidates("gc,bf16,gc+bf16")), 5)
    asked = {"warmup": 6, "steps": 500, "folder": str(tmp_path)}
    hooks.state.asked.update(asked | turns.asked)
    trial, on = hooks.state.trial, hooks.state._on
    warm = []
    for count in range(6 + (2 * 4 + 2 * 3) * 5):
        warm.append(sorted(on))
        step = 10 - sum({"gc": 3, "bf16": 6}[cure] for cure in on)
        end = (trial.ends or [0])[-1] + step + 100 * (count >= 6 and (count - 6) % 5 == 0)
        trial.loss = float(end - (trial.ends or [0])[-1])
        if count == 6 + 2 * 4 * 5 - 1:
            (tmp_path / "going").write_text("[1, 3]")
        trial.step_ended(0, end)
        trial.ends[-1] = end
    assert warm[1:6] == [["gc"], ["bf16"], ["bf16"], ["bf16", "gc"], ["bf16", "gc"]]
    left: Any = SimpleNamespace(
        ends=trial.ends, losses=trial.losses, rank=0, rounds=trial.rounds[:4], batches=[]
    )
    other: Any = SimpleNamespace(
        ends=trial.ends[:9], losses=[None] * 9, rank=None, rounds=[], batches=[]
    )
    assert turns.measured([other, left], 6) == tuple(
        (Turn(10, with_cure, (10, with_cure)),) * rounds
        for with_cure, rounds in [(7, 4), (4, 2), (1, 4)]
    )


def rounds_of(turns: Turns, step: Callable[[int], float]) -> tuple[tuple[Turn, ...], ...]:
    """The rounds of a run of which each step takes as long as its number says."""
    total = MOST * (len(turns.each) + 1) * turns.stretch
    ends = np.cumsum([1.0, *map(step, range(total))]).tolist()
    rounds = itertools.islice(itertools.cycle(turns.orders), MOST)
    left: Any = SimpleNamespace(
        ends=ends, losses=[None] * len(ends), rank=0, rounds=list(rounds), batches=[]
    )
    return turns.measured([left], 1)


@pytest.mark.parametrize("cures", ["gc", "gc,bf16,tf32"])
@pytest.mark.parametrize("every", [2, 3, 4, 6, 8])
def test_what_comes_back_every_few_turns_makes_no_cure_faster(cures: str, every: int) -> None:
    """A validation, say, that takes as long as a step, in one of so many turns."""
    turns = Turns(tuple(read_candidates(cures)), 5)
    noise = np.random.default_rng(3).normal(1, 0.004, 10_000)

    def step(begins: int, at: int) -> float:
        turn, number = divmod(at + begins * 5, 5)
        return float(noise[at]) + (turn % every == 0 and number == 2)

    for begins in range(every):
        for pairs in rounds_of(turns, partial(step, begins)):
            ratio = compare([pair.bare_ns for pair in pairs], [pair.cured_ns for pair in pairs])
            assert ratio is not None
            assert ratio.verdict not in (Verdict.FASTER, Verdict.SLOWER)


def test_what_drifts_falls_on_all_turns() -> None:
    turns = Turns(tuple(read_candidates("gc,bf16,tf32")), 5)
    for pairs in rounds_of(turns, lambda at: 1 + at * 1e-3):
        whole = pairs[: len(pairs) // 2 * 2]
        bare, cured = sum(pair.bare_ns for pair in whole), sum(pair.cured_ns for pair in whole)
        assert bare == pytest.approx(cured)


def test_a_run_gets_a_copy_of_the_folder_to_work_in(real: Real) -> None:
    work = real.folder / "work"
    work.mkdir()
    writes = PROGRAM.replace("import sys\n", "import sys\nopen('written', 'x').close()\n")
    (work / "train.py").write_text(writes)
    run = real.run("workers=4", workdir=work, command=(sys.executable, "train.py"))
    assert [path.name for path in work.iterdir()] == ["train.py"]
    assert run.changes[0].file == run.main == str(work / "train.py")


def test_a_copy_has_its_links_and_the_place_where_the_program_starts(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts, data = real.folder / "work" / "scripts", real.folder / "data"
    scripts.mkdir(parents=True)
    data.mkdir()
    (data / "images").touch()
    (scripts / "data").symlink_to("../../data")
    (scripts / "same").symlink_to("train.py")
    reads = "import os\nopen('data/images').close()\nassert os.readlink('same') == 'train.py'\n"
    (scripts / "train.py").write_text(reads + PROGRAM)
    monkeypatch.chdir(scripts)
    command = (sys.executable, "train.py")
    assert real.run("", workdir=real.folder / "work", command=command).steps == 8


def test_a_run_is_recorded_whatever_gputrace_py_its_folder_has(real: Real) -> None:
    work, trace = real.folder / "work", real.folder / "trace.sqlite"
    work.mkdir()
    (work / "gputrace.py").write_text("ours = True")
    (work / "train.py").write_text(f"import gputrace\nassert gputrace.ours\n{PROGRAM}")
    program = ProgramToTry((sys.executable, "train.py"), workdir=work)
    assert program.run(combine(read_candidates("gc")), 2, 8, record=trace).steps == 8
    assert trace.exists()


def test_a_folder_that_has_the_temporary_folder_in_it_is_copied_without_that(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(real.folder))
    assert real.run("", workdir=real.folder, command=(sys.executable, "train.py")).steps == 8


def test_a_folder_that_cannot_be_copied_is_named(real: Real) -> None:
    os.mkfifo(real.folder / "pipe")
    with pytest.raises(OSError, match=r"cannot be copied .*pipe"):
        real.run("", workdir=real.folder)


def test_all_ranks_of_a_job_are_stopped_and_the_slowest_counts(real: Real) -> None:
    launcher = real.folder / "launch.py"
    launcher.write_text(
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "
        "'RANK': str(rank), 'WORLD_SIZE': '2'}) for rank in range(2)]\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    own = "import os\nown = [1, 4][int(os.environ['RANK'])]\noptimizer"
    program = PROGRAM.replace("num_workers=1", "num_workers=own").replace("optimizer", own, 1)
    run = real.run("", program, command=(sys.executable, str(launcher), str(real.script)))
    assert run.ranks == 2
    assert run.step_ns > 16e6


def test_event_files_of_trackers_are_written_elsewhere_unless_kept(real: Real) -> None:
    module = real.folder / "modules" / "tensorboardX"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "event_file_writer.py").write_text(
        "import pathlib\n"
        "class EventFileWriter:\n"
        "    def __init__(self, logdir): pathlib.Path(logdir).mkdir(parents=True, exist_ok=True)\n"
    )
    logs = real.folder / "logs"
    writes = f"from tensorboardX.event_file_writer import EventFileWriter as W\nW({str(logs)!r})\n"
    real.run("", writes + PROGRAM)
    assert not logs.exists()
    real.run("", writes + PROGRAM, keep_trackers=True)
    assert logs.exists()


@pytest.mark.parametrize(
    ("name", "given", "seen"),
    [
        ("WANDB_MODE", "disabled", "disabled"),
        ("WANDB_MODE", "online", "offline"),
        ("NEPTUNE_MODE", "debug", "debug"),
    ],
)
def test_a_tracker_that_is_told_to_do_nothing_does_nothing(
    real: Real, monkeypatch: pytest.MonkeyPatch, name: str, given: str, seen: str
) -> None:
    monkeypatch.setenv(name, given)
    says = f"import os\nopen({str(real.folder / 'said')!r}, 'w').write(os.environ[{name!r}])\n"
    real.run("", says + PROGRAM)
    assert (real.folder / "said").read_text() == seen


def test_arguments_of_a_trainer_are_changed_where_the_program_gives_them(real: Real) -> None:
    package = real.folder / "modules" / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "training_args.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class TrainingArguments:\n"
        "    dataloader_num_workers: int = 0\n"
        "    dataloader_prefetch_factor: int | None = None\n"
        "    def __post_init__(self): self.ready = True\n"
    )
    program = PROGRAM.replace("optimizer = ", "arguments = TrainingArguments()\noptimizer = ", 1)
    program = program.replace("num_workers=1", "num_workers=arguments.dataloader_num_workers")
    imported = "from transformers.training_args import TrainingArguments\n"
    run = real.run("prefetch=3,workers=2", imported + program)
    changes = {(c.cure, c.call, c.argument, c.new, c.line) for c in run.changes}
    trainer = ("TrainingArguments", "dataloader_num_workers")
    assert ("workers", *trainer, "2", 6) in changes
    assert ("prefetch", trainer[0], "dataloader_prefetch_factor", "3", 6) in changes
    assert {change.cure for change in run.changes if change.call == "DataLoader"} <= {"prefetch"}
    patch = make_patch(combine(read_candidates("workers=2")), run.changes[:1], "", ["x"])
    assert "+arguments = TrainingArguments(dataloader_num_workers=2)" in patch.diff


def test_a_study_runs_its_programs_with_cures(real: Real) -> None:
    loader = "from torch.utils.data import DataLoader\nloader = DataLoader([], num_workers=1)\n"
    bench = Bench(real.folder).framework("stub", loader + "words['steps'] = loader.num_workers")
    study = '[matrix]\nframework = ["stub"]\ncures = ["", "workers=4", "foreach", "threads=3"]\n'
    ran = bench.write(study).run()
    came = [run.why or (run.result or {})["steps"] for run in bench.runs()]
    assert came == [1, 4, "nothing was changed: the program makes no call that it changes", 1]
    assert "cures threads=3" not in ran.out
    assert "threads=3" in ran.out
    bench.write(study.replace("foreach", "magic"))
    assert "no cure is called 'magic'" in bench.run().err


def test_torch_itself_is_changed_at_every_place(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    python = torch_python()
    source = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
data = TensorDataset(torch.randn(800, 3, 8, 8), torch.randint(2, (800,)))
optimizer = torch.optim.AdamW(model.parameters())
model.eval()(data[:8][0])
model.train()
for x, y in DataLoader(data, 8):
    optimizer.zero_grad(set_to_none=False)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
    applied = "workers=1,prefetch=3,persistent,fused,set-to-none,channels-last,bf16,gc"
    skipped = "pinned,staging,non-blocking,tf32,cudnn-benchmark"
    run = real.run(f"{applied},{skipped}", source, command=(python, str(real.script)))
    assert {change.cure for change in run.changes} >= {
        word.partition("=")[0] for word in applied.split(",")
    }
    assert len(run.losses) == run.steps == 8
    assert run.threads == 1
    if not run.gpu:
        assert {run.reasons[cure] for cure in skipped.split(",")} == {"torch sees no GPU"}
    switched = combine(read_candidates("fused,channels-last,bf16,set-to-none"))
    assert switched.switched
    program = ProgramToTry((python, str(real.script)))
    each = tuple(read_candidates("fused,channels-last,bf16,set-to-none,foreach"))
    every = Candidate(tuple(setting for turn in each for setting in turn.settings))
    by_turns = program.run(every, warmup=10, steps=4 * 6 * 3, turns=Turns(each, 3))
    assert [len(pairs) for pairs in by_turns.turns] == [4] * 5
    assert {change.cure for change in by_turns.changes} == {s.cure.id for s in every.settings}


def test_weights_keep_a_place_for_each_layout_and_outputs_leave_a_captures_graph(
    tmp_path: Path,
) -> None:
    """A captured graph reads weights where they were; what it kept would hold up other passes."""
    program = f"""
import sys
sys.path.insert(0, {str(HOOKS)!r})
import torch
from _gputrace_hooks.cures import model as ours
from _gputrace_hooks.cures.trial import _switch_to, asked, cures

model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
weight = model[0].weight
with torch.no_grad():
    weight.fill_(1)
cures["channels-last"] = asked["stretch"] = True
ours._channels_last("channels-last", model, None)
images, places = torch.randn(2, 3, 8, 8), []
for on in (True, False, True, False):
    _switch_to({{"channels-last"}} if on else set())
    assert weight.is_contiguous(memory_format=torch.channels_last) is on
    places.append(weight.data_ptr())
    with torch.no_grad():
        weight.mul_(2)
    model(images).sum().backward()
assert places[:2] == places[2:] and len(set(places)) == 2, places
assert weight.eq(16).all()

output = ours._detachable(torch)(model(images).view(4))
gradient, = torch.autograd.grad(output.sum(), [model[2].bias])
assert gradient.eq(2).all()
assert output.detach_().grad_fn is None
"""
    ran = subprocess.run([torch_python(), "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_what_the_program_sets_itself_stays_so_in_all_turns(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has TF32 on would else be compared with one that has it off."""
    matmul, cudnn = SimpleNamespace(allow_tf32=False), SimpleNamespace(allow_tf32=True)
    backends = SimpleNamespace(cuda=SimpleNamespace(matmul=matmul), cudnn=cudnn)
    monkeypatch.setattr(hooks.model, "sees_gpu", lambda _: True)
    hooks.state.asked.update(stretch=6)
    hooks.state.cures.update(tf32=True)
    hooks.model.switches(SimpleNamespace(backends=backends))
    matmul.allow_tf32 = True
    for call in hooks.state.between:
        call(1)
    for turn in {"tf32"}, set():
        hooks.state._switch_to(turn)
        assert matmul.allow_tf32
    said = {"tf32": "torch.backends.cuda.matmul.allow_tf32 is True already"}
    assert (hooks.state.trial.reasons, hooks.changes) == (said, [])


class Batches:
    """Stands for torch's iterator of a loader: batches have the workers that made them."""

    made: ClassVar[list[int]] = []

    def __init__(self, loader: Any) -> None:
        self.num_workers, self._base_seed = loader.num_workers, 7
        self._index_sampler = loader.batch_sampler
        self.drawn_from = loader.generator
        self.made.append(self.num_workers)
        self.reset()

    def reset(self) -> None:
        self._sampler_iter = iter(self._index_sampler)

    def __next__(self) -> tuple[int, int]:
        return self.num_workers, next(self._sampler_iter)


class Loader:
    """Stands for torch's DataLoader."""

    def __init__(
        self,
        length: int,
        num_workers: int,
        prefetch_factor: int = 2,
        batch_sampler: Any = None,
        generator: Any = None,
        persistent_workers: bool = False,
    ) -> None:
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.batch_sampler = batch_sampler or range(length)
        self.generator, self.persistent_workers = generator, persistent_workers
        self._iterator: Batches | None = None

    def __iter__(self) -> Any:
        if not self.persistent_workers:
            return Batches(self)
        if self._iterator is None:
            self._iterator = Batches(self)
        else:
            self._iterator.reset()
        return self._iterator


class Generator:
    """Stands for torch's source of random numbers."""

    def manual_seed(self, seed: int) -> Generator:
        self.seed = seed
        return self


class WithEnd(Loader):
    """Ends the workers of its iterator, as InfiniteDataLoader of Ultralytics does."""

    ends = 0

    def __del__(self) -> None:
        WithEnd.ends += 1


LOADERS: Final = SimpleNamespace(
    _BaseDataLoaderIter=Batches,
    DataLoader=Loader,
    torch=SimpleNamespace(Generator=Generator),
    get_worker_info=lambda: None,
)
"""Stands for torch.utils.data.dataloader."""


@pytest.fixture
def data(hooks: InProgram, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have loaders with twins of four workers."""
    data = importlib.import_module("_gputrace_hooks.cures.data")
    for cls, name in ((Batches, "__init__"), (Batches, "__next__"), (Loader, "__iter__")):
        monkeypatch.setattr(cls, name, vars(cls)[name])
    monkeypatch.setattr(Batches, "made", [])
    hooks.state.cures.update(workers=4)
    hooks.state.asked.update(stretch=5)
    hooks.state.trial.change("workers", "DataLoader", "num_workers", -1, 1, 4)
    data._have_twins(LOADERS, ["workers"])
    return data


def test_a_loader_has_other_workers_by_turns_and_gives_each_batch_once(
    hooks: InProgram, data: Any
) -> None:
    for _epoch in range(2):
        iterator, given = Batches(Loader(200, 1)), []
        for number in range(200):
            hooks.state._on.clear()
            hooks.state._on.update(["workers"] if number % 10 >= 5 else [])
            given.append(next(iterator))
        assert given == [(4 if number % 10 >= 5 else 1, number) for number in range(200)]
        with pytest.raises(StopIteration):
            next(iterator)
    # A short validation stays as it is, but no loader whose batches are trained on.
    hooks.state._on.add("workers")
    [step_ended] = hooks.state.between
    train, short = Batches(Loader(200, 1)), Batches(Loader(50, 1))
    assert (next(short), next(train)) == ((1, 0), (4, 0))
    step_ended(1)
    assert "workers" not in hooks.state.trial.reasons
    assert next(short) == (1, 1)
    step_ended(2)
    assert hooks.state.trial.reasons["workers"].startswith(runs.WHOLE)


@pytest.mark.parametrize(("stay", "made"), [(False, [1, 4] * 3), (True, [1, 4])])
def test_workers_stay_from_epoch_to_epoch_in_a_twin_as_in_the_program(
    hooks: InProgram, data: Any, stay: bool, made: list[int]
) -> None:
    loader = Loader(200, 1, persistent_workers=stay)
    for epoch in range(3):
        iterator = iter(loader)
        for number in range(190 if epoch == 1 else 200):
            hooks.state._on.clear()
            hooks.state._on.update(["workers"] if (number + 5 * epoch) % 10 >= 5 else [])
            assert next(iterator) == (4 if hooks.state._on else 1, number)
    assert Batches.made == made


def test_the_programs_workers_start_at_no_cost_of_the_cure(
    hooks: InProgram, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes a second: with the cure, the program's loader would not start those it has."""
    monkeypatch.setattr(data, "time_ns", partial(next, itertools.count(0, 10**9)))
    for on, length, aside in (([], 200, 0), (["workers"], 50, 0), (["workers"], 200, 1)):
        hooks.state._on.clear()
        hooks.state._on.update(on)
        iter(Loader(length, 1))
        assert hooks.state.trial.aside == aside * 10**9
    hooks.state.asked.update(warmup=9, steps=None, turns=[[]])
    hooks.state.trial.step_ended(0, 3 * 10**9)
    assert hooks.state.trial.ends == [2 * 10**9]


def test_a_loader_within_a_worker_of_a_loader_stays_as_it_is(
    hooks: InProgram, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOADERS, "get_worker_info", lambda: "worker 0")
    hooks.state._on.add("workers")
    iterator = iter(Loader(200, 1))
    assert [next(iterator) for _ in range(3)] == [(1, number) for number in range(3)]
    assert (Batches.made, hooks.state.trial.reasons) == ([1], {})
    # So it does in a run with the cure from end to end.
    hooks.state.asked.update(stretch=0)
    monkeypatch.setattr(Loader, "__init__", vars(Loader)["__init__"])
    data.loaders(LOADERS)
    assert Loader(200, 0).num_workers == 0
    monkeypatch.setattr(LOADERS, "get_worker_info", lambda: None)
    assert Loader(200, 0, generator=None).num_workers == 4


def too_late(*_: object) -> None:
    raise TimeoutError


class Interrupted(list[int]):
    """Batches and a loss during whose reading a signal comes."""

    def __len__(self) -> int:
        signal.raise_signal(signal.SIGALRM)
        return super().__len__()

    def numel(self) -> int:
        return 1

    def detach(self) -> object:
        return len(self)

    __float__ = __index__ = detach


@pytest.mark.parametrize("within", ["guarded", "arguments", "twin", "loss", "number"])
def test_what_a_handler_raises_within_a_cure_reaches_the_program(
    hooks: InProgram, data: Any, within: str
) -> None:
    """TimeoutError is an OSError, which a cure may raise too: that is its own."""
    hooks.state._on.add("workers")
    interrupted, backward = Interrupted(range(200)), SimpleNamespace(backward=lambda _: None)
    hooks.state.losses(backward)
    loader = Loader(1, 1)
    loader.batch_sampler = interrupted
    calls: dict[str, Callable[[], object]] = {
        "guarded": lambda: hooks.state.guarded("gc", len, interrupted),
        "arguments": lambda: changed(Loader)(1, 1),
        "twin": lambda: next(Batches(loader)),
        "loss": lambda: backward.backward(interrupted),
        "number": lambda: hooks.state._value(interrupted),
    }

    def changed(cls: Any) -> Any:
        made = type("Changed", (), {"__init__": cls.__init__})
        hooks.state.change_call(made, "__init__", lambda _: {"length": ("", len(interrupted))})
        return made

    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with pytest.raises(TimeoutError):
            calls[within]()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hooks.state.guarded("gc", too_late) is None


def test_a_twin_leaves_the_loader_its_end_and_the_program_its_numbers(
    hooks: InProgram, data: Any
) -> None:
    """A loader may hold its iterator: neither that nor the one after it keeps either of them."""
    hooks.state._on.add("workers")
    for length, made_by in ((50, 1), (200, 4)):
        loader = WithEnd(length, 1)
        iterator: Any = Batches(loader)
        assert next(iterator) == (made_by, 0)
        assert WithEnd.ends == 0
        loader.iterator = iterator  # type: ignore[attr-defined]
        is_left = weakref.ref(iterator)
        # Torch draws the seed of the workers from this when an iterator is made.
        twin = iterator._gputrace_twin[1]
        assert twin is None or twin.drawn_from.seed == iterator._base_seed
        later = Batches(loader)
        del loader, iterator, twin
        assert (WithEnd.ends, is_left()) == (1, None)
        assert next(later) == (made_by, 0)
        WithEnd.ends = 0


def test_what_cannot_be_switched_within_a_run_has_whole_ones(real: Real) -> None:
    """The loader that stands for torch's has no iterator to switch."""
    real.script.write_text(PROGRAM)
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "workers=4", budget="2min")
    assert [(row.verdict, row.rounds >= 3) for row in outcome.rows] == [("faster", True)]


def test_a_loader_whose_turns_fail_later_has_no_answer_of_them(simulated: Simulated) -> None:
    """Whole runs are of another kind, so that one run of turns that ended early counts no more."""
    simulated.factors = {"workers=4": 0.5}
    [cure] = read_candidates("workers=4")
    history, row = History(Request(("x",))), Row(cure)
    turns = Turns((cure,), 5)
    run = simulated.run(cure, 10, 70, None, turns, lambda _: [1])
    row.take(run, run.turns[0])
    assert (row.verdict, len(row.cured)) == ("faster", 7)
    history.add_failure(row, [row], Failed("exit code 1"))
    assert (row.within, row.cured, row.verdict, row.ratio) == (False, [], Verdict.OPEN, None)


def test_turns_of_a_loader_pass_over_what_was_ready_before() -> None:
    history = History(Request(("x",)))
    history.pilot = SimpleNamespace(step_ns=50_000_000, buffered=4)  # type: ignore[assignment]
    cures = read_candidates("gc,workers=6,pinned,prefetch=4,workers=6+prefetch=4")
    turns = [history.turns([Row(cure)]) for cure in cures]
    # Eight steps are 0.4 s; batches come in bursts of as many as there are workers.
    assert [(each.passed, each.stretch - each.passed) for each in turns] == [
        (1, 8),
        (13, 36),
        (5, 12),
        (9, 24),
        (25, 72),
    ]


class Workers:
    """Loader of workers that take the same time for each batch, in turn; a step takes 20 ms."""

    def __init__(self, count: int, prefetch: int, batch: float) -> None:
        self.free, self.batch, self.made = [0.0] * count, batch, 0
        self.due: list[float] = []
        for _ in range(count * prefetch):
            self.ask(0.0)

    def ask(self, now: float) -> None:
        worker = self.made % len(self.free)
        self.made += 1
        self.free[worker] = max(self.free[worker], now) + self.batch
        self.due.append(self.free[worker])

    def step(self, now: float) -> float:
        """The end of the step that asks for a batch now."""
        now = max(now, self.due.pop(0))
        self.ask(now)
        return now + 20

    def ready(self, now: float) -> int:
        return sum(due <= now for due in self.due)

    def mean(self) -> float:
        """The mean step of a run with this loader alone."""
        ends = [0.0]
        for _ in range(400):
            ends.append(self.step(ends[-1]))
        return (ends[400] - ends[200]) / 200


class Sharing(Workers):
    """Such a loader, whose workers share two cores with those of other loaders."""

    def __init__(
        self, count: int, prefetch: int, batch: float, all_of_them: list[Sharing] | None = None
    ) -> None:
        self.all = [] if all_of_them is None else all_of_them
        self.all.append(self)
        self.tasks: list[list[list[float]]] = [[] for _ in range(count)]
        self.done: set[float] = set()
        self.given = 0
        super().__init__(count, prefetch, batch)

    def ask(self, now: float) -> None:
        self.tasks[self.made % len(self.tasks)].append([self.made, self.batch])
        self.made += 1

    def work(self) -> None:
        """Have the workers of all loaders work for a millisecond."""
        busy = [(each, tasks) for each in self.all for tasks in each.tasks if tasks]
        for each, tasks in busy:
            tasks[0][1] -= min(1.0, 2 / len(busy))
            if tasks[0][1] <= 1e-6:
                each.done.add(tasks.pop(0)[0])

    def step(self, now: float) -> float:
        while self.given not in self.done:
            self.work()
            now += 1
        self.done.remove(self.given)
        self.given += 1
        self.ask(now)
        for _ in range(20):
            self.work()
        return now + 20

    def ready(self, now: float) -> int:
        return len(self.done)


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("cure", ["prefetch=4", "workers=4", "workers=1"])
@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        *((Workers, batch) for batch in (38.0, 44.0, 48.0, 60.0, 120.0)),
        (Sharing, 60),
        (Sharing, 99),
    ],
)
def test_a_turn_of_a_loader_does_not_live_on_what_others_had_it_make(
    kind: type[Workers], cure: str, batch: float, batches: int
) -> None:
    """What two workers get ready while another loader has its turn makes none faster.

    Where they share cores with those of the other, they make it little slower. A step that
    accumulates gradients takes several batches.
    """
    [candidate] = read_candidates(cure)
    history = History(Request(("x",)))
    history.pilot = SimpleNamespace(step_ns=30_000_000, buffered=4)  # type: ignore[assignment]
    turns = history.turns([Row(candidate)])
    values = {"workers": 2, "prefetch": 2} | {s.cure.id: s.value for s in candidate.settings}
    given: Any = (values["workers"], values["prefetch"], batch)
    together: Any = [[]] if kind is Sharing else []
    loaders = [kind(2, 2, batch, *together), kind(*given, *together)]
    orders = turns.orders[:11]
    ends, counted = [0.0], []
    for turn in itertools.chain(*orders):
        for step in range(1, turns.stretch + 1):
            end = ends[-1]
            for _ in range(batches):
                end = loaders[turn].step(end)
            ends.append(end)
            if step in (turns.passed, turns.stretch):
                counted.append([loaders[turn].ready(end), batches * (len(ends) - 1)])
    losses = [None] * len(ends)
    left: Any = SimpleNamespace(ends=ends, losses=losses, rank=0, rounds=orders, batches=counted)
    [pairs] = turns.measured([left], 1)
    ratio = compare([pair.bare_ns for pair in pairs], [pair.cured_ns for pair in pairs])
    by_hand = kind(*given).mean() / kind(2, 2, batch).mean()
    assert ratio is not None
    assert ratio.ratio == pytest.approx(by_hand, rel=0.05)


@pytest.mark.parametrize(
    ("cure", "ratio", "verdict"),
    [
        ("prefetch=4", 0.98, "cannot tell yet"),
        ("prefetch=4", 0.95, "faster"),
        ("prefetch=4", 1.0, "no difference"),
        ("fused", 0.975, "faster"),
    ],
)
def test_a_part_of_a_batch_makes_no_loader_faster(cure: str, ratio: float, verdict: str) -> None:
    """In a turn, its batches are counted as whole ones."""
    row = row_of(cure)
    run: Any = SimpleNamespace(
        changes=[Change(row.candidate.settings[0].cure.id, "f", "", -1, "", "", "", 0)],
        seconds=1.0,
        turns=((),),
        reasons={},
    )
    scatter = [1.001, 0.999, 1.0] * 7
    row.take(run, [Turn(1e7, 1e7 * ratio * each) for each in scatter])
    assert str(row.verdict) == verdict


def test_an_optimizer_that_could_not_be_made_is_not_switched(real: Real) -> None:
    path = real.folder / "modules" / "torch" / "optim" / "optimizer.py"
    path.write_text(
        path.read_text().partition("class SGD")[0] + "    def __init__(self, params, foreach):\n"
        "        if not isinstance(params, list): raise TypeError('no list')\n"
        "        self.state = {}\n"
        "        self.param_groups = [{'params': params, 'foreach': foreach}]\n"
        "class SGD(Optimizer):\n"
        "    def __init__(self, params, lr=0.1, *, foreach=None):\n"
        "        super().__init__(params, foreach)\n"
    )
    fails = "from torch.optim import SGD\ntry: SGD('weight')\nexcept TypeError: print('refused')\n"
    real.script.write_text(fails + PROGRAM)
    [foreach] = read_candidates("foreach")
    trial = ProgramToTry((sys.executable, str(real.script)))
    run = trial.run(foreach, 2, 4 * 6, turns=Turns((foreach,), 6))
    assert (len(run.turns[0]), run.reasons) == (2, {})


def test_a_number_of_the_step_before_is_read_without_waiting(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors here count the reads that wait for a GPU."""
    waited: list[float] = []

    class Tensor:
        def __init__(self, value: float, is_cuda: bool = True) -> None:
            self.value, self.is_cuda = value, is_cuda

        def item(self) -> float:
            waited.extend([self.value] * self.is_cuda)
            return self.value

        def detach(self) -> Tensor:
            return self

        def copy_(self, other: Tensor, non_blocking: bool) -> None:
            self.value = other.value

    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    torch = SimpleNamespace(
        Tensor=Tensor,
        __file__="/torch/__init__.py",
        empty_like=lambda *_, **given: Tensor(0, is_cuda=given["device"] != "cpu"),
        cuda=SimpleNamespace(Event=lambda: event, is_available=lambda: True),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    hooks.start("defer-item")
    hooks.host.torch_calls(torch)
    reads = []
    for step in range(3):
        reads.append([Tensor(10 * step + part).item() for part in range(2)])
        hooks.state.trial.ends.append(step)
    assert reads == [[0, 1], [0, 1], [10, 11]]
    assert waited == [0, 1], "only the first step waits"
    assert Tensor(7, is_cuda=False).item() == 7
    assert {change["cure"] for change in hooks.changes} == {"defer-item"}


def fake_torch(tensor: type, capture: Any) -> Any:
    """Return what captures need of torch, with a function for ``make_graphed_callables``."""
    function = type("Function", (), {"apply": staticmethod(lambda value: value)})
    autograd = SimpleNamespace(Function=function)
    return SimpleNamespace(
        Tensor=tensor, autograd=autograd, cuda=SimpleNamespace(make_graphed_callables=capture)
    )


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_without_an_optimizer_a_step_ends_with_each_backward_pass(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch, has_optimizer: bool
) -> None:
    class Optimizer:
        """Base of torch's optimizers."""

    def backward(loss: Any) -> str:
        return "done"

    trial, module = hooks.state.trial, SimpleNamespace(backward=backward)
    monkeypatch.setitem(sys.modules, "torch.optim", SimpleNamespace(Optimizer=Optimizer))
    hooks.state.asked.update(warmup=2, steps=None)
    made = [Optimizer()] * has_optimizer
    hooks.state.losses(module)
    assert [module.backward(object()) for _ in range(7)] == ["done"] * 7
    # The first two passes may be of a step whose end is not yet known.
    assert (len(trial.ends), len(made)) == ((0, 1) if has_optimizer else (5, 0))
    trial.step_ended(1, 99)
    module.backward(object())
    assert trial.ends == [99], "one that was made later tells of steps"


def test_a_model_is_captured_before_its_first_call_and_other_shapes_go_without(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Tensor:
        is_cuda = True

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    def capture(model: Any, sample: tuple[Tensor, ...]) -> Any:
        made.append(model.forward(*sample))
        model.forward = lambda *_: "captured"
        return model

    made: list[Any] = []
    monkeypatch.setitem(sys.modules, "torch", fake_torch(Tensor, capture))
    hooks.start("graphs")
    model, other = (SimpleNamespace(forward=lambda *_, **__: "as it is") for _ in range(2))
    hooks.model._graph("graphs", model, (Tensor(8, 3),))
    assert model.forward(Tensor(8, 3)) == "captured"
    assert model.forward(Tensor(4, 3)) == "as it is", "the last batch is smaller"
    assert model.forward(Tensor(8, 3), mask=None) == "as it is"
    hooks.state._on.clear()
    assert model.forward(Tensor(8, 3)) == "as it is", "it is switched off"
    assert [change["cure"] for change in hooks.changes] == ["graphs"]
    hooks.model._graph("graphs", other, ())
    assert other.forward() == "as it is"
    assert "other arguments than tensors" in hooks.state.trial.reasons["graphs"]


def test_of_distributed_data_parallel_the_model_within_is_captured(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DistributedDataParallel looks at events in its own forward pass, which ends a capture."""

    class DistributedDataParallel:
        def __init__(self, module: Any) -> None:
            self.module = module

        def forward(self, inputs: Any) -> str:
            return f"reduced {self.module.forward(inputs)}"

    def capture(model: Any, sample: Sequence[Any]) -> None:
        model.forward(*sample)
        model.forward = lambda *_: "captured"

    tensor = SimpleNamespace(is_cuda=True, shape=(8, 3))
    monkeypatch.setitem(sys.modules, "torch", fake_torch(SimpleNamespace, capture))
    hooks.start("graphs")
    model = DistributedDataParallel(SimpleNamespace(forward=lambda *_: "as it is"))
    hooks.model._graph("graphs", model, (tensor,))
    assert model.forward(tensor) == "reduced captured"


def test_a_cure_that_fails_is_told_by_what_failed_first(hooks: InProgram) -> None:
    def capture() -> None:
        try:
            raise RuntimeError("not permitted when stream is capturing")
        finally:
            raise OSError("a previous error during capture")

    hooks.start("graphs")
    assert hooks.state.guarded("graphs", capture) is None
    reason = hooks.state.trial.reasons["graphs"]
    assert reason == "failed: RuntimeError('not permitted when stream is capturing')"


def test_distributed_data_parallel_and_what_follows_are_on_the_stream_of_captures(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that it keeps of autograd run on the stream on which they were made."""
    current = ["default"]

    class Stream(SimpleNamespace):
        def wait_stream(self, other: Any) -> None:
            waited.append((self.name, other.name))

    class DistributedDataParallel:
        def __init__(self, module: Any, device_ids: Any = None) -> None:
            self.made_on = current[-1]

    waited: list[tuple[str, str]] = []
    cuda = SimpleNamespace(
        graph=SimpleNamespace(default_capture_stream=None),
        Stream=lambda: Stream(name="capture"),
        current_stream=lambda: Stream(name=current[-1]),
        set_stream=lambda stream: current.append(stream.name),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    hooks.start("graphs")
    hooks.model.distributed(SimpleNamespace(DistributedDataParallel=DistributedDataParallel))
    of_gpu, of_cpu = (
        SimpleNamespace(parameters=lambda is_cuda=is_cuda: [SimpleNamespace(is_cuda=is_cuda)])
        for is_cuda in (True, False)
    )
    assert DistributedDataParallel(of_cpu).made_on == "default"
    assert DistributedDataParallel(of_gpu, device_ids=[0]).made_on == "capture"
    assert waited == [("capture", "default")]
    assert current[-1] == "capture"
    # PyTorch before 1.10 captures nothing.
    del cuda.graph
    assert DistributedDataParallel(of_gpu).made_on == "capture"
    assert hooks.state.trial.reasons["graphs"].startswith(runs.FAILURE)


def test_a_function_of_jax_donates_what_it_returns_anew(hooks: InProgram) -> None:
    hooks.start("donate")
    donated: list[tuple[int, ...]] = []

    def jit(function: Any, **keywords: Any) -> Any:
        def compiled(*args: Any) -> Any:
            donated.append(keywords.get("donate_argnums", ()))
            return function(*args)

        compiled.eval_shape = function  # type: ignore[attr-defined]
        return compiled

    def leaves(value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            return [value]
        return [leaf for part in value for leaf in leaves(part)]

    tree = SimpleNamespace(tree_leaves=leaves)
    jax: Any = SimpleNamespace(jit=jit, Array=np.ndarray, tree_util=tree)
    hooks.model.jitted(jax)
    weights, batch = np.zeros((2, 3)), np.zeros((8, 2))

    step = jax.jit()(lambda state, batch: ((state[0] + 1, state[1]), batch.sum()))
    loss = jax.jit(lambda weights, batch: (batch @ weights).sum())
    for _ in range(2):
        step((weights, weights), batch)
    loss(weights, batch)
    jax.jit(lambda x: x, static_argnums=1)(batch)
    assert donated == [(0,), (0,), (), ()]
    assert [change["new"] for change in hooks.changes] == ["(0,)"]


def test_ranks_get_whole_cores_of_the_node_of_their_gpu(
    hooks: InProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of four cores with two threads each: cores 0 to 3 and 8 to 11 are of node 0."""
    monkeypatch.setattr(hooks.host, "_SYSTEM", str(tmp_path))
    for core in range(16):
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{core}"
        (folder / f"node{core // 4 % 2}").mkdir(parents=True)
        (folder / "topology").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    layout = sorted(hooks.host._layout(core) for core in range(16))
    assert [hooks.host._cores_of(rank, [1, 1, 0, 0], layout) for rank in range(4)] == [
        [4, 12, 5, 13],
        [6, 14, 7, 15],
        [0, 8, 1, 9],
        [2, 10, 3, 11],
    ]
    assert hooks.host._cores_of(1, [-1, -1], layout) == [4, 12, 5, 13, 6, 14, 7, 15]
    assert hooks.host._layout(99) == (0, 99, 99)


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
    ],
)
def test_a_rank_is_known_by_what_its_launcher_says(
    hooks: InProgram, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: given.append(cores))
    monkeypatch.setattr(hooks.host, "_layout", lambda core: (0, core, core))
    hooks.host.pin_cores()
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    hooks.host.pin_cores()
    assert given == [[2, 3]]


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        (None, [0, 1]),
        ("2, 0", [1, 0]),
        ("GPU-c2,GPU-a0b1", [1, 0]),
        ("GPU-none,GPU-a0b1", [-1, -1]),
        ("7,0", [-1, -1]),
    ],
)
def test_the_node_of_a_gpu_is_known_by_its_number_and_by_its_uuid(
    hooks: InProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    nodes: list[int],
) -> None:
    monkeypatch.setattr(hooks.host, "_SYSTEM", str(tmp_path))
    monkeypatch.setattr(hooks.host, "_GPUS", str(tmp_path / "gpus"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for number, uuid in enumerate(("GPU-a0b1", "GPU-b1", "GPU-c2d3")):
        bus = f"0000:{number}A:00.0"
        card, device = (tmp_path / "gpus" / bus, tmp_path / "bus/pci/devices" / bus.lower())
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\n")
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{min(number, 1)}\n")
    assert hooks.host._gpu_nodes(2) == nodes


def test_a_plugins_cure_changes_what_its_file_says(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = real.folder / "hook.py"
    hook.write_text(
        "def patches(value):\n"
        "    def plant(module): module.planted = value\n"
        "    return {'torch.utils.data.dataloader': plant}\n"
    )
    module = (
        "from pathlib import Path\nfrom gputrace.extend import Cure\n"
        f"it = Cure('planted', 'a name in a module', hook=Path({str(hook)!r}))\n"
    )
    entries = {"gputrace.cures": {"planted": "cures_of_others:it"}}
    install(real.folder, "their-package", entries, {"cures_of_others": module})
    monkeypatch.syspath_prepend(real.folder)
    all_cures.cache_clear()
    try:
        run = real.run("planted", "from torch.utils.data.dataloader import planted\n" + PROGRAM)
    finally:
        all_cures.cache_clear()
    assert [change.cure for change in run.changes] == ["planted"]


# ---- a trial ----


class Simulated:
    """Runs of a program whose steps take 10 ms times the factors of its cures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.factors: dict[str, float] = {}
        self.failing: dict[str, str] = {}
        self.changes: dict[str, Change] = {}
        self.reasons: dict[str, str] = {}
        self.made: list[str] = []
        self.trace: Path | None = None
        self.seconds, self.spent, self.noise = 0.0, 0.0, 0.002
        self.random = np.random.default_rng(5)
        self.path = path
        self.before: Callable[[], object] = lambda: None
        """Called at the beginning of each run."""
        monkeypatch.setattr(ProgramToTry, "run", lambda _, *given: self.run(*given))
        monkeypatch.setattr(Trial, "_spent", lambda _: self.spent)

    def factor(self, candidate: Candidate) -> float:
        names = map(str, candidate.settings)
        return float(np.prod([self.factors.get(name, 1.0) for name in names]))

    def run(
        self,
        candidate: Candidate,
        warmup: int,
        steps: int,
        record: Path | None = None,
        turns: Turns | None = None,
        going: Callable[[Measured], Sequence[int]] | None = None,
        left_s: float = 0.0,
    ) -> Measured:
        names = [str(setting) for setting in candidate.settings]
        self.made.append(str(candidate))
        self.before()
        self.spent += self.seconds
        if record is not None and self.trace is not None:
            shutil.copy(self.trace, record)
        for name in names:
            if name in self.failing:
                raise Failed(self.failing[name])
        factor = self.factor(candidate)
        unchanged = Change("", "f", "", -1, "", "", "", 0)
        changes = [
            replace(self.changes.get(name, unchanged), cure=setting.cure.id)
            for name, setting in zip(names, candidate.settings, strict=True)
            if self.factors.get(name) != 0
        ]
        run = Measured(
            step_ns=1e7 * (factor or 1.0) * float(np.exp(self.random.normal(0, self.noise))),
            steps=steps,
            ranks=1,
            losses=(),
            changes=tuple(changes),
            reasons=self.reasons,
            main=str(self.path),
            versions={"torch": "2.13.0"},
            gpu="",
            buffered=0,
            seconds=self.seconds,
            ended=True,
            start_s=self.seconds,
            threads=1,
        )
        return run if turns is None or going is None else self.by_turns(run, turns, steps, going)

    def by_turns(
        self, run: Measured, turns: Turns, steps: int, going: Callable[[Measured], Sequence[int]]
    ) -> Measured:
        """Turns without and with each cure; their noise is a tenth of that between runs."""
        pairs: list[list[Turn]] = [[] for _ in turns.each]
        kept: Sequence[int] = range(1, len(pairs) + 1)
        left = steps // turns.stretch
        while kept and left > len(kept):
            left -= len(kept) + 1
            bare, *noise = np.exp(self.random.normal(0, self.noise / 10, len(pairs) + 1)).tolist()
            for turn in kept:
                cured = self.factor(turns.each[turn - 1]) * noise[turn - 1]
                pairs[turn - 1].append(Turn(1e7 * bare, 1e7 * cured))
            run = replace(run, turns=tuple(map(tuple, pairs)))
            kept = going(run)
        return run


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Simulated:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return Simulated(monkeypatch, path)


def gputrace_try(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Ran:
    """Runs the command in this process."""
    code = run_command(["try", *map(str, words)])
    return Ran(code, *capsys.readouterr())


def test_each_cure_has_its_answer_and_the_best_go_together(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.factors = {
        "workers=4": 0.8,
        "persistent": 0.9,
        "fused": 1.1,
        "pinned": 0,
        "foreach": 1.0,
    }
    simulated.failing = {"compile=default": "exit code 1: no compiler"}
    simulated.changes["workers=4"] = Change(
        "", "DataLoader", "num_workers", -1, "1", "4", str(simulated.path), 6
    )
    words = "workers=4,persistent,fused,foreach,pinned,compile", "--json", "--apply", "--", "true"
    ran = gputrace_try(capsys, *words)
    result = json.loads(ran.out)
    rows = {row["cure"]: row for row in result["rows"]}
    assert {cure: row["verdict"] for cure, row in rows.items()} == {
        "workers=4": "faster",
        "persistent": "faster",
        "fused": "slower",
        "foreach": "no difference",
        "pinned": "changes nothing",
        "compile=default": "failed",
        "workers=4+persistent": "faster",
    }
    assert rows["workers=4+persistent"]["ratio"] == pytest.approx(0.72, rel=0.01)
    assert (ran.code, result["best"]) == (FASTER, "workers=4+persistent")
    assert rows["compile=default"]["why"] == "exit code 1: no compiler"
    assert "+loader = DataLoader(range(500), num_workers=4)" in result["patch"]["diff"]
    assert simulated.path.read_text() == PROGRAM.replace("num_workers=1", "num_workers=4")
    kept = json.loads(gputrace_try(capsys, "--history", "--json").out)
    assert kept["trials"] == result["rows"]


@pytest.mark.parametrize(
    ("cure", "shown", "wrote"),
    [
        ("workers=4", "6: loader = DataLoader(range(500), num_workers=4)", "wrote {}"),
        ("threads=2", "threads=2: run it as OMP_NUM_THREADS=2", "wrote nothing: all of it is to"),
        ("persistent", "Nothing that was tried gains 5%", "wrote nothing: nothing is proven"),
    ],
)
def test_what_is_to_be_changed_is_shown_and_whether_it_was_written(
    simulated: Simulated,
    capsys: pytest.CaptureFixture[str],
    cure: str,
    shown: str,
    wrote: str,
) -> None:
    simulated.factors = {"workers=4": 0.5, "threads=2": 0.5, "persistent": 1.5}
    file = str(simulated.path)
    simulated.changes["workers=4"] = Change(
        "workers", "DataLoader", "num_workers", -1, "1", "4", file, 6
    )
    ran = gputrace_try(capsys, cure, "--apply", "--", "env", "python", "train.py")
    assert shown in " ".join(ran.out.split())
    assert wrote.format(file) in ran.err


@pytest.mark.parametrize(("noise", "said"), [(0.02, False), (0.3, True)])
def test_a_busy_machine_is_said_to_be_why_nothing_can_be_told(
    simulated: Simulated, noise: float, said: bool
) -> None:
    simulated.factors, simulated.noise = {"persistent": 1.0}, noise
    outcome = gputrace.try_cures(["x"], "persistent", budget="1min")
    assert outcome.rows[0].verdict == "cannot tell yet"
    assert any("is the machine busy" in note for note in outcome.notes) == said


def test_a_cure_whose_hook_raised_has_failed(simulated: Simulated) -> None:
    simulated.factors = {"graphs": 0, "pinned": 0}
    simulated.reasons = {"graphs": "failed: RuntimeError('capture')", "pinned": "torch sees no GPU"}
    outcome = gputrace.try_cures(["x"], "graphs,pinned")
    assert [(row.verdict, row.why) for row in outcome.rows] == [
        ("failed", "RuntimeError('capture')"),
        ("changes nothing", "torch sees no GPU"),
    ]


def test_a_program_that_fails_later_leaves_what_is_known_by_then(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_the_tenth_run(candidate: Candidate, *given: Any) -> Measured:
        if len(simulated.made) >= 9:
            raise Failed("exit code 1: no space left")
        return run(candidate, *given)

    run = simulated.run
    monkeypatch.setattr(simulated, "run", fail_at_the_tenth_run)
    simulated.factors, simulated.noise = {"persistent": 0.5}, 0.05
    outcome = gputrace.try_cures(["x"], "persistent")
    assert (outcome.best, outcome.rows[0].rounds) == ("persistent", 4)
    assert outcome.notes == ("no more rounds were made: x: exit code 1: no space left",)


def test_an_interrupted_run_leaves_the_rounds_it_had(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.factors = {"pinned": 0.5}
    rounds, switched = 0, simulated.by_turns

    def by_turns(
        run: Measured, turns: Turns, steps: int, going: Callable[[Measured], Sequence[int]]
    ) -> Measured:
        def interrupted(measured: Measured) -> Sequence[int]:
            nonlocal rounds
            rounds += 1
            going(measured)
            if rounds == 8:
                raise KeyboardInterrupt
            return [1]

        return switched(run, turns, steps, interrupted)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulated, "by_turns", by_turns)
        ran = gputrace_try(capsys, "pinned", "--", sys.executable, simulated.path)
    assert ran.code == INTERRUPTED
    assert "pinned: faster by 100%" in ran.out
    assert re.search(r"pinned .* 8$", ran.out, re.M)


@pytest.mark.parametrize(("code", "kept"), [(None, (True, 2)), (0, (False, 0))])
def test_rounds_for_which_the_time_was_over_are_kept(
    simulated: Simulated, code: int | None, kept: tuple[bool, int]
) -> None:
    """A program that ends by itself has whole runs; one that was stopped goes on by turns."""
    [cure] = read_candidates("workers=4")
    history, row = History(Request(("x",))), Row(cure)
    history.pilot = simulated.run(Candidate(), 10, 40)
    turns = history.turns([row])
    run = simulated.run(cure, 10, 4 * turns.stretch, None, turns, lambda _: [1])
    history.add_turns([row], replace(run, code=code), turns, [])
    assert (row.within, len(row.cured)) == kept


def test_what_is_left_of_the_budget_goes_to_what_is_open(simulated: Simulated) -> None:
    simulated.noise, simulated.factors = 0.03, {"persistent": 0.5}
    outcome = gputrace.try_cures(["x"], "persistent,bucket-view")
    persistent, other = outcome.rows
    assert (persistent.verdict, persistent.rounds < other.rounds) == ("faster", True)


@pytest.mark.parametrize(
    ("noise", "verdict", "words"),
    [
        (0.3, "Nothing that was tried gains 5%.", r"gc +gains [0-4]\.\d% at most \(-\d\.\d% to"),
        (2.0, "Nothing that was tried is proven to be faster.", r"gc +cannot tell yet \(-"),
    ],
)
def test_what_gains_little_is_told_as_such(
    simulated: Simulated,
    capsys: pytest.CaptureFixture[str],
    noise: float,
    verdict: str,
    words: str,
) -> None:
    simulated.noise, simulated.factors = noise, {"gc": 1.015}
    ran = gputrace_try(capsys, "gc", "--", "true")
    assert (ran.code, ran.out.splitlines()[0]) == (NOT_FASTER, verdict)
    assert re.search(words, ran.out)


@pytest.mark.parametrize(("start_s", "steps"), [(7.0, "12,600"), (0.1, None)])
def test_a_run_as_a_whole_gains_less_for_its_start(
    simulated: Simulated, start_s: float, steps: str | None
) -> None:
    """A start of 1,400 steps of 5 ms: in nine times as many the gain is nine tenths."""
    simulated.seconds, simulated.noise, simulated.factors = start_s, 0.0, {"gc": 0.5}
    notes = " ".join(gputrace.try_cures(["x"], "gc").notes)
    assert (f"90% of what its steps do from about {steps} steps on" in notes) == bool(steps)
    assert ("not the start of 7.0 s" in notes) == bool(steps)


def test_rounds_run_forwards_and_backwards_in_turn(simulated: Simulated) -> None:
    simulated.factors = {"persistent": 0.5}
    outcome = gputrace.try_cures(["x"], "persistent")
    assert simulated.made == [
        "as it is",
        *["as it is", "persistent", "persistent", "as it is"],
        "as it is",
        "persistent",
    ]
    assert (outcome.runs, outcome.best) == (7, "persistent")


def test_a_spent_budget_leaves_what_is_not_decided_open(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.factors, simulated.seconds = {"persistent": 0.5}, 100.0
    ran = gputrace_try(capsys, "persistent", "--budget", "2min", "--", "env", "python", "train.py")
    assert ran.code == NOT_FASTER
    said = " ".join(ran.out.split())
    assert "before all was decided (persistent): a round takes 200 s; --budget 14min" in said


def test_what_was_faster_so_far_has_its_answer_where_the_budget_is_short(
    simulated: Simulated,
) -> None:
    """A run takes 10 s here: three rounds of all cures would take 160 s."""
    simulated.factors, simulated.seconds = {"static-graph": 0.7}, 10.0
    cures = "persistent,threads=2,static-graph,bucket-view"
    outcome = gputrace.try_cures(["x"], cures, budget="110s")
    rounds = {row.cure: row.rounds for row in outcome.rows}
    assert outcome.best == "static-graph"
    assert rounds == {"persistent": 1, "threads=2": 1, "static-graph": 3, "bucket-view": 1}
    assert simulated.spent <= 110
    simulated.spent = 0.0
    outcome = gputrace.try_cures(["x"], "static-graph," + cures, budget="70s")
    assert [row.rounds for row in outcome.rows] == [3, 0, 0, 0]
    assert (outcome.best, simulated.spent) == ("static-graph", 70)


@pytest.mark.parametrize(("budget_s", "rounds"), [(40, 3), (30, 1)])
def test_what_is_left_goes_to_one_answer_unless_it_is_clearly_too_little(
    simulated: Simulated, budget_s: int, rounds: int
) -> None:
    """The first round of 10.5 s foretells 21 s for two more, where 20.5 s or 10.5 s are left."""
    seconds = iter([9.0, 5.0, 5.5])

    def take() -> None:
        simulated.seconds = next(seconds, 5.0)

    simulated.before, simulated.factors = take, {"static-graph": 0.7}
    outcome = gputrace.try_cures(
        ["x"], "static-graph,persistent,bucket-view", budget=f"{budget_s}s"
    )
    assert [row.rounds for row in outcome.rows] == [rounds, 0, 0]
    assert (outcome.best == "static-graph", simulated.spent <= budget_s) == (rounds == 3, True)


def test_to_choose_by_the_first_round_makes_no_cure_faster_that_is_not(
    simulated: Simulated,
) -> None:
    simulated.noise, simulated.seconds = 0.02, 10.0
    faster = 0
    for _ in range(40):
        simulated.spent = 0.0
        outcome = gputrace.try_cures(
            ["x"], "persistent,threads=2,static-graph,bucket-view", budget="110s"
        )
        faster += outcome.best is not None
    assert faster <= 2


def test_what_takes_long_to_start_has_its_turn_after_the_others(simulated: Simulated) -> None:
    gputrace.try_cures(["x"], "compile,foreach")
    assert simulated.made == ["as it is", "foreach", "compile=default"]


def test_a_recordings_findings_are_tried_and_its_predictions_are_kept(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.trace = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)
    ran = gputrace_try(capsys, "--json", "--", "true")
    result = json.loads(ran.out)
    rows = {row["cure"]: row for row in result["rows"]}
    assert result["findings"][0] == "data-feeding"
    workers = [cure for cure in rows if cure.startswith("workers=")]
    assert len(workers) >= 2
    for cure in workers:
        assert 0 < rows[cure]["predicted"] < 1
        assert rows[cure]["verdict"] == "no difference"
    assert "pinned" not in rows, "torch sees no GPU"
    assert (ran.code, result["best"]) == (NOT_FASTER, None)
    history = gputrace_try(capsys, "--history").out
    assert "Predictions, in % of a step as it is" in history


def test_what_changes_results_joins_the_best_only_where_it_was_asked_for(
    simulated: Simulated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulated.factors = {"tf32": 0.5}
    assert gputrace.try_cures(["x"], "tf32").best == "tf32"
    chosen = tuple(read_candidates("tf32"))
    monkeypatch.setattr("gputrace.trials.trial.cures_for", lambda *_: chosen)
    recording = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)
    outcome = gputrace.try_cures(["x"], recording=recording)
    assert [(row.verdict, row.numerics) for row in outcome.rows] == [("faster", True)]
    assert outcome.best is None
    ran = gputrace_try(capsys, "--recording", recording, "--", "true")
    assert ran.code == FASTER
    assert "tf32: faster by 100% (" in ran.out
    assert "but it changes numerics" in ran.out
    assert "gputrace try tf32" in " ".join(ran.out.split())


def test_the_best_cure_is_proven_in_a_minute_in_most_trials() -> None:
    """Of simulated programs by chance; the others need more than four starts for it."""
    found = budgets.tally([budgets.by_chance(seed) for seed in range(20)], 60, 3)
    assert found.proven >= 0.8
    assert found.found >= 0.8
    assert found.covered >= 0.95
    assert found.wrong <= 0.05


@pytest.mark.parametrize("planted", budgets.SICK, ids=lambda planted: planted.name)
def test_each_sick_training_has_its_answer_in_two_minutes(planted: budgets.Planted) -> None:
    found = budgets.tally([planted], 120, 8)
    assert found.proven >= 0.8


def row_of(cure: str, cured: Sequence[float] = (), hope: float = 1.0) -> Row:
    """A row with rounds in which steps as it is take 1."""
    [candidate] = read_candidates(cure)
    row = Row(candidate, Prediction(hope))
    row.bare, row.cured = [1.0] * len(cured), list(cured)
    row.ratio = compare(row.bare, row.cured)
    row.verdict = row.ratio.verdict if row.ratio else Verdict.OPEN
    return row


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


def test_what_can_be_switched_within_a_run_is_decided_by_fewer_runs(simulated: Simulated) -> None:
    """Runs differ by a tenth here, which hides a gain of 4 % from whole runs."""
    simulated.factors, simulated.noise = {"gc": 0.96, "persistent": 0.96}, 0.1
    within, whole = (gputrace.try_cures(["x"], cure) for cure in ("gc", "persistent"))
    assert (within.best, within.runs) == ("gc", 4), "and two other starts of the best"
    assert within.rows[0].rounds < MOST, "it ends as soon as it is decided"
    assert within.rows[0].ratio == pytest.approx(0.96, rel=0.02)
    assert (whole.best, whole.runs) == (None, 1 + 2 * MOST)


@pytest.mark.parametrize(
    ("ratios", "verdict", "said"),
    [
        ((0.5, 0.4, 0.6), "faster", "graphs gained 100%, 150%, 67% in 3 starts of the program"),
        ((0.5, 0.8, 1.25), "cannot tell yet", "graphs gained 100%, 25%, -20% in 3 starts"),
    ],
)
def test_the_best_is_measured_in_other_starts_of_the_program(
    simulated: Simulated, ratios: tuple[float, ...], verdict: str, said: str
) -> None:
    """What a start decides is the same in all rounds of its run."""
    planted = iter(ratios)
    simulated.before = lambda: simulated.factors.update(
        graphs=next(planted) if simulated.made[-1] == "graphs" else 1.0
    )
    outcome = gputrace.try_cures(["x"], "graphs")
    [graphs] = outcome.rows
    assert graphs.ratio == pytest.approx(np.prod(ratios) ** (1 / 3), rel=0.01)
    assert graphs.low is not None
    assert graphs.low < min(ratios)
    assert graphs.high is not None
    assert graphs.high > max(ratios)
    assert graphs.verdict == verdict
    assert any(note.startswith(said) for note in outcome.notes)


@pytest.mark.parametrize(("budget", "starts"), [("30s", 1), ("5min", 3)])
def test_other_starts_are_made_where_the_budget_pays_for_them(
    simulated: Simulated, budget: str, starts: int
) -> None:
    simulated.factors, simulated.seconds = {"graphs": 0.5}, 10.0
    outcome = gputrace.try_cures(["x"], "graphs", budget=budget)
    assert (outcome.best, simulated.made.count("graphs")) == ("graphs", starts)


def test_a_best_that_fails_in_another_start_keeps_its_answer(simulated: Simulated) -> None:
    def fail_later() -> None:
        if simulated.made.count("graphs") == 2:
            simulated.failing["graphs"] = "exit code 1: no memory"

    simulated.factors, simulated.before = {"graphs": 0.5}, fail_later
    outcome = gputrace.try_cures(["x"], "graphs")
    assert outcome.best == "graphs"
    assert outcome.notes == ("graphs failed in another start: exit code 1: no memory",)


@pytest.mark.parametrize("scatter", [0.0, 0.005, 0.02, 0.15])
def test_intervals_of_several_starts_hold_what_a_start_gains_on_average(scatter: float) -> None:
    random, held = np.random.default_rng(3), 0
    for _ in range(1000):
        starts = np.exp(random.normal(np.log(0.5), scatter, 3))
        ratios = []
        for start in starts:
            ratio = compare([1.0] * 6, start * np.exp(random.normal(0, 0.01, 6)))
            assert ratio is not None
            ratios.append(ratio)
        joined = across(ratios)
        held += joined.low <= 0.5 <= joined.high
    assert held >= 950


def test_cures_that_can_be_switched_share_a_run(simulated: Simulated) -> None:
    simulated.factors = {"tf32": 0.5, "gc": 0.9}
    outcome = gputrace.try_cures(["x"], "tf32,graphs,gc,cudnn-benchmark=on,cudnn-benchmark=off")
    assert simulated.made == [
        "as it is",
        "tf32+gc+cudnn-benchmark=on",
        "graphs",
        "cudnn-benchmark=off",
        *["tf32+gc"] * 3,
    ]
    assert [row.verdict for row in outcome.rows[:3]] == ["faster", "no difference", "faster"]
    assert outcome.best == "tf32+gc"


def test_a_cure_that_changes_nothing_costs_one_run(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.factors, simulated.reasons = {"gc": 0}, {"gc": "it is so already"}
    ran = gputrace_try(capsys, "gc", "--", "true")
    assert ran.out.startswith("Nothing that was tried changes the program.\n")
    assert re.search(r"^ *gc changes nothing +1$", ran.out, re.M)
    assert "gc: changes nothing: it is so already\n" in ran.out
    assert simulated.made == ["as it is", "gc"]


def test_as_many_threads_as_there_are_cost_no_run(simulated: Simulated) -> None:
    simulated.factors = {"threads=1": 0.5, "threads=2": 0.5}
    [one, two] = gputrace.try_cures(["x"], "threads=1,threads=2").rows
    assert (one.verdict, one.rounds, two.verdict) == ("changes nothing", 0, "faster")
    assert "threads=1" not in simulated.made


def test_a_cure_that_ends_a_run_leaves_the_others_of_that_run_their_answers(
    simulated: Simulated,
) -> None:
    simulated.factors = {"gc": 0.9}
    simulated.failing = {"fused": "exit code 1: RuntimeError: planted"}
    outcome = gputrace.try_cures(["x"], "fused,gc")
    assert [row.verdict for row in outcome.rows] == ["failed", "faster"]
    assert simulated.made == ["as it is", "fused+gc", "fused", *["gc"] * 3]


def test_a_program_that_fails_as_it_is_ends_the_trial_in_one_line(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Measured:
        raise Failed("exit code 1: ValueError: planted")

    monkeypatch.setattr(ProgramToTry, "run", fail)
    ran = gputrace_try(capsys, "gc", "--", "env", "python", "train.py")
    assert (ran.code, ran.out) == (UNREADABLE, "")
    last = "gputrace: env python train.py: exit code 1: ValueError: planted"
    assert ran.err.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["worker=8"], "did you mean workers?"),
        (["workers"], "give its value, as workers=8"),
        (["workers=many"], "is no number"),
        (["pinned=1"], "takes no value"),
        (["compile=fast"], "it takes default, reduce-overhead, max-autotune"),
        (["pinned", "fused+gc+foreach"], "exclude each other; try them apart, as fused,gc,foreach"),
        (["workers=2+workers=4"], "exclude each other"),
        ([","], "name a cure"),
        (["gc", "--", "train.py"], "train.py: no such program; write python train.py"),
        (["pinned", "--budget", "soon"], "is not a time"),
        (["pinned", "--keep-recording", __file__], "is there already; name another"),
        (["pinned", "--keep-recording", "x", "--recording", __file__], "no recording is made"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words: list[str], said: str) -> None:
    assert_refused(command.gputrace("try", *words, "--", "true"), USAGE, said)


def test_the_list_has_every_cure_and_what_it_does() -> None:
    shown = command.gputrace("try", "--list").out
    assert "prefetch=N\n    prefetch_factor of DataLoaders; 4 if no value is given [torch]" in shown
    assert "workers=N\n    num_workers of DataLoaders [torch]\n" in shown
    listed = json.loads(command.gputrace("try", "--list", "--json").out)
    assert {cure["id"]: cure["numerics"] for cure in listed} == {
        cure.id: cure.numerics for cure in CURES
    }


# ---- statistics ----


def verdicts(
    effect: float, noise: float, drift: float = 0.0, busy: float = 0.0, tries: int = 300
) -> list[Verdict]:
    """Answers to trials of a cure that makes steps longer by a factor; runs differ by the noise,
    and a part of them falls into a busy time of the machine, which doubles their steps."""
    answers, random = [], np.random.default_rng(1)
    for _ in range(tries):
        pairs: list[tuple[float, float]] = []
        answer = None
        while answer is None or not answer.enough:
            at, steps = 2 * len(pairs), [1.0, effect]
            for place, which in enumerate(order([0, 1], len(pairs))):
                steps[which] *= np.exp(random.normal(drift * (at + place), noise))
                steps[which] *= 2 if random.random() < busy else 1
            pairs.append((steps[0], steps[1]))
            answer = compare(*zip(*pairs, strict=True))
        answers.append(answer.verdict)
    return answers


@pytest.mark.parametrize(("noise", "busy"), [(0.001, 0), (0.01, 0), (0.1, 0), (0.01, 0.1)])
def test_what_makes_no_difference_is_called_different_in_less_than_one_try_of_twenty(
    noise: float, busy: float
) -> None:
    answers = verdicts(1.0, noise, busy=busy)
    assert sum(answer in (Verdict.FASTER, Verdict.SLOWER) for answer in answers) < len(answers) / 20


def test_no_difference_is_said_to_be_one_in_19_of_20_tries() -> None:
    assert verdicts(1.0, 0.01).count(Verdict.ALIKE) > 0.95 * 300
    assert verdicts(1.0, 0.005, busy=0.02).count(Verdict.ALIKE) > 0.95 * 300


def test_runs_that_scatter_by_as_much_as_is_no_difference_are_rarely_judged_wrong() -> None:
    answers = verdicts(1.0, 0.02)
    assert answers.count(Verdict.FASTER) + answers.count(Verdict.SLOWER) < 0.05 * len(answers)
    assert answers.count(Verdict.ALIKE) > 0.7 * len(answers)


@pytest.mark.parametrize(("effect", "verdict"), [(0.8, Verdict.FASTER), (1.25, Verdict.SLOWER)])
def test_a_fifth_is_found_also_where_the_machine_slows_down(
    effect: float, verdict: Verdict
) -> None:
    answers = verdicts(effect, 0.03, drift=0.01)
    assert answers.count(verdict) > 0.95 * len(answers)


def test_little_that_is_sure_is_no_difference_and_noise_ends_undecided() -> None:
    assert compare([1, 1, 1], [0.99, 0.99, 0.99]).verdict == Verdict.ALIKE  # type: ignore[union-attr]
    assert ALIKE == 0.02
    noisy = compare([1.0] * MOST, [0.5, 1.5, 2, 1, *[0.4, 2.5] * MOST][:MOST])
    assert noisy is not None
    assert (noisy.verdict, noisy.enough) == (Verdict.OPEN, True)
    assert compare([1, 1], [2, 2]) is None


@pytest.mark.parametrize(
    "name", ["whole runs, 2%", "steps in turns, 5%", "an event each 3.5 turns"]
)
def test_an_interval_holds_the_effect_after_whichever_look(name: str) -> None:
    [noise] = [noise for noise in NOISES if name in noise.name]
    found = tally(noise, 0.8, trials=1000)
    assert found.covered >= 0.95


def falling(scale: float, seed: int = 0, scatter: float = 0.05) -> list[float]:
    steps = np.arange(40)
    noise = np.random.default_rng(seed).normal(0, scatter, 40)
    return [float(value) for value in scale * np.exp(-steps / 40) * (1 + noise)]


@pytest.mark.parametrize(
    ("cured", "differs"),
    [
        ([falling(1.0)] * 3, False),
        ([falling(1.0, seed) for seed in range(4, 7)], False),
        ([falling(1.3)] * 3, True),
        ([[float("nan")] * 40], True),
        ([[]], None),
    ],
)
def test_a_loss_that_leaves_its_scatter_is_flagged(
    cured: Sequence[Sequence[float]], differs: bool | None
) -> None:
    assert losses_differ([falling(1.0, seed) for seed in range(3)], cured) is differs


@pytest.mark.parametrize(
    ("pairs", "differs"),
    [
        ([(1.00, 1.001), (0.9, 0.9), (0.8, 0.8)], False),
        ([(1.0, 0.9), (0.9, 1.0), (0.8, 0.7), (0.7, 0.8)], False),
        ([(1.00, 1.30), (0.9, 1.2), (0.8, 1.11)], True),
        ([(1.0, 1.0), (0.9, float("nan")), (0.8, 0.8)], True),
        ([(1.0, 1.0), (float("nan"), 1.0), (0.8, 0.8)], None),
        ([(1.0, 2.0)] * 2, None),
    ],
)
def test_a_loss_that_differs_by_turns_is_flagged(
    pairs: Sequence[tuple[float, float]], differs: bool | None
) -> None:
    assert turn_losses_differ(pairs) is differs


# ---- cures ----


def test_cures_that_exclude_each_other_are_not_combined() -> None:
    together = combine(read_candidates("workers=8,fused,foreach,workers=4,pinned+gc"))
    assert str(together) == "workers=8+fused+pinned+gc"


def test_variables_join_what_the_environment_has_where_they_should() -> None:
    [candidate] = read_candidates("expandable+threads=2+xla-latency")
    inherited = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "OMP_NUM_THREADS": "9"}
    changed = candidate.environment(inherited)
    assert changed["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
    assert changed["OMP_NUM_THREADS"] == "2"
    assert changed["XLA_FLAGS"] == "--xla_gpu_enable_latency_hiding_scheduler=true"


@pytest.mark.parametrize(
    ("finding", "framework", "there", "cures"),
    [
        ("data-feeding", "torch", [], "workers=6,workers=8,workers=16"),
        (
            "data-feeding",
            "torch",
            ["workers"],
            "workers=6,workers=8,workers=16,prefetch=4,persistent",
        ),
        ("h2d-pageable", "torch", ["gpu"], "pinned,staging,non-blocking"),
        ("data-feeding", "tensorflow", ["gpu"], "tf-parallel,tf-prefetch"),
        ("communication-exposed", "jax", [], "xla-latency"),
        ("launch-bound", "jax", ["gpu"], "xla-graphs"),
        ("compute-bound", "chainer", ["gpu"], ""),
    ],
)
def test_findings_ask_for_cures_of_what_the_program_has(
    finding: str, framework: str, there: list[str], cures: str
) -> None:
    chosen = cures_for([finding], [framework], there, cores=16, wanted_workers=6)
    assert ",".join(map(str, chosen)) == cures


def test_every_finding_and_prediction_that_a_cure_names_is_one() -> None:
    from gputrace.analyzers.findings import ALL_RULES
    from gputrace.analyzers.whatif.optimizations import CURES as EFFECTS

    findings = {rule.__name__.replace("_", "-") for rule in ALL_RULES}
    for cure in all_cures().values():
        assert findings.issuperset(cure.findings)
        assert {effect.id for effect in EFFECTS}.issuperset(cure.predictions)


def test_a_finding_that_a_cure_removes_foretells_its_step() -> None:
    finding = SimpleNamespace(id="layout-transposes", impact_ns=25)
    steps = SimpleNamespace(mean_ns=100)
    analysis: Any = SimpleNamespace(
        loader=(), step_phases=(), what_if=(), findings=(finding,), steps=steps
    )
    layout, precision = read_candidates("channels-last,bf16")
    assert predict(layout, analysis) == Prediction(0.75)
    assert predict(precision, analysis) is None


def test_a_cure_of_some_phases_saves_the_launches_in_them() -> None:
    """Of a step of 40, the GPU waits 30 for launches: 20 in the optimizer, 9 in the model."""
    phases = [
        SimpleNamespace(name=name, host_ns=host, launch_ns=launch)
        for name, host, launch in (
            ("forward", 4, 3),
            ("backward", 8, 6),
            ("optimizer", 26, 20),
            ("other", 2, 1),
        )
    ]
    effect = SimpleNamespace(id="graphs", now_ns=40, step_ns=10, low_ns=8, high_ns=20)
    analysis: Any = SimpleNamespace(
        loader=(),
        step_phases=[SimpleNamespace(step_ns=40, phases=phases)],
        what_if=[effect],
        findings=(),
    )
    model, optimizer, whole = read_candidates("graphs,fused,xla-graphs")
    whole_step = predict(whole, analysis)
    assert whole_step is not None
    assert whole_step.ratio == pytest.approx(10 / 40)
    foretold = predict(model, analysis)
    assert foretold is not None
    assert foretold.ratio == pytest.approx(1 - 0.75 * 9 / 30)
    assert foretold.middle == pytest.approx(1 - 0.65 * 9 / 30)
    assert predict(optimizer, analysis) == Prediction(1 - 20 / 40, 1 - 26 / 40, 1.0)


def test_of_several_ranks_the_one_that_waits_longest_foretells_workers() -> None:
    def loader(wait: int, step: int) -> SimpleNamespace:
        choices = [SimpleNamespace(workers=4, step_ns=step)]
        now = SimpleNamespace(step_ns=30)
        return SimpleNamespace(
            wait_ns=wait, now=now, predictions=choices, prefetch_factor=2, doubled_step_ns=29
        )

    analysis: Any = SimpleNamespace(loader=[loader(2, 25), loader(12, 20)])
    workers, deeper, as_deep = read_candidates("workers=4,prefetch=4,prefetch=2")
    assert predict(workers, analysis) == Prediction(20 / 30)
    assert predict(deeper, analysis) == Prediction(29 / 30)
    analysis.step_phases, analysis.what_if, analysis.findings = (), (), ()
    analysis.steps = SimpleNamespace(mean_ns=30)
    assert predict(as_deep, analysis) is None


# ---- the patch ----


@pytest.mark.parametrize(
    ("before", "position", "after"),
    [
        ("DataLoader(data, num_workers=0)", -1, "DataLoader(data, num_workers=8)"),
        ("DataLoader(data)", -1, "DataLoader(data, num_workers=8)"),
        ("DataLoader()", -1, "DataLoader(num_workers=8)"),
        ("DataLoader(data, 64, 2)", 2, "DataLoader(data, 64, 8)"),
        (
            "torch.DataLoader(\n    data,  # é\n)",
            -1,
            "torch.DataLoader(\n    data, num_workers=8,  # é\n)",
        ),
        (
            "DataLoader(\n    data,\n    shuffle=True,\n)",
            -1,
            "DataLoader(\n    data,\n    shuffle=True,\n    num_workers=8,\n)",
        ),
        (
            "DataLoader(\n    data,\n    shuffle=(s is None),  # s)\n)",
            -1,
            "DataLoader(\n    data,\n    shuffle=(s is None), num_workers=8,  # s)\n)",
        ),
        ("DataLoader(i for i in range(9))", -1, None),
        (
            "DataLoader(data, **options.of['é'])",
            -1,
            "DataLoader(data, **{**options.of['é'], \"num_workers\": 8})",
        ),
        ("DataLoader(data, num_workers=0, **o)", -1, "DataLoader(data, num_workers=8, **o)"),
        ("DataLoader(data, **a, **b)", -1, None),
        ("DataLoader(*data)", -1, "DataLoader(*data, num_workers=8)"),
        ("DataLoader(*data, 2)", 2, None),
        ("DL(data)", -1, "DL(data, num_workers=8)"),
        ("getattr(data, 'DL')(d)", -1, "getattr(data, 'DL')(d, num_workers=8)"),
        ("DL(KINDS[kind](data))", -1, "DL(KINDS[kind](data), num_workers=8)"),
        ("KINDS[kind](data), KINDS[kind](data)", -1, None),
        ("super().__init__(data)", -1, "super().__init__(data, num_workers=8)"),
        ("make(data)", -1, None),
        ("DataLoader(a), DataLoader(b)", -1, None),
    ],
)
def test_an_argument_is_changed_where_the_program_gives_it(
    tmp_path: Path, before: str, position: int, after: str | None
) -> None:
    path = tmp_path / "train.py"
    head = "from torch.utils.data import DataLoader as DL; é = '→'\nloader"
    path.write_text(f"{head} = {before}\n", encoding="utf-8")
    change = Change("workers", "DataLoader", "num_workers", position, "0", "8", str(path), 2)
    patch = make_patch(read_candidates("workers=8")[0], [change], str(path), ["python", "train.py"])
    if after is None:
        assert patch.edits == ()
        assert patch.by_hand[0].endswith(f", at {os.path.relpath(path)}:2")
    else:
        [edit] = patch.edits
        assert edit.after == f"{head} = {after}\n"


@pytest.mark.parametrize(
    ("program", "call", "argument"),
    [
        ("train.py", "DataLoader", "num_workers"),
        ("finetune.py", "TrainingArguments", "dataloader_num_workers"),
    ],
)
def test_the_tutorial_shows_the_patches_of_its_programs(
    program: str, call: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(command.ROOT / "examples" / "try")
    path = Path(program).absolute()
    lines = path.read_text(encoding="utf-8").splitlines()
    line = 1 + next(at for at, text in enumerate(lines) if f" = {call}(" in text)
    change = Change("workers", call, argument, -1, "0", "8", str(path), line)
    patch = make_patch(read_candidates("workers=8")[0], [change], str(path), ["python", program])
    page = (command.ROOT / "docs" / "tutorial-try.md").read_text(encoding="utf-8")
    assert f"\n{patch.diff}" in page


def test_settings_become_statements_and_variables_become_a_command(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n\ntrain()\n")
    [candidate] = read_candidates("cudnn-benchmark+threads=2+compile")
    call = Change("compile", "forward", "", -1, "", "", str(path), 3)
    patch = make_patch(candidate, [call], str(path), ["python", "train.py"])
    assert patch.edits[0].after.splitlines()[2] == "torch.backends.cudnn.benchmark = True"
    assert "OMP_NUM_THREADS=2" in patch.by_hand[0]
    assert patch.by_hand[0].endswith("python train.py")
    compiled = "compile=default: model = torch.compile(model); see "
    assert patch.by_hand[1] == f"{compiled}{os.path.relpath(path)}:3"


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        ("import torch\r\nimport os\r\n", "def main():\r\n    import json\r\n"),
        ("#!/bin/python\n# -*- coding: utf-8 -*-\n", "def main():\n    import torch\n"),
        ('"""It trains."""\n', "def main():\n    import torch\n"),
        ("from __future__ import annotations\nimport torch.nn as nn\n", "train()\n"),
        ("import torch\n\x0c\nimport os\n", "for i in range(3):\n    pass\nimport json\n"),
    ],
)
def test_a_statement_works_where_it_is_put_and_all_else_stays(
    tmp_path: Path, head: str, rest: str
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes((head + rest).encode())
    [candidate] = read_candidates("cudnn-benchmark")
    patch = make_patch(candidate, [], str(path), ["python", "train.py"])
    apply(patch)
    written = path.read_bytes().decode()
    assert written.startswith(head)
    assert written.endswith(rest)
    new = written.removeprefix(head).removesuffix(rest)
    end = "\r\n" if "\r\n" in head else "\n"
    assert all(line.endswith(end) for line in new.splitlines(keepends=True))
    assert ("import torch" in new) == (not head.startswith("import torch"))
    assert new.rstrip().endswith("torch.backends.cudnn.benchmark = True")


def test_a_program_that_cannot_be_written_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after some bytes; then there is space, and its mode and links stay."""
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_text("import torch\ntrain()\n")
    path.chmod(0o750)
    link.symlink_to(path)
    patch = make_patch(read_candidates("cudnn-benchmark")[0], [], str(link), ["python"])

    def write_some(file: Path, data: bytes) -> None:
        with file.open("wb") as opened:
            opened.write(data[:9])
        raise OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write_some)
        with pytest.raises(OSError, match="No space"):
            apply(patch)
    assert path.read_text() == "import torch\ntrain()\n"
    apply(patch)
    assert "benchmark = True" in path.read_text()
    assert (link.is_symlink(), path.stat().st_mode & 0o777) == (True, 0o750)
    assert {each.name for each in tmp_path.iterdir()} == {"train.py", "link.py"}


@pytest.mark.parametrize("why", ["has changed meanwhile", "is read-only"])
def test_all_files_are_written_or_none(tmp_path: Path, why: str) -> None:
    calls = []
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("loader = DataLoader(data)\n")
        path = str(tmp_path / name)
        calls.append(Change("workers", "DataLoader", "num_workers", -1, "0", "8", path, 1))
    patch = make_patch(read_candidates("workers=8")[0], calls, "", ["python"])
    if why == "is read-only":
        (tmp_path / "b.py").chmod(0o444)
    else:
        (tmp_path / "b.py").write_text("loader = DataLoader(other)\n")
    with pytest.raises(OSError, match=why):
        apply(patch)
    assert (tmp_path / "a.py").read_text() == "loader = DataLoader(data)\n"
    assert "num_workers" not in (tmp_path / "b.py").read_text()


@pytest.mark.parametrize(
    ("handed", "call", "line"),
    [
        ("num_workers=num_workers", "num_workers=1", 7),
        ("**{'num_workers': num_workers}", "num_workers=1", 7),
        ("num_workers=num_workers", "", 5),
        ("num_workers=1", "num_workers=1", 5),
    ],
)
def test_what_the_programs_own_loader_hands_on_is_changed_where_it_is_called(
    real: Real, handed: str, call: str, line: int
) -> None:
    own = (
        "class Base(DataLoader): pass\n"
        "class Own(Base):\n"
        "    def __init__(self, data, num_workers=1):\n"
        f"        super().__init__(data, {handed})\n"
        "class Trainer:\n"
        f"    def __init__(self): self.loader = Own(range(500), {call})\n"
        "loader = Trainer().loader\n"
    )
    program = re.sub("optimizer = .*\nloader = .*\n", "", PROGRAM).replace("\n\n", f"\n{own}")
    program = program.replace("import sys\nfrom", "import sys; from", 1)
    program = program.replace("loader:\n", "loader:\n    optimizer = SGD([], 0.1)\n")
    run = real.run("workers=2", program)
    patch = make_patch(combine(read_candidates("workers=2")), run.changes, "", ["x"])
    [changed] = patch.edits[0].lines
    assert changed.startswith(f"{line + 1}: ")
    assert "num_workers=2" in changed
    assert patch.by_hand == ()


@pytest.mark.parametrize(
    ("imported", "value"),
    [
        ("import tensorflow as tf", "tf.data.AUTOTUNE"),
        ("import tensorflow", "tensorflow.data.AUTOTUNE"),
        ("from tensorflow.data import Dataset", "-1"),
    ],
)
def test_autotune_is_written_as_the_program_can_name_it(
    tmp_path: Path, imported: str, value: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{imported}\ndata = data.map(decode).batch(8, num_parallel_calls=2)\n")
    calls = [
        Change("tf-parallel", call, "num_parallel_calls", -1, old, "-1", str(path), 2)
        for call, old in (("map", "None"), ("batch", "2"))
    ]
    patch = make_patch(read_candidates("tf-parallel")[0], calls, str(path), ["python"])
    after = f"map(decode, num_parallel_calls={value}).batch(8, num_parallel_calls={value})"
    assert patch.edits[0].after == f"{imported}\ndata = data.{after}\n"


def test_a_diff_has_the_lines_that_patch_sees(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n\x0c\n# a\x0cb\ntrain()\n")
    patch = make_patch(read_candidates("cudnn-benchmark")[0], [], str(path), ["python"])
    assert "\\ No newline" not in patch.diff
    assert patch.diff.count("\n ") == 4


def test_a_statement_for_a_program_that_cannot_be_edited_is_told() -> None:
    [candidate] = read_candidates("cudnn-benchmark")
    for main in ("", "/nowhere/train.py"):
        patch = make_patch(candidate, [], main, ["python"])
        assert patch.by_hand[-1] == "torch.backends.cudnn.benchmark = True"


@pytest.mark.parametrize(
    ("file", "line", "place"),
    [
        ("/site-packages/trainer.py", 7, f"{os.path.relpath('/site-packages/trainer.py')}:7"),
        ("", 0, "an unknown line"),
    ],
)
def test_a_call_that_is_in_no_file_of_the_program_is_named(
    file: str, line: int, place: str
) -> None:
    change = Change("workers", "DataLoader", "num_workers", -1, "0", "8", file, line)
    patch = make_patch(read_candidates("workers=8")[0], [change], "train.py", ["python"])
    assert patch.edits == ()
    assert patch.by_hand == (f"workers: give DataLoader num_workers=8 (now 0), at {place}",)


# ---- the ledger ----

ENTRY: Final = ledger.Entry(
    time_ns=1,
    program="python train.py",
    host="node",
    gpu="",
    ranks=1,
    versions="torch 2.13.0",
    cure="workers=8",
    verdict="faster",
    why="",
    ratio=0.5,
    low=0.45,
    high=0.55,
    rounds=4,
    steps=40,
    bare_ns=1e6,
    predicted=0.6,
    predicted_low=0.5,
    predicted_high=0.7,
    numerics=False,
    loss_differs=None,
)


def test_the_ledger_says_how_far_predictions_were_off(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger.sqlite"
    assert ledger.read(path) == []
    ledger.append(path, [ENTRY])
    ledger.append(
        path,
        [
            replace(ENTRY, cure="workers=4", ratio=0.8),
            replace(ENTRY, cure="gc", predicted=None, loss_differs=True),
        ],
    )
    assert ledger.read(path)[0] == ENTRY
    gc, workers = ledger.records(ledger.read(path))
    assert (gc.cure, gc.predicted, gc.mean_error) == ("gc", 0, None)
    assert (workers.trials, workers.predicted, workers.ranged, workers.within) == (2, 2, 2, 1)
    assert workers.mean_error == pytest.approx(-0.05)
    assert workers.mean_size == pytest.approx(0.15)


@pytest.mark.parametrize("column", ["ratio", "low", "high"])
def test_a_step_that_takes_no_time_is_in_no_ledger(
    column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    nothing: dict[str, Any] = {column: 0.0}
    ledger.append(path, [replace(ENTRY, **nothing)])
    ran = gputrace_try(capsys, "--history", "--ledger", path)
    assert ran.code == 3
    assert f"{path}: holds a row that no trial leaves" in ran.err


def test_the_history_has_the_pairs_that_ship_with_gputrace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    shipped = json.loads(gputrace_try(capsys, "--history", "--ledger", path, "--json").out)
    graphs = next(each for each in shipped["shipped"] if each["cure"] == "graphs")
    pairs = [pair for pair in calibration.pairs() if pair.cure == "graphs" and pair.now_ms]
    errors = [(pair.predicted_ms - pair.measured_ms) / pair.now_ms for pair in pairs if pair.now_ms]
    assert graphs["trials"] == len(pairs) >= 2
    assert graphs["mean_error"] == pytest.approx(sum(errors) / len(errors))
    assert graphs["mean_error"] < 0, "launches are not all that such a step waits for"
    shown = gputrace_try(capsys, "--history", "--ledger", path).out
    assert "holds nothing yet" in shown
    assert "Pairs that ship with gputrace" in shown


def test_the_history_has_each_trial_with_its_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hour_ns = tmp_path / "ledger.sqlite", 3600 * 10**9
    later = replace(ENTRY, program="python other.py", time_ns=hour_ns)
    ledger.append(path, [ENTRY, replace(ENTRY, cure="pinned"), later])
    shown = gputrace_try(capsys, "--history", "--ledger", path).out
    heads = re.findall(r"^[-0-9]+ [:0-9]+ on node: (.*)\n.*measured +predicted$", shown, re.M)
    assert heads == ["python train.py", "python other.py"]
    first, second = shown.split("python other.py")
    assert first.index("workers=8") < first.index("pinned")
    assert "workers=8 faster by 100%" in second


@pytest.mark.parametrize("content", ["mine", "1"])
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    """SQLite takes a file of one byte for an empty one."""
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(InputError, match="ledger"):
        ledger.append(path, [ENTRY])
    assert path.read_text() == content


def test_a_ledger_that_cannot_be_kept_is_refused_before_any_run_and_costs_no_answer(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("mine")
    asked = "pinned", "--ledger", path, "--", sys.executable, simulated.path
    ran = gputrace_try(capsys, *asked)
    assert (ran.code, ran.out, simulated.made) == (UNREADABLE, "", [])
    assert "ledger.sqlite: cannot be used as a ledger" in ran.err
    path.unlink()
    simulated.factors["pinned"] = 0.5
    simulated.before = lambda: path.write_text("mine")
    ran = gputrace_try(capsys, *asked)
    assert (ran.code, "answers were not saved" in ran.out) == (FASTER, True)
    assert "faster by 100%" in ran.out


def test_a_program_whose_name_is_no_text_is_tried_and_kept(real: Real) -> None:
    real.script = real.folder / os.fsdecode(b"tr\xff.py")
    real.script.write_text(PROGRAM)
    [gc] = read_candidates("gc")
    trial = ProgramToTry((sys.executable, str(real.script)))
    run = trial.run(gc, 2, 4 * 6, turns=Turns((gc,), 6))
    assert (len(run.turns[0]), run.main) == (2, str(real.script))
    path = real.folder / "ledger.sqlite"
    ledger.append(path, [replace(ENTRY, program=str(real.script))])
    assert [entry.program for entry in ledger.read(path)] == [f"{real.folder}/tr?.py"]


SCRIPT: Final = """\
import gputrace
from torch.optim import SGD
from torch.utils.data import DataLoader

def train():
    optimizer, loader = SGD([], 0.1), DataLoader(range(500), num_workers=1)
    for item in loader:
        optimizer.step()

if __name__ == "__main__":
    outcome = gputrace.try_cures(train, "workers=8", warmup=2, steps=8)
    print(outcome.best, *outcome.command, outcome.patch.diff)
"""


def test_a_function_of_a_script_is_tried(real: Real) -> None:
    real.script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, real.script], capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("workers=8 __main__.train()"), ran.stderr
    assert "DataLoader(range(500), num_workers=8)" in ran.stdout
    assert [entry.program for entry in ledger.read(ledger.default_ledger())] == ["__main__.train()"]


def test_python_says_what_it_cannot_try(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no cure is called 'magic'"):
        gputrace.try_cures(["python", "train.py"], "magic")
    with pytest.raises(UsageError, match="define it at the top level of a file"):
        gputrace.try_cures(lambda: None, "gc")
    monkeypatch.setenv("GPUTRACE_TRY", "{}")
    with pytest.raises(UsageError, match="__main__"):
        gputrace.try_cures(os.getpid, "gc")
