"""Runs of `gputrace try`: changed by the hooks, stopped after some steps, and measured."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.studies.runner import Failed
from gputrace.trials import runs
from gputrace.trials.cures import Candidate, combine, read_candidates
from gputrace.trials.history import Row
from gputrace.trials.runs import Program as ProgramToTry
from gputrace.trials.runs import Spent, Turns
from gputrace.trials.statistics import Verdict
from tests.helpers.study_scripts import Bench
from tests.helpers.tried_programs import PROGRAM, Real


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


def test_a_program_that_leaves_without_its_exit_handlers_is_measured(real: Real) -> None:
    leaves = PROGRAM.replace("range(500)", "range(60)").replace('print("done")', "os._exit(0)")
    real.script.write_text("import os\n" + leaves)
    trial = ProgramToTry((sys.executable, str(real.script)))
    assert trial.run(Candidate(), 2, 600).steps == 58
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "gc", budget="2min")
    assert [row.verdict for row in outcome.rows] != ["failed"]
    assert outcome.rows[0].rounds >= 3


@pytest.mark.parametrize(("ranks", "made"), [("1", 6), ("2", 22)])
def test_a_run_that_takes_long_is_enough_after_few_steps_unless_other_ranks_wait(
    real: Real, monkeypatch: pytest.MonkeyPatch, ranks: str, made: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    real.script.write_text(PROGRAM)
    program = ProgramToTry((sys.executable, str(real.script)))
    assert program.run(Candidate(), 2, 20, enough_s=0.0).made == made


def test_a_run_that_has_measured_nothing_in_its_time_is_ended(real: Real) -> None:
    real.script.write_text("import time\ntime.sleep(60)\n")
    program = ProgramToTry((sys.executable, str(real.script)))
    with pytest.raises(Spent):
        program.run(Candidate(), 2, 20, sign_s=0.0)


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
