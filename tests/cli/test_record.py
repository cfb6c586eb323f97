"""`gputrace record`: the program runs as if nobody watched, and leaves a trace."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.backend import has_driver
from gputrace.collectors.processes import orphans_of
from gputrace.collectors.session import HOOKS, keep_hooks
from tests.helpers import command
from tests.helpers.lookups import rows

MARKED: Final = """
import time, gputrace
for _ in range(5):
    with gputrace.annotate("forward"):
        time.sleep(0.002)
    gputrace.step()
"""


RUN: Final = "from gputrace.cli import end, run; end(run({}))"


def record(output: Path, *words: str, env: dict[str, str] | None = None) -> command.Ran:
    return command.gputrace("record", "-o", output, "--no-nvml", *words, env=env)


@pytest.fixture
def cut_short(tmp_path: Path) -> Path:
    """The folder of a recording of five steps of which no trace was made."""
    folder = tmp_path / "t.sqlite.spool"
    kill = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)\n"
    record(tmp_path / "t.sqlite", "--", sys.executable, "-c", kill + MARKED)
    while orphans_of(folder):
        time.sleep(0.02)
    return folder


HOOKED: Final = "import sys; print('_gputrace_hooks.imports' in sys.modules, sys.path[1:3])"


@pytest.mark.parametrize("given", ["", "/mine"])
def test_env_may_set_the_path_of_modules_and_the_hooks_stay(tmp_path: Path, given: str) -> None:
    env = ("env", "A=1", f"PYTHONPATH={given}", sys.executable, "-c", HOOKED)
    assert f"True ['{HOOKS}', '{given}" in record(tmp_path / "t.sqlite", "--", *env).out


def test_other_commands_are_run_as_they_are() -> None:
    for words in (
        ("echo", "PYTHONPATH=x"),
        ("env", "A=1", "echo", "PYTHONPATH=x"),
        ("env", "-u", "PYTHONPATH", "x"),
    ):
        assert keep_hooks(words) == words


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_programs(tmp_path: Path, code: int) -> None:
    ran = record(tmp_path / "t.sqlite", "--", "sh", "-c", f"exit {code}")
    assert ran.code == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_that_ends_the_program_ends_the_recorder_too(
    tmp_path: Path, number: signal.Signals
) -> None:
    ran = record(tmp_path / "t.sqlite", "--", "sh", "-c", f"kill -{int(number)} $$")
    assert ran.code == -number


def test_the_programs_output_is_all_of_stdout(tmp_path: Path) -> None:
    ran = record(tmp_path / "t.sqlite", "--", "sh", "-c", "printf out; printf err >&2")
    assert ran.out == "out"
    assert ran.err.startswith("err\n")
    assert all(line.startswith("gputrace: ") for line in ran.err.splitlines()[1:])


@pytest.mark.parametrize("said", ["", "a", "a\n"])
def test_what_the_recorder_says_begins_a_line_of_a_file(tmp_path: Path, said: str) -> None:
    words = [sys.executable, "-m", "gputrace", "record", "-o", str(tmp_path / "t.sqlite")]
    with (tmp_path / "log").open("w+") as log:
        program = ["--", "sh", "-c", f"printf '{said}' >&2"]
        subprocess.run([*words, *program], stderr=log, env=command.environment(), check=True)
        log.seek(0)
        lines = log.read().splitlines()
    assert lines[0].startswith("a" if said else "gputrace: ")
    assert all(line.startswith("gputrace: ") for line in lines[bool(said) :])
    assert lines[: bool(said)] == ["a"] * bool(said)


def test_a_pipe_that_nobody_reads_ends_the_program_as_it_would(tmp_path: Path) -> None:
    ran = record(tmp_path / "t.sqlite", "--", "bash", "-c", "(yes; echo $? >&2) | head -n 1")
    assert (ran.out, ran.err.splitlines()[0]) == ("y\n", str(128 + signal.SIGPIPE))


def test_standard_input_is_the_programs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gputrace", "record", "-o", str(tmp_path / "t.sqlite"), "cat"]
    ran = subprocess.run(
        words, input=b"hello", capture_output=True, env=command.environment(), check=False
    )
    assert (ran.returncode, ran.stdout) == (0, b"hello")


def test_options_after_the_command_are_the_programs(tmp_path: Path) -> None:
    ran = record(tmp_path / "t.sqlite", "echo", "-o", "x", "--force")
    assert ran.out == "-o x --force\n"


def test_a_program_that_is_not_there_is_127_and_leaves_nothing(tmp_path: Path) -> None:
    ran = record(tmp_path / "t.sqlite", "--", "no-such-program")
    assert (ran.code, ran.err.count("\n")) == (127, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_cannot_be_run_is_126(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no program")
    ran = record(tmp_path / "t.sqlite", "--", str(program))
    assert (ran.code, ran.err.count("\n")) == (126, 1)


def test_without_a_command_is_a_failure_of_recording() -> None:
    ran = command.gputrace("record")
    assert (ran.code, ran.err.count("\n")) == (125, 1)


def test_an_output_that_exists_is_kept_unless_forced(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    output.write_text("mine")
    ran = record(output, "--", "true")
    assert (ran.code, output.read_text()) == (125, "mine")
    assert "--force" in ran.err
    assert command.gputrace("record", "--force", "-o", output, "--", "true").code == 0
    assert output.read_bytes().startswith(b"SQLite format 3")


def test_without_o_a_second_trace_is_numbered(tmp_path: Path) -> None:
    def run(*words: str) -> list[str]:
        whole = [sys.executable, "-m", "gputrace", "record", "--no-nvml", *words, "--", "true"]
        ran = subprocess.run(
            whole, cwd=tmp_path, env=command.environment(), capture_output=True, check=True
        )
        return ran.stderr.decode().splitlines()

    assert "records into" not in run()[0]
    first = (tmp_path / "trace.sqlite").read_bytes()
    assert run()[0] == "gputrace: trace.sqlite exists: records into trace-2.sqlite"
    assert any(line.startswith("gputrace: trace-3.sqlite: ") for line in run())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("trace-2.sqlite", "trace-3.sqlite", "trace.sqlite")
    ]
    assert (tmp_path / "trace.sqlite").read_bytes() == first
    assert "records into" not in run("--force")[0]


def test_signals_go_on_to_the_program(tmp_path: Path) -> None:
    program = "import signal,sys,time\n"
    program += "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\nprint('ready', flush=True)\n"
    program += "time.sleep(120)"
    words = [sys.executable, "-m", "gputrace", "record", "-o", str(tmp_path / "t.sqlite"), "--"]
    with subprocess.Popen(
        [*words, sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=command.environment(),
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGUSR1)
        assert running.wait(60) == 9


def test_a_signal_from_outside_the_container_goes_on_to_the_program(tmp_path: Path) -> None:
    within = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    program = "import signal,sys,time\n"
    program += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nprint('ready', flush=True)\n"
    program += "time.sleep(120)"
    words = [sys.executable, "-m", "gputrace", "record", "-o", str(tmp_path / "t.sqlite"), "--"]
    with subprocess.Popen(
        [*within, *words, sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=command.environment(),
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        os.kill(int(children.read_text()), signal.SIGTERM)
        assert running.wait(60) == 9


def test_steps_and_names_that_the_program_marks_are_in_the_trace(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    ran = record(output, "--", sys.executable, "-c", MARKED)
    assert ran.code == 0
    assert "5 steps" in ran.err
    assert rows(output, "SELECT count(*) FROM GPUTRACE_STEP") == [(5,)]
    found = rows(
        output,
        "SELECT value, count(*), min(end - start) > 2000000 FROM GPUTRACE_HOST_RANGE "
        "JOIN StringIds ON id = nameId GROUP BY value",
    )
    assert found == [("forward", 5, 1)]
    assert not (tmp_path / "t.sqlite.spool").exists()


def test_the_first_step_begins_with_the_process(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    child = "import os, time\nfrom gputrace import step\nchild = os.fork() == 0\ntime.sleep(0.05)\n"
    child += "for _ in range(3): step()\nif not child: os.wait()"
    assert record(output, "--", sys.executable, "-c", child).code == 0
    sql = "SELECT step, count(*), min(end - start) > 50000000 FROM GPUTRACE_STEP GROUP BY step"
    assert rows(output, sql) == [(0, 2, 1), (1, 2, 0), (2, 2, 0)]


def test_a_closed_stream_is_no_obstacle(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    words = [sys.executable, "-m", "gputrace", "record", "-o", str(output), "--no-nvml", "--"]
    # Standard error of the program is closed, too.
    program = ["sh", "-c", "(echo >&2) 2>/dev/null; test -e /proc/self/fd/2 || exit 5"]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"]
    ran = subprocess.run([*closed, *words, *program], env=command.environment(), check=False)
    assert ran.returncode == 5
    assert [path.name for path in tmp_path.iterdir()] == ["t.sqlite"]


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    ran = record(tmp_path / f"{'x' * 300}.sqlite", "--", "true")
    command.assert_refused(ran, 125, "File name too long")


def test_a_program_that_clears_its_environment_is_recorded(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    ran = record(output, "--", sys.executable, "-c", "import os; os.environ.clear()" + MARKED)
    assert "5 steps" in ran.err


def test_a_script_without_an_interpreter_is_the_shells(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('echo "$0 $1"; exit 3')
    script.chmod(0o755)
    ran = record(tmp_path / "t.sqlite", "--", str(script), "word")
    assert (ran.code, ran.out) == (3, f"{script} word\n")


@pytest.mark.parametrize("option", ["--delay", "--duration"])
@pytest.mark.parametrize(("time", "words"), [("-5s", "negative"), ("soon", "not a time")])
def test_a_time_that_makes_no_sense_is_refused(
    tmp_path: Path, option: str, time: str, words: str
) -> None:
    ran = record(tmp_path / "t.sqlite", option, time, "--", "true")
    command.assert_refused(ran, 125, words)
    assert list(tmp_path.iterdir()) == []


def test_who_interrupts_the_making_of_the_trace_is_told_where_the_recording_is(
    tmp_path: Path,
) -> None:
    stop = "import gputrace.collectors.finalize as m, os, signal\n"
    stop += "m.write_session = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
    words = ["record", "-o", str(tmp_path / "t.sqlite"), "--no-nvml", "--", "sh", "-c", "exit 7"]
    ran = command.python("-c", stop + RUN.format(words))
    command.assert_refused(ran, 7, f"gputrace recover {tmp_path / 't.sqlite.spool'} -o FILE")
    assert [path.name for path in tmp_path.iterdir()] == ["t.sqlite.spool"]


def test_analyze_says_what_a_trace_without_a_gpu_lacks(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    record(output, "--backend", "host", "--", "true")
    ran = command.gputrace("analyze", output)
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert "no GPU activity" in ran.err


def test_files_that_are_all_empty_are_no_failure_of_the_recording(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    empty = ': > "$GPUTRACE_DIR/1.host"'
    words = ("--backend", "host", "--no-nvml", "-o", output, "--", "sh", "-c", empty)
    ran = command.gputrace("record", *words)
    assert ran.code == 0, ran.err
    assert "1.host: empty" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["t.sqlite"]


def test_what_the_host_s_backend_cannot_heed_is_said(tmp_path: Path) -> None:
    words = ("record", "--backend", "host", "--no-nvml", "-o", tmp_path / "t.sqlite")
    options = ("--steps", "2:4", "--delay", "1s", "--duration", "2s")
    ran = command.gputrace(*words, *options, "--", "true")
    assert ran.code == 0
    assert "gputrace: --steps, --delay, --duration: ignored: " in ran.err
    assert "ignored" not in command.gputrace(*words, "--force", "--", "true").err


@pytest.mark.parametrize(
    "given",
    [{"PMIX_RANK": "3", "MPI_LOCALRANKID": "1"}, {"PMI_RANK": "3", "PMI_LOCAL_RANK": "1"}],
)
def test_ranks_are_those_of_whichever_mpi_it_is(given: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    words = ("--backend", "host", "--no-nvml", "-o", output, "--", sys.executable, "-c", MARKED)
    ran = command.gputrace("record", *words, env=given)
    assert ran.code == 0, ran.err
    with closing(sqlite3.connect(output)) as trace:
        found = trace.execute("SELECT rank, localRank FROM GPUTRACE_PROCESS").fetchall()
    assert found == [(3, 1)]


def test_a_recording_cut_short_can_be_recovered(tmp_path: Path) -> None:
    output, folder = tmp_path / "t.sqlite", tmp_path / "t.sqlite.spool"
    program = MARKED + "print('ready', flush=True)\ntime.sleep(120)"
    words = [sys.executable, "-m", "gputrace", "record", "-o", str(output), "--"]
    with subprocess.Popen(
        [*words, sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=command.environment(),
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        time.sleep(1.5)
        os.killpg(running.pid, signal.SIGKILL)
    assert folder.is_dir()
    ran = command.gputrace("recover", folder)
    assert ran.code == 0
    assert not folder.exists()
    assert rows(output, "SELECT count(*) FROM GPUTRACE_STEP")[0][0] in (4, 5)


def test_a_folder_that_is_no_recording_is_not_recovered_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "file").write_text("mine")
    ran = command.gputrace("recover", folder, "-o", tmp_path / "t.sqlite")
    command.assert_refused(ran, 3, str(folder), "not the NAME.spool of a recording")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "file"]


def test_a_recording_is_recovered_from_within_its_folder(cut_short: Path) -> None:
    ran = command.python(
        "-c", f"import os; os.chdir({str(cut_short)!r}); {RUN.format(['recover', '.'])}"
    )
    assert ran.code == 0, ran.err
    assert "t.sqlite: 0 kernels, 5 steps, processes: 1\n" in ran.err
    assert rows(cut_short.with_suffix(""), "SELECT count(*) FROM GPUTRACE_STEP") == [(5,)]


def test_a_trace_is_not_recovered_into_what_is_removed(cut_short: Path) -> None:
    ran = command.gputrace("recover", cut_short, "-o", cut_short / "t.sqlite")
    command.assert_refused(ran, 2, "lies in the folder to recover")
    assert cut_short.is_dir()


@pytest.mark.parametrize("how", ["rm -r {}", "rm {}/*", "mv {} elsewhere"])
@pytest.mark.parametrize("options", [(), ("--keep", "2s")])
def test_a_recording_that_its_program_removes_is_not_called_safe(
    tmp_path: Path, how: str, options: tuple[str, ...]
) -> None:
    output, folder = tmp_path / "t.sqlite", tmp_path / "t.sqlite.spool"
    program = (
        "sh",
        "-c",
        f"cd {tmp_path}; {how.format(folder.name)}; sleep {5.5 * len(options) / 2}",
    )
    ran = command.gputrace("record", "--backend", "host", *options, "-o", output, "--", *program)
    assert ran.code == 125
    assert "safe" not in ran.err
    assert ran.err.splitlines()[-1].startswith(
        f"gputrace: what was recorded is no longer in {folder}"
    )


def test_a_program_that_goes_on_without_its_recorder_is_not_recovered_yet(tmp_path: Path) -> None:
    output, folder = tmp_path / "t.sqlite", tmp_path / "t.sqlite.spool"
    program = MARKED + "time.sleep(0.3); gputrace.step(); print('ready', flush=True); input()"
    words = [sys.executable, "-m", "gputrace", "record", "-o", str(output), "--"]
    with subprocess.Popen(
        [*words, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=command.environment(),
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.kill()
        running.wait()
        ran = command.gputrace("recover", folder)
        command.assert_refused(ran, 3, "still recording", "--keep")
        assert command.gputrace("recover", folder, "--keep").code == 0
        assert folder.is_dir()
        running.stdin.close()
        while orphans_of(folder):
            time.sleep(0.02)
    assert command.gputrace("recover", folder, "--force").code == 0
    assert not folder.exists()


def test_another_recording_under_way_is_not_said_to_be_left(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    inner = [sys.executable, "-m", "gputrace", "record", "-o", str(output), "--", "true"]
    ran = record(output, "--", *inner)
    assert ran.code == 125
    assert "another recording is under way; name another with -o" in ran.err


def test_a_disk_too_full_for_the_trace_keeps_what_was_recorded(tmp_path: Path) -> None:
    output, folder = tmp_path / "t.sqlite", tmp_path / "t.sqlite.spool"
    limited = ["sh", "-c", 'ulimit -f 16; exec "$@"', "sh", sys.executable, "-m", "gputrace"]
    ran = subprocess.run(
        [*limited, "record", "-o", output, "--no-nvml", "--", sys.executable, "-c", MARKED],
        env=command.environment(command.NO_BYTECODE),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (125, 2)
    assert ran.stderr.startswith(f"\ngputrace: {output}: cannot be written (")
    assert f"gputrace recover {folder} -o FILE" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert command.gputrace("recover", folder).code == 0
    assert rows(output, "SELECT count(*) FROM GPUTRACE_STEP") == [(5,)]


def test_what_cannot_be_read_is_told_and_kept(tmp_path: Path) -> None:
    output, folder = tmp_path / "t.sqlite", tmp_path / "t.sqlite.spool"
    spoil = "import os; open(os.path.join(os.environ['GPUTRACE_DIR'], 'h.9.host'), 'w').write('x')"
    ran = record(output, "--", sys.executable, "-c", MARKED + spoil)
    assert ran.code == 0
    assert "gputrace: h.9.host: not a file of gputrace's hooks\n" in ran.err
    assert f"gputrace: {folder} is kept, for what could not be read\n" in ran.err
    assert (folder / "h.9.host").read_text() == "x"
    assert rows(output, "SELECT reason FROM GPUTRACE_LOSS") == [
        ("h.9.host: not a file of gputrace's hooks",)
    ]
    ran = command.gputrace("recover", "--force", folder)
    assert (ran.code, ran.out) == (0, "")
    assert "gputrace: h.9.host: not a file of gputrace's hooks\n" in ran.err


def test_a_file_that_is_empty_is_told_and_not_kept(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    spoil = "import os; open(os.path.join(os.environ['GPUTRACE_DIR'], 'h.9.host'), 'w')"
    ran = record(output, "--", sys.executable, "-c", MARKED + spoil)
    assert "gputrace: h.9.host: empty: " in ran.err
    assert not (tmp_path / "t.sqlite.spool").exists()


def test_nothing_of_the_environment_or_of_secret_options_is_in_the_trace(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    words = ["--", sys.executable, "-c", MARKED, "--api-key", "planted1", "--token=planted2"]
    record(output, *words, env={"WANDB_API_KEY": "planted3", "PASSWORD": "planted4"})
    data = output.read_bytes()
    assert [n for n in range(1, 5) if f"planted{n}".encode() in data] == []


def test_the_trace_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    output = tmp_path / "t.sqlite"
    record(output, "--", "true")
    assert output.stat().st_mode & 0o777 == 0o600


def test_the_command_offers_every_backend() -> None:
    from gputrace.cli.options import OursOrPlugins
    from gputrace.cli.record import command as record_command
    from gputrace.collectors.backends import BACKENDS

    option = next(p for p in record_command.params if p.name == "backend")
    assert isinstance(option.type, OursOrPlugins)
    assert list(option.type.choices) == ["auto", *BACKENDS]


@pytest.mark.skipif(has_driver(), reason="the GPUs of this machine can be sampled")
def test_it_says_so_where_the_gpus_cannot_be_sampled(tmp_path: Path) -> None:
    script = "import sys; from gputrace import cli; from gputrace.collectors import session\n"
    script += "session.has_driver = lambda: True\nsys.exit(cli.run(sys.argv[1:]))"
    words = ["record", "--backend", "host", "-o", str(tmp_path / "t.sqlite"), "--", "true"]
    ran = command.python("-c", script, *words)
    assert ran.code == 0
    assert len([line for line in ran.err.splitlines() if "no GPU sampling: " in line]) == 1


@pytest.mark.parametrize("name", ["numpy", "select"])
def test_a_module_of_the_program_reaches_it_and_never_the_recorder(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text("ours = True")
    program = f"import {name}; print({name}.ours)"
    paths = os.pathsep.join([str(tmp_path), str(command.ROOT)])
    ran = command.gputrace(
        *("record", "-o", str(tmp_path / "t.sqlite"), "--no-nvml", "--", sys.executable, "-c"),
        program,
        env={"PYTHONPATH": paths},
    )
    assert (ran.code, ran.out) == (0, "True\n")
    assert "Traceback" not in ran.err


def test_a_program_imports_the_sitecustomize_that_it_would_have_without(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    program = tmp_path / "program.py"
    program.write_text("import sitecustomize; print(sitecustomize.__file__)")
    recorded = ["record", "-o", str(tmp_path / "t.sqlite"), "--no-nvml", "--", sys.executable]
    ran, without = command.gputrace(*recorded, program), command.python(str(program))
    assert (ran.code, ran.out) == (0, without.out)
