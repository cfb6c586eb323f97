"""Answers that are known from before: the same in every form, and never to another question."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gputrace
from gputrace.analyzers.timeline_model import Scene
from gputrace.api import Report
from gputrace.errors import InputError
from gputrace.model.results import Analysis
from gputrace.store.cache import dump_columns, load_columns
from tests.helpers import command
from tests.helpers.cache_writing import wait_until_kept
from tests.helpers.exports import Export
from tests.helpers.recordings import DATA
from tests.test_plugins import Here, here, site, timeline  # noqa: F401 - fixtures

FORMS = ("text", "json", "markdown", "csv")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "kept"
    monkeypatch.setenv("GPUTRACE_CACHE", str(folder))
    return folder


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, no file is opened as a trace."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a trace is opened")

    return lambda: monkeypatch.setattr("gputrace.readers.open.open_traces", refuse)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """100 ns from 1000 on, with a gap of 20 ns in them."""
    return Export().kernel(1000, 1050).kernel(1070, 1100).write(tmp_path / "trace.sqlite")


def ask(*paths: Path, **options: Any) -> Report:
    """Analyzes, and waits until the answer is kept."""
    with gputrace.open(*paths) as opened:
        report = opened.analyze(**options)
    wait_until_kept()
    return report


@pytest.mark.parametrize(
    "name",
    [
        "h200x4-ddp-starved-9-15.sqlite.xz",
        "nsys-ai-mfu_2gpu_before.sqlite.xz",
        "profiling-lm-da6bcc3f.nvprof.xz",
        "torch2.13-cpu.pt.trace.json.gz",
        "tracelens-falconsai.json.gz",
        "tf2.15_keras_fit.xplane.pb.gz",
        "jax0.10_steps.trace.json.gz",
    ],
)
def test_a_real_trace_has_the_same_answer_without_being_read(
    name: str, recording: Callable[[str], Path], tmp_path: Path, unread: Callable[[], None]
) -> None:
    path = recording(name.removesuffix(".xz")) if name.endswith(".xz") else DATA / name
    first = ask(path)
    unread()
    again = ask(path)
    assert again == first
    for form in FORMS:
        assert again.render(form) == first.render(form), form


def test_the_command_prints_the_same_bytes_again(h100: Path, kept: Path) -> None:
    for form in FORMS:
        first = command.gputrace("analyze", "--format", form, h100)
        assert len(list(kept.iterdir())) == 1
        assert command.gputrace("analyze", "--format", form, h100) == first


def test_another_question_has_an_answer_of_its_own(trace: Path, kept: Path) -> None:
    whole = ask(trace)
    part = (1000 - whole.origin_ns, 1060 - whole.origin_ns)
    window = ask(trace, time=part)
    few = ask(trace, gaps=0)
    assert (whole.span_ns, window.span_ns) == (100, 60)
    assert (len(whole.gaps.largest), len(few.gaps.largest)) == (1, 0)
    assert len(list(kept.iterdir())) == 3
    assert [ask(trace), ask(trace, time=part), ask(trace, gaps=0)] == [whole, window, few]


def test_a_trace_that_changed_is_read_anew(trace: Path) -> None:
    assert ask(trace).span_ns == 100
    trace.unlink()
    Export().kernel(1000, 1300).write(trace)
    assert ask(trace).span_ns == 300


def test_a_run_that_a_file_came_to_is_read_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    Export().kernel(1000, 1050).write(folder / "0.sqlite")
    assert len(ask(folder).gpus) == 1
    Export().kernel(1000, 1050).write(folder / "1.sqlite")
    with pytest.raises(InputError, match="does not say when it was recorded"):
        ask(folder)


def test_a_folder_in_a_circle_has_an_end(tmp_path: Path, trace: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs" / "old").mkdir(parents=True)
    (folder / "logs" / "old" / "again").symlink_to(folder)
    shutil.copyfile(trace, folder / "0.sqlite")
    assert ask(folder) == ask(folder)


def test_names_are_those_that_were_given(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trace.parent)
    assert ask(trace).path == str(trace)
    assert ask(Path(trace.name)).path == trace.name


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_what_is_being_written_is_refused_as_ever(trace: Path, suffix: str) -> None:
    ask(trace)
    trace.with_name(trace.name + suffix).write_bytes(b"unfinished")
    with pytest.raises(InputError, match="unfinished writes"):
        ask(trace)


def test_a_trace_that_is_gone_is_told_of(trace: Path) -> None:
    ask(trace)
    trace.unlink()
    with pytest.raises(InputError, match="no such file"):
        ask(trace)


def test_an_answer_without_all_files_is_not_kept(trace: Path, tmp_path: Path, kept: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"SQLite format 3\0")
    for _ in range(2):
        with gputrace.open(trace, broken, keep_going=True) as opened:
            report = opened.analyze()
            wait_until_kept()
            assert [one.path for one in report.left_out] == [str(broken)]
            assert opened.left_out == report.left_out
    assert not kept.exists()


def test_other_questions_are_asked_of_the_file(trace: Path, tmp_path: Path) -> None:
    ask(trace)
    with gputrace.open(trace) as opened:
        assert opened.left_out == ()
        opened.export("csv", tmp_path / "tables")
        assert repr(opened).startswith(f"<gputrace.OpenTrace {trace}: Too short ")
    assert (tmp_path / "tables").is_dir()


def test_a_page_again_needs_no_analysis(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gputrace.open(trace) as opened:
        first = opened.material()
    wait_until_kept()
    monkeypatch.setattr("gputrace.analyzers.pipeline.analyze", None)
    with gputrace.open(trace) as opened:
        opened.report(tmp_path / "page.html")
        assert opened.material().analysis == first.analysis


def test_nothing_is_kept_where_a_plugin_has_a_say(
    here: Here,  # noqa: F811
    site: Path,  # noqa: F811
    timeline: Path,  # noqa: F811
    kept: Path,
) -> None:
    assert here("analyze", timeline, sites=[site]).code == 0
    wait_until_kept()
    assert not kept.exists()


def test_an_entry_that_is_no_answer_is_made_anew(trace: Path, kept: Path) -> None:
    first = ask(trace)
    (entry,) = kept.iterdir()
    shutil.copyfile(os.devnull, entry)
    assert ask(trace) == first
    assert ask(trace) == first


@dataclass
class Odd:
    numbers: tuple[float, ...]


def test_numbers_that_json_has_no_word_for_come_back(trace: Path) -> None:
    report = ask(trace)
    odd = (float("inf"), float("-inf"), 0.1, 1e300, -0.0)
    assert load_columns(dump_columns(Odd(odd)), Odd) == Odd(odd)
    again = load_columns(dump_columns(Odd((float("nan"),))), Odd)
    assert again is not None
    assert str(again.numbers[0]) == "nan"
    assert load_columns(dump_columns(report), Scene) is None, "of another kind"
    assert load_columns(dump_columns(Odd(odd)), Analysis) is None
