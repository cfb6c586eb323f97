"""``gputrace bench``: what is run, what is kept of it, and what the command says."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers import command
from tests.helpers.command import assert_refused
from tests.helpers.on_terminal import OnTerminal
from tests.helpers.study_scripts import Bench, is_running

ONE = '[options]\ndevice = "cpu"\n[matrix]\nframework = ["stub"]\n'
TWO = f"{ONE}gpus = [1, 2]\n"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path).framework("stub")


def states(bench: Bench) -> list[tuple[str, str]]:
    return [(run.state, run.why) for run in bench.runs()]


def test_every_run_is_made_and_its_result_kept(bench: Bench) -> None:
    ran = bench.write(f'title = "Two"\nrepeats = 2\n{TWO}').run_apart("--format", "json")
    assert ran.code == 0
    results = json.loads(ran.out)
    assert (results["study"]["title"], results["study"]["repeats"]) == ("Two", 2)
    runs = results["runs"]
    assert [(run["repeat"], run["result"]["samples_per_second"]) for run in runs] == [
        (1, 100.0),
        (1, 200.0),
        (2, 100.0),
        (2, 200.0),
    ]
    assert {(run["state"], run["exit_code"], run["recorded"]) for run in runs} == {
        ("done", 0, False)
    }
    assert [line["gpus"] for line in bench.started()] == ["1", "2", "1", "2"]
    ends = [(run["started_ns"], run["ended_ns"]) for run in runs]
    assert ends == sorted(ends)
    assert all(start < end for start, end in ends)


def test_a_log_holds_the_command_and_all_that_it_said(bench: Bench) -> None:
    bench.framework("loud", 'print("to stderr", file=sys.stderr)')
    bench.write(ONE.replace("stub", "loud")).run()
    (run,) = bench.runs()
    lines = (bench.results / str(run.log)).read_text().splitlines()
    script = bench.workloads / "loud.py"
    assert lines[0] == f"$ {sys.executable} {script} --gpus 1 --device cpu"
    assert lines[1] == "training"
    assert lines[-1] == "to stderr"
    assert run.trace is None


def test_a_run_is_recorded_whatever_gputrace_py_the_script_has(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "gputrace.py").write_text("ours = True")
    monkeypatch.chdir(theirs)
    bench.framework("shadowed", "import gputrace; print(gputrace.ours)")
    study = ONE.replace("stub", "shadowed")
    bench.write(f"record = true\n{study}").run("--backend", "host", env={"PYTHONPATH": str(theirs)})
    (run,) = bench.runs()
    assert (run.state, run.recorded) == ("done", True)
    assert run.trace is not None


def test_a_recorded_run_has_a_trace(bench: Bench) -> None:
    bench.write(f"record = true\n{ONE}").run("--backend", "host")
    (run,) = bench.runs()
    assert (run.state, run.recorded) == ("done", True)
    with closing(sqlite3.connect(bench.results / str(run.trace))) as trace:
        tables = {name for (name,) in trace.execute("SELECT name FROM sqlite_master")}
    assert "GPUTRACE_META" in tables
    assert not list((bench.results / "underway").iterdir())


def test_lines_tell_how_it_goes_without_a_terminal(bench: Bench) -> None:
    ran = bench.write(f"{TWO}").run()
    lines = ran.err.splitlines()
    assert [line.partition(": ")[2].partition(",")[0] for line in lines] == [
        "[1/2] stub",
        "[2/2] stub",
    ]
    assert "100.0 samples/s, done in " in lines[0]
    assert not {"\r", "\x1b"} & set(ran.out + ran.err)


def test_a_terminal_gets_the_same_lines_and_a_bar_that_goes(bench: Bench) -> None:
    seen = OnTerminal(*bench.write(TWO).words(), env={"RUNS": str(bench.ran)})
    assert seen.end() == 0
    assert "[1/2] stub, 1 device, repeat 1, bare: 100.0 samples/s" in seen.text
    assert "0/2" in seen.text
    assert "1/2" in seen.text


def test_a_study_that_is_done_runs_nothing_again(bench: Bench) -> None:
    first = bench.write(TWO).run()
    again = bench.run()
    assert (again.code, again.out, again.err) == (0, first.out, "")
    assert len(bench.started()) == 2
    assert bench.run("--force").code == 0
    assert len(bench.started()) == 4


FAILING = {
    'raise ValueError("no such model")': "exit code 1: ValueError: no such model",
    'sys.exit("stub.py: error: no GPU")': "exit code 1: stub.py: error: no GPU",
    "sys.exit(7)": "exit code 7",
    "os.kill(os.getpid(), 9)": "ended by SIGKILL",
    'warnings.warn("no cuDNN\\n(see its page)"); os.kill(os.getpid(), 9)': "ended by SIGKILL",
    'print("no room", file=sys.stderr)\nwarnings.warn("old"); os.abort()': "ended by SIGABRT: "
    "no room",
    'print("{...}", flush=True); os.kill(os.getpid(), 9)': "ended by SIGKILL: "
    "after it had printed its result",
    "sys.exit(0)": "printed no result",
    'print("done"); sys.exit(0)': "its last line is not a result: done",
    'print("[1]"); sys.exit(0)': "its result lacks something: Expected object, got array",
    'print("{}"); sys.exit(0)': "its result lacks something: "
    "Object missing required field framework",
    "batch = 64": "its result says batch 64, but 32 was asked for",
}


@pytest.mark.parametrize("body", FAILING)
def test_a_run_without_a_result_has_failed_and_says_why(body: str, bench: Bench) -> None:
    bench.framework("bad", body)
    bench.write('[options]\nbatch = 32\n[matrix]\nframework = ["bad"]\n')
    ran = bench.run()
    assert ran.code == 5
    assert FAILING[body] in ran.err
    assert ran.err.count("\n") == 1
    assert states(bench) == [("failed", FAILING[body])]


def test_a_framework_may_have_a_last_word_after_the_result(bench: Bench) -> None:
    bench.framework("wordy", 'import atexit; atexit.register(print, "[Thread] Exited.")')
    assert bench.write(ONE.replace("stub", "wordy")).run().code == 0
    assert [state for state, _ in states(bench)] == ["done"]


def test_the_error_of_a_recorded_program_is_told_not_what_was_recorded(bench: Bench) -> None:
    bench.framework("bad", 'raise ValueError("no such model")')
    bench.write(f"record = true\n{ONE.replace('stub', 'bad')}").run("--backend", "host")
    assert states(bench) == [("failed", "exit code 1: ValueError: no such model")]


def test_a_recording_that_fails_says_why(bench: Bench) -> None:
    bench.write(f"record = true\n{ONE}").run("--backend", "nsys", env={"GPUTRACE_NSYS": "/gone"})
    why = "exit code 125: gputrace: /gone: cannot be run (No such file or directory)"
    assert states(bench) == [("failed", why)]


def test_what_failed_is_run_again_when_asked(bench: Bench) -> None:
    flag = bench.folder / "repaired"
    bench.framework("bad", f"if not os.path.exists({str(flag)!r}): sys.exit(1)")
    bench.write(ONE.replace('["stub"]', '["stub", "bad"]'))
    assert [bench.run().code, bench.run().code, len(bench.started())] == [5, 5, 2]
    flag.touch()
    assert bench.run("--retry").code == 0
    assert len(bench.started()) == 3


def test_a_loss_that_is_no_number_is_unknown(bench: Bench) -> None:
    line = '"model": "", "gpus": 1, "batch": 1, "steps": 1, "samples_per_second": 1'
    body = f'print(\'{{"framework": "", {line}, "loss_last": NaN}}\'); sys.exit(0)'
    bench.framework("bad", body).write(ONE.replace("stub", "bad"))
    assert bench.run().code == 0
    (run,) = bench.runs()
    assert run.result is not None
    assert run.result["loss_last"] is None


def test_a_run_that_takes_too_long_is_ended(bench: Bench) -> None:
    bench.framework("slow", "time.sleep(60)")
    bench.write(f'timeout = "0.3s"\n{ONE.replace("stub", "slow")}').run()
    assert states(bench) == [("failed", "ended after 300 ms, the study's timeout")]


def test_what_a_run_left_behind_does_not_disturb_the_next(bench: Bench) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    note = bench.folder / "left"
    body = f"import subprocess; left = {child} start_new_session=True)"
    bench.framework("leaving", f"{body}; open({str(note)!r}, 'w').write(str(left.pid))")
    assert bench.write(ONE.replace("stub", "leaving")).run().code == 0
    assert not is_running(int(note.read_text()))


def test_a_framework_that_is_not_there_is_skipped_with_one_line(bench: Bench) -> None:
    bench.framework("gone", modules=["no_such_module"])
    why = (
        "this Python lacks no_such_module; --install makes an environment, "
        "--python gone=PATH names one"
    )
    bench.write(f"repeats = 2\n{ONE.replace('stub', 'gone')}")
    ran = bench.run()
    assert (ran.code, ran.err.count("\n")) == (4, 1)
    assert f"skipped: {why}" in ran.err
    bench.write(f"{ONE.replace('stub', 'gone')}[[include]]\nframework = 'stub'\n")
    assert bench.run().code == 5
    assert states(bench) == [("skipped", why), ("done", "")]


def test_what_is_missing_here_may_be_skipped_while_something_is_run(bench: Bench) -> None:
    bench.framework("gone", modules=["no_such_module"]).framework("broken", "raise SystemExit(3)")
    bench.write(ONE.replace('"stub"', '"stub", "gone"'))
    assert bench.run().code == 5
    ran = bench.run("--skip-missing", "--force")
    assert ran.code == 0
    assert "note: Skipped: gone: this Python lacks no_such_module" in " ".join(ran.out.split())
    bench.write(ONE.replace("stub", "gone"))
    assert bench.run("--skip-missing").code == 4
    bench.write(ONE.replace('"stub"', '"broken", "gone"'))
    assert bench.run("--skip-missing").code == 5


def test_what_was_skipped_is_tried_again(bench: Bench) -> None:
    bench.framework("gone", modules=["helpful"]).write(ONE.replace("stub", "gone"))
    assert bench.run().code == 4
    (bench.workloads / "helpful.py").touch()
    assert bench.run().code == 0


def test_a_module_that_is_a_mere_folder_is_none(bench: Bench) -> None:
    (bench.workloads / "torch_of_mine").mkdir()
    bench.framework("gone", modules=["torch_of_mine"]).write(ONE.replace("stub", "gone"))
    assert "this Python lacks torch_of_mine" in bench.run().err


def test_gpus_that_are_not_there_are_skipped(bench: Bench) -> None:
    bench.write('[matrix]\nframework = ["stub"]\ngpus = [1, 512]\n')
    ran = bench.run()
    assert ran.code == 5
    assert "512 GPUs, repeat 1, bare: skipped: takes 512 GPUs, and this machine has" in ran.err
    assert [state for state, _ in states(bench)] == ["done", "skipped"]


def test_a_run_sees_the_gpus_that_the_study_names(bench: Bench) -> None:
    bench.write(f"{ONE}[cards]\nvisible = [[0], [1, 0]]\n")
    # Here two, whatever else there is.
    assert bench.run(env={"CUDA_VISIBLE_DEVICES": "5,3"}).code == 0
    assert [(run["gpus"], run["visible"]) for run in bench.started()] in (
        [("1", "5"), ("2", "3,5")],
        [("1", "0"), ("2", "1,0")],
    )


def test_the_plan_is_printed_and_nothing_is_run(bench: Bench) -> None:
    ran = bench.write(TWO).run("--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "1/2  repeat 1  bare  to run  stub.py --gpus 1 --device cpu",
        "2/2  repeat 1  bare  to run  stub.py --gpus 2 --device cpu",
    ]
    assert not bench.results.exists()
    assert bench.started() == []
    bench.run("--only", "gpus=2")
    assert [line.split("  ")[3] for line in bench.run("--dry-run").out.splitlines()] == [
        "to run",
        "done",
    ]


def test_a_part_of_a_study_can_be_run_first(bench: Bench) -> None:
    only = bench.write(TWO).run("--only", "gpus=2")
    assert only.code == 0
    assert "1 run of 1 configuration is done, 1 still to be run." in only.out
    assert [line["gpus"] for line in bench.started()] == ["2"]
    assert bench.run().code == 0
    assert [line["gpus"] for line in bench.started()] == ["2", "1"]


def test_a_study_that_changes_keeps_the_runs_that_it_still_asks_for(bench: Bench) -> None:
    bench.write(f"repeats = 2\n{TWO}").run()
    bench.write(f"repeats = 1\n{ONE}gpus = [2, 3]\n").run()
    assert [line["gpus"] for line in bench.started()] == ["1", "2", "1", "2", "3"]
    assert [run.result and run.result["gpus"] for run in bench.runs()] == [2, 3]
    bench.write(f"repeats = 2\n{TWO}").run()
    assert len(bench.started()) == 5
    assert len(bench.runs()) == 4


def test_images_are_made_once_for_all_runs(bench: Bench) -> None:
    (bench.workloads / "images.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "folder = Path(sys.argv[1]); folder.mkdir(parents=True)\n"
        "(folder / 'done.json').write_text('{}')\n"
        f"with open({str(bench.folder / 'made')!r}, 'a') as f: print(*sys.argv[1:], file=f)\n"
    )
    bench.write("repeats = 2\nimages = 7\n" + ONE.replace("device", 'data = "png"\ndevice'))
    ran = bench.run()
    folder = bench.results / "images" / "png-264-7"
    assert ran.code == 0, ran.err
    assert f"making images in {folder}" in ran.err
    made = (bench.folder / "made").read_text()
    assert made == f"{folder} --count 7 --size 264 --format png --seed 0\n"
    assert [line["data"] for line in bench.started()] == [str(folder)] * 2


def test_images_that_cannot_be_made_fail_the_run(bench: Bench) -> None:
    (bench.workloads / "images.py").write_text("import no_such_module")
    bench.write(ONE.replace("device", 'data = "jpeg"\ndevice')).run()
    (state,) = states(bench)
    assert state[0] == "failed"
    assert state[1].endswith("ModuleNotFoundError: No module named 'no_such_module'")
    assert state[1].startswith("no images: exit code 1: ")


@pytest.mark.parametrize(
    ("option", "works"), [("bin/python", True), ("", True), ("bin/none", False)]
)
def test_a_python_can_be_named(option: str, works: bool, bench: Bench) -> None:
    environment = bench.folder / "environment"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nNAMED=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    bench.framework("checked", 'assert os.environ["NAMED"]').write(ONE.replace("stub", "checked"))
    ran = bench.run("--python", f"checked={environment / option}")
    assert ran.code == (0 if works else 4)
    assert works or f"--python checked={environment / option}: no such program" in ran.err


@pytest.mark.parametrize("form", ["text", "markdown", "csv"])
def test_results_are_printed_in_any_form(form: str, bench: Bench) -> None:
    ran = bench.write(TWO).run("--format", form)
    told = {"text": "  2 devices ", "markdown": "| 2 devices |", "csv": "cpu,stub,2,200.0,"}[form]
    assert any(line.startswith(told) for line in ran.out.splitlines())


def test_a_page_of_the_results_lies_beside_them(bench: Bench) -> None:
    ran = bench.write(TWO).run()
    page = bench.results / "results.html"
    assert ran.out.endswith(f"page: {page}\n")
    assert "Samples a second" in page.read_text(encoding="utf-8")


def test_results_are_shown_also_where_no_page_can_be_written(bench: Bench) -> None:
    bench.write(ONE).run()
    page = bench.results / "results.html"
    # In the way of the file that becomes the page.
    page.with_name(f".{page.name}.{os.getpid()}.tmp").mkdir()
    shown = bench.run("--show")
    assert shown.code == 0
    assert "100" in shown.out
    assert "page: " not in shown.out
    problem = f"{page}: cannot be written (Is a directory); name another with -o"
    assert shown.err == f"gputrace: {problem}; the results page was not written\n"


def test_a_disk_that_is_full_is_told_as_such(bench: Bench) -> None:
    words = [sys.executable, "-m", "gputrace", *bench.write(ONE).words()]
    small = ["bash", "-c", 'ulimit -f 12; exec "$@"', "bash", *words]  # KiB of a file
    env = command.environment(command.NO_BYTECODE)
    ran = subprocess.run(small, env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith(f"gputrace: {bench.results / 'results.sqlite'}: cannot be written")
    assert ran.stderr.endswith("; make room, or name another folder with -o\n")


def test_results_of_another_study_are_kept_and_that_is_told(bench: Bench) -> None:
    bench.write(TWO).run()
    other = bench.study.with_name("other.toml")
    other.write_text(ONE)
    first = bench.study
    bench.study = other
    told = bench.run("-o", str(bench.results)).err
    assert f"{bench.results} belongs to {first}; " in told
    bench.study = first
    assert "[" not in bench.run().err


def test_results_that_are_none_are_refused(bench: Bench) -> None:
    bench.write(ONE)
    (bench.results / "underway").mkdir(parents=True)
    database = bench.results / "results.sqlite"
    database.write_bytes(b"not a database" * 100)
    assert_refused(bench.run(), 3, str(database), "cannot be used as results")
    database.unlink()
    with closing(sqlite3.connect(database)) as other:
        other.execute("CREATE TABLE others (a)")
    assert_refused(bench.run(), 3, str(database), "holds no results of `gputrace bench`")
    database.unlink()
    bench.run()
    with closing(sqlite3.connect(database)) as newer:
        newer.execute("PRAGMA user_version = 99")
    assert_refused(bench.run(), 3, str(database), "tables of version 99, this gputrace knows 2")
    with closing(sqlite3.connect(database)) as older:
        older.execute("PRAGMA user_version = 1")
    assert_refused(bench.run(), 3, str(database), "tables of version 1, this gputrace knows 2")


def test_results_that_are_damaged_are_refused(bench: Bench) -> None:
    bench.write(ONE).run()
    database = bench.results / "results.sqlite"
    content = database.read_bytes()
    for length, filled in ((4096, len(content) - 4096), (6000, 0)):
        database.write_bytes(content[:length] + bytes(filled))
        assert_refused(bench.run(), 3, str(database), "cannot be used as results", "move it away")


def test_a_folder_of_something_else_is_left_alone(bench: Bench) -> None:
    bench.results.mkdir()
    (bench.results / "thesis.txt").touch()
    assert_refused(bench.write(ONE).run(), 2, "holds other files; name another folder with -o")
    assert [path.name for path in bench.results.iterdir()] == ["thesis.txt"]
    (bench.results / "thesis.txt").unlink()
    bench.results.rmdir()
    bench.results.touch()
    assert_refused(bench.run(), 2, "not a folder")


def test_the_results_have_a_folder_of_the_studys_name(bench: Bench) -> None:
    bench.write(ONE)
    environment = command.environment({"RUNS": str(bench.ran)})
    words = [sys.executable, "-m", "gputrace", "bench", str(bench.study)]
    subprocess.run(words, cwd=bench.folder, env=environment, check=True, capture_output=True)
    assert (bench.folder / "study.bench" / "results.sqlite").exists()
