"""Export of the sampled lines for speedscope.app and VS Code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import command
from tests.helpers.exports import SAMPLE
from tests.helpers.handmade import MS, Run, train

LOADER = "/home/me/project/loader.py:48 load_batch"
SORT = "/usr/lib/numpy/fromnumeric.py:1105 sort"


@pytest.fixture
def sampled(tmp_path: Path) -> Path:
    """A thread that is sampled each millisecond at two lines, one of them within numpy, with 40 ms
    between that are not sampled; another thread with one sample.
    """
    run = Run()
    run.wait_at(LOADER, LOADER)
    run.export.rows[SAMPLE][-1]["innerNameId"] = run.export.string(SORT)
    run.wait(40 * MS)
    run.wait_at("train.py:9 <module>", LOADER, LOADER)
    run.wait_at(LOADER, thread=7)
    train(run, 4)
    return run.export.write(tmp_path / "run.sqlite")


def exported(trace: Path, form: str, *options: str) -> Any:
    target = trace.with_suffix(f".{form}")
    ran = command.gputrace("export", trace, "--to", form, "-o", target, *options)
    assert ran.code == 0, ran.err
    return json.loads(target.read_bytes())


def test_speedscope_has_each_threads_lines_with_their_time(sampled: Path) -> None:
    profile = exported(sampled, "speedscope")
    frames = profile["shared"]["frames"]
    assert {"name": "load_batch", "file": "/home/me/project/loader.py", "line": 48} in frames
    first, other = profile["profiles"]
    names = [[frames[index]["name"] for index in stack] for stack in first["samples"]]
    assert names == [
        *(["load_batch"], ["load_batch", "sort"], []),
        *(["<module>"], ["load_batch"], ["load_batch"]),
    ]
    assert first["weights"] == [MS, 2 * MS, 39 * MS, MS, MS, MS]
    assert first["endValue"] - first["startValue"] == sum(first["weights"])
    assert (first["unit"], len(other["samples"])) == ("nanoseconds", 1)
    assert other["name"].endswith("thread 7")


def test_a_cpuprofile_has_the_most_sampled_thread_as_a_tree_of_lines(sampled: Path) -> None:
    profile = exported(sampled, "cpuprofile")
    nodes = {node["id"]: node for node in profile["nodes"]}
    path = [nodes[id]["callFrame"]["functionName"] for id in profile["samples"]]
    assert path == ["load_batch", "sort", "(idle)", "<module>", "load_batch", "load_batch"]
    assert profile["timeDeltas"] == [0, 1000, 2000, 39_000, 1000, 1000]
    assert profile["endTime"] - profile["startTime"] == 45_000
    root, *others = profile["nodes"]
    assert sorted(id for node in nodes.values() for id in node["children"]) == sorted(
        node["id"] for node in others
    )
    line = nodes[profile["samples"][0]]
    assert (line["callFrame"]["lineNumber"], line["hitCount"]) == (47, 3), "lines count from 0"
    assert line["positionTicks"] == [{"line": 48, "ticks": 3}], "and here from 1"
    assert root["callFrame"]["functionName"] == "(root)"


@pytest.mark.parametrize("form", ["speedscope", "cpuprofile"])
def test_a_part_is_exported_and_names_are_replaced(sampled: Path, form: str) -> None:
    text = json.dumps(exported(sampled, form, "--time", "0ms:41ms", "--redact"))
    assert "<module>" not in text
    assert "loader.py" not in text
    assert str(sampled.parent) not in text


@pytest.mark.parametrize("form", ["speedscope", "cpuprofile"])
def test_a_trace_without_samples_says_how_to_get_them(tmp_path: Path, form: str) -> None:
    run = Run()
    train(run, 4)
    trace = run.export.write(tmp_path / "run.sqlite")
    ran = command.gputrace("export", trace, "--to", form, "-o", tmp_path / "out")
    command.assert_refused(ran, 2, "no lines of Python were sampled; record with --python")
    assert list(tmp_path.iterdir()) == [trace]
