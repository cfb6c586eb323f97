"""The command ``gputrace``: its words, its exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import pytest

import gputrace
from gputrace.cli import COMMANDS, GROUPS, cli
from gputrace.cli.options import Grouped
from tests.helpers import command
from tests.helpers.command import assert_refused
from tests.helpers.exports import Export

DONE: Final = 0
USAGE: Final = 2


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """100 ns from 1000 on, with gaps of 5, 15 and 10 ns in them."""
    export = Export().kernel(1000, 1010).kernel(1015, 1030).kernel(1045, 1050).kernel(1060, 1100)
    return export.write(tmp_path / "trace.sqlite")


def analyzed(*arguments: str | Path) -> dict[str, Any]:
    """The JSON of an analysis, which leaves nothing on stderr."""
    ran = command.gputrace("analyze", "--json", *arguments)
    assert (ran.code, ran.err) == (DONE, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_the_commands(flag: str) -> None:
    ran = command.gputrace(flag)
    assert (ran.code, ran.err) == (DONE, "")
    assert ran.out.startswith("Usage: gputrace ")
    assert {"analyze", "demo"} <= {line.split()[0] for line in ran.out.splitlines() if line.split()}


def test_help_has_the_commands_in_groups_and_no_text_is_cut() -> None:
    shown = command.gputrace("--help").out
    titles = [line[:-1] for line in shown.splitlines() if line.endswith(":")]
    assert titles == ["Options", *GROUPS]
    assert "..." not in shown.partition("\n")[2]


@pytest.mark.parametrize("name", ["record", "analyze", "bench"])
def test_help_lists_each_option_once_the_usual_ones_first(name: str) -> None:
    shown = command.gputrace(name, "--help").out
    parsed = cli.get_command(click.Context(cli), name)
    assert isinstance(parsed, Grouped)
    for option in parsed.params:
        if isinstance(option, click.Option) and not option.hidden:
            rows = re.findall(rf"^  (?:-\w, )?{option.opts[-1]}\b(?!-)", shown, re.M)
            assert len(rows) == 1, option.name
    titles = re.findall(r"^(\S.*):$", shown, re.M)
    assert titles[0] == "Options"
    assert len(titles) > 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_ends_with_examples_that_it_takes(name: str) -> None:
    examples = COMMANDS[name][1:]
    shown = command.gputrace(name, "--help").out
    assert shown.endswith("".join(f"\n    {example}" for example in examples) + "\n")
    parsed = cli.get_command(click.Context(cli), name)
    assert parsed is not None
    for example in examples:
        assert len(example) <= 76
        words = shlex.split(example.partition(f"gputrace {name}")[2].removeprefix(")"))
        if not example.startswith("NSYS"):
            parsed.make_context(name, words, parent=click.Context(cli, **cli.context_settings))


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("analyse", "did you mean `analyze`?"),
        ("rekord", "did you mean `record`?"),
        ("comparison", "did you mean `compare`?"),
        ("stats trace.sqlite", "write: gputrace analyze trace.sqlite"),
        ("profile -- python 'my train.py'", "write: gputrace record -- python 'my train.py'"),
        ("diff a.sqlite b.sqlite", "write: gputrace compare a.sqlite b.sqlite"),
        ("help check", "write: gputrace check --help"),
        ("train.py --epochs 3", "to record it: gputrace record -- python train.py --epochs 3"),
        ("cat train.py", "to record it: gputrace record -- cat train.py"),
    ],
)
def test_another_word_for_a_command_gets_a_suggestion(typed: str, hint: str) -> None:
    words = shlex.split(typed)
    ran = command.gputrace(*words)
    assert ran.code == USAGE
    assert ran.err == f"gputrace: no such command: {words[0]}; {hint} (see gputrace --help)\n"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("analyze t --gap 3", "no such option: --gap; did you mean --gaps?"),
        ("analyze t --slow", "no such option: --slow"),
        ("analyze t --markdown", "no such option: --markdown; write --format markdown"),
        (
            "compare a b --html",
            "no such option: --html; `gputrace report` writes a page (--compare",
        ),
        ("check t --max-wait 1%", "no such option: --max-wait; did you mean --max-data-wait?"),
        ("check a b", "--baseline names the run to compare with"),
    ],
)
def test_another_word_for_an_option_gets_a_suggestion(typed: str, hint: str) -> None:
    ran = command.gputrace(*shlex.split(typed))
    assert ran.code == USAGE
    assert hint in ran.err


def test_a_file_in_place_of_a_command_is_to_be_analyzed(tmp_path: Path) -> None:
    trace = tmp_path / "my trace.sqlite"
    trace.touch()
    assert f"gputrace analyze '{trace}'" in command.gputrace(trace).err


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_a_command_names_its_options(flag: str) -> None:
    ran = command.gputrace("analyze", flag)
    assert (ran.code, ran.err) == (DONE, "")
    for option in ("--format", "--json", "--time", "--gaps"):
        assert option in ran.out


def test_the_version_is_that_of_the_package() -> None:
    assert command.gputrace("--version").out == f"gputrace, version {gputrace.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["analyze"],
        ["analyze", "--frobnicate", "TRACE"],
        ["analyze", "--format", "xml", "TRACE"],
        ["analyze", "--gaps", "-1", "TRACE"],
        ["analyze", "--gaps", "many", "TRACE"],
        ["analyze", "--time", "12", "TRACE"],
        ["analyze", "--time", "14s:12s", "TRACE"],
        ["analyze", "--time", "12s:12s", "TRACE"],
        ["analyze", "--time", "soon:later", "TRACE"],
        ["analyze", "--time", "", "TRACE"],
        ["analyze", "--time", "0s:900ns", "TRACE"],
        ["analyze", "--time", "1100ns:", "TRACE"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str], small: Path) -> None:
    ran = command.gputrace(*(str(small) if word == "TRACE" else word for word in arguments))
    assert (ran.code, ran.out) == (USAGE, "")
    assert "Traceback" not in ran.err
    if arguments:
        assert ran.err.startswith("gputrace: ")
        assert ran.err.count("\n") == 1


def test_a_window_with_nothing_in_it_says_where_there_is_something(h100: Path) -> None:
    ran = command.gputrace("analyze", "--time", "0s:1s", h100)
    assert_refused(ran, USAGE, str(h100), "155.358s to 156.327s")


def test_a_window_that_cannot_be_read_says_how_to_write_one(h100: Path) -> None:
    assert_refused(command.gputrace("analyze", "--time", "12", h100), USAGE, "12s:14s")


def test_a_window_narrows_the_span(small: Path) -> None:
    assert analyzed("--time", "1020ns:1060ns", small)["span_ns"] == 40
    assert analyzed("--time", "1060ns:", small)["span_ns"] == 40


def test_as_many_gaps_are_listed_as_asked_for(small: Path) -> None:
    of = {count: analyzed("--gaps", count, small)["gaps"] for count in ("0", "2", "99")}
    assert [gaps["count"] for gaps in of.values()] == [3, 3, 3]
    assert [gaps["total_ns"] for gaps in of.values()] == [30, 30, 30]
    lengths = [[gap["end_ns"] - gap["start_ns"] for gap in of[n]["largest"]] for n in of]
    assert lengths == [[], [15, 10], [15, 10, 5]]


def test_no_gaps_asked_for_leave_no_table_of_them(small: Path) -> None:
    text = command.gputrace("analyze", "--gaps", "0", small).out
    assert "compute" in text
    assert "cause" not in text


@pytest.mark.parametrize(("form", "suffix"), [("text", "txt"), ("markdown", "md"), ("csv", "csv")])
def test_a_report_looks_as_it_did(
    form: str, suffix: str, h100: Path, golden: Callable[[str, str], None]
) -> None:
    ran = command.gputrace("analyze", "--format", form, h100)
    assert (ran.code, ran.err) == (DONE, "")
    golden(f"nsys-ai-h100_2gpu_1s.{suffix}", ran.out)


def test_text_is_the_format_when_none_is_named(small: Path) -> None:
    plain = command.gputrace("analyze", small)
    assert plain == command.gputrace("analyze", "--format", "text", small)


def test_json_has_a_short_form(small: Path) -> None:
    ran = command.gputrace("analyze", "--format", "json", small)
    assert json.loads(ran.out) == analyzed(small)


def test_the_verdict_comes_first(h100: Path) -> None:
    ran = command.gputrace("analyze", h100)
    assert ran.out.startswith("Host-to-device copies not hidden by other work take 95%")
    assert "  What to do: " in ran.out


def test_without_a_terminal_there_is_no_colour_and_no_progress(small: Path) -> None:
    ran = command.gputrace("analyze", small, env={"TERM": "xterm", "FORCE_COLOR": "1"})
    assert not {"\x1b", "\r"} & set(ran.out + ran.err)


def at_terminal(path: Path, **variables: str) -> str:
    """Return what the command writes to a terminal, without the progress on stderr."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "gputrace", "analyze", str(path)],
        stdout=slave,
        stderr=subprocess.DEVNULL,
        env=command.environment({"TERM": "xterm"} | variables),
    )
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 4096):
            written += chunk
    except OSError:  # Linux's way to tell that the other side is closed
        pass
    os.close(master)
    assert running.wait() == DONE
    return written.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colours(h100: Path) -> None:
    assert "\x1b[1;31m" in at_terminal(h100)  # a finding of high severity


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_gets_no_colours_if_it_wants_none(
    variables: dict[str, str], small: Path
) -> None:
    assert at_terminal(small, **variables) == command.gputrace("analyze", small).out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_an_output_that_lacks_a_character_gets_another(encoding: str, tmp_path: Path) -> None:
    path = Export().kernel(0, 10).write(tmp_path / "trace.sqlite")
    ran = subprocess.run(
        [sys.executable, "-m", "gputrace", "analyze", str(path)],
        capture_output=True,
        env=command.environment({"PYTHONIOENCODING": f"{encoding}:strict"}),
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (DONE, b"")
    # click itself writes UTF-8 to a terminal that says ASCII.
    text = ran.stdout.decode("utf-8" if encoding == "ascii" else encoding)
    assert "host to device" in text


def test_a_path_that_is_not_utf_8_leaves_the_json_valid(tmp_path: Path) -> None:
    path = Export().kernel(0, 10).write(tmp_path / os.fsdecode(b"\xff.sqlite"))
    assert analyzed(path)["span_ns"] == 10


@pytest.mark.parametrize("arguments", [["analyze"], ["analyze", "--json"], ["--help"]])
def test_a_reader_that_has_had_enough_is_no_error(arguments: list[str], saxpy: Path) -> None:
    """Close stdout as in ``gputrace analyze … | head -1``, once head has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    trace = [str(saxpy)] if "analyze" in arguments else []
    ran = subprocess.run(
        [sys.executable, "-m", "gputrace", *arguments, *trace],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=command.environment(),
        check=False,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (DONE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_told(saxpy: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "gputrace", "analyze", str(saxpy)],
            stdout=full,
            stderr=subprocess.PIPE,
            env=command.environment(),
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (4, b"gputrace: the output: No space left on device\n")


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="there is no /sys here")
def test_an_output_that_cannot_be_written_is_named_and_what_to_do(saxpy: Path) -> None:
    ran = command.gputrace("report", saxpy, "-o", "/sys/kernel/page.html")
    assert (ran.code, ran.out) == (4, "")
    assert ran.err.startswith("gputrace: /sys/kernel/page.html: cannot be written (")
    assert ran.err.endswith("; name another with -o\n")


CALLED_IN_A_PROCESS: Final = {
    "a test, which looks at what was printed": (
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "    try: main()\n"
        "    except SystemExit as end: code = end.code\n"
        "print(code, len(shown.getvalue()) > 500, 'goes on')"
    ),
    "a profiler": (
        "import cProfile\n"
        "with cProfile.Profile() as profile:\n"
        "    try: main()\n"
        "    except SystemExit as end: code = end.code\n"
        "print(code, len(profile.getstats()) > 500, 'goes on')"
    ),
}


@pytest.mark.parametrize("caller", CALLED_IN_A_PROCESS.values(), ids=CALLED_IN_A_PROCESS)
def test_a_process_that_calls_the_command_goes_on_after_it(caller: str, saxpy: Path) -> None:
    program = f"from gputrace.__main__ import main\n{caller}"
    ran = command.python("-c", program, "analyze", str(saxpy))
    assert (ran.code, ran.out.splitlines()[-1]) == (DONE, "0 True goes on")


def test_a_process_that_is_to_be_inspected_is_there_after_the_command(saxpy: Path) -> None:
    """Python then says how a program ended, and reads what to do from stdin."""
    env = {"PYTHONINSPECT": "1"}
    ran = command.python("-m", "gputrace", "analyze", str(saxpy), "--json", env=env)
    assert ran.err.endswith("SystemExit: 0\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_what_cannot_be_written_at_the_end_is_told(saxpy: Path, tmp_path: Path) -> None:
    """As Python does it: a plugin's last words, say, go to a full device."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\n"
        "full = os.open('/dev/full', os.O_WRONLY)\n"
        "atexit.register(lambda: (os.dup2(full, 1), print('done')))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(command.ROOT)])
    env = {"PYTHONPATH": path, "PYTHONUNBUFFERED": ""}
    ran = command.python("-m", "gputrace", "analyze", str(saxpy), "--json", env=env)
    unflushed = 120
    assert ran.code == unflushed
    assert ran.err.startswith("Exception ignored in: <_io.TextIOWrapper name='<stdout>'")


def test_quiet_leaves_errors_and_verbose_adds_cost_and_origin(tmp_path: Path) -> None:
    trace = Export().kernel(0, 10).kernel(20, 30).write(tmp_path / "trace.sqlite")
    words = ("export", trace, "--to", "perfetto", "-o", tmp_path / "a.json")
    assert command.gputrace(*words, "-q") == (DONE, "", "")
    assert_refused(command.gputrace(*words, "-q"), USAGE, "exists")
    took, wrote = command.gputrace(*words, "-v", "--force").err.splitlines()[::-1]
    assert wrote.startswith("gputrace: wrote ")
    assert re.fullmatch(r"gputrace: took [\d.]+ s, and \d+ MB in its largest process", took)
    said = command.gputrace("analyze", "-v", f"{tmp_path}/\x1b[2J").err
    assert "in open_input" in said
    assert "\x1b" not in said
