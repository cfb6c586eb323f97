"""Stacks of Python in traces of PyTorch's profiler are read as samples, and name lines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from gputrace.model.events import Kind
from gputrace.readers.registry import open_trace
from tests.helpers import lookups
from tests.helpers.kineto import PID, event, kernel, write

STEPS: Final = 5
SHIFT: Final = 1_000_000


def call(name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    return event("python_function", name, SHIFT + start, length, **more)


def trained(*inner: tuple[str, float, float]) -> list[dict[str, Any]]:
    """Steps of 10 ms, of which the host launches in the last two; calls within train.py's."""
    events = [call("train.py(1): <module>", 0, STEPS * 10_000)]
    for number in range(STEPS):
        begin = number * 10_000
        launch = {"args": {"correlation": number + 1}}
        events += [
            event("user_annotation", f"ProfilerStep#{number}", SHIFT + begin, 9_990),
            event("cuda_runtime", "cudaLaunchKernel", SHIFT + begin + 8_000, 10, **launch),
            kernel(SHIFT + begin + 8_010, 1_900, correlation=number + 1),
            *(call(name, begin + start, length) for name, start, length in inner),
        ]
    return events


def lines_of(path: Path, *events: dict[str, Any]) -> Counter[tuple[str, str]]:
    """The lines that samples met, and the innermost ones."""
    with open_trace(write(path / "run.pt.trace.json", *events)) as trace:
        samples = trace.events([Kind.SAMPLE], ("start", "name", "correlation"))
        pairs = list(zip(samples.name.tolist(), samples.correlation.tolist(), strict=True))
        text = trace.names({id for pair in pairs for id in pair})
    return Counter((text[line], text[inner]) for line, inner in pairs)


def test_the_line_is_the_innermost_of_the_program_s_own_code(tmp_path: Path) -> None:
    met = lines_of(
        tmp_path,
        *trained(
            ("data.py(30): augment", 1_000, 5_000),
            ("mine/decorators.py(7): wrapper", 1_000, 5_000),
            ("numpy/core/fromnumeric.py(200): sort", 2_000, 4_000),
            ("json/decoder.py(3): decode", 2_000, 4_000),
            ("<built-in method sort of numpy.ndarray object at 0x7f>", 3_000, 1_000),
        ),
    )
    top, augment = "train.py:1 <module>", "data.py:30 augment"
    assert met == {
        (top, top): STEPS * 25,
        (augment, augment): STEPS * 5,
        (augment, "json/decoder.py:3 decode"): STEPS * 20,
    }


@pytest.mark.parametrize(
    ("names", "line"),
    [
        # A program that is itself an installed package.
        (("runpy.py(1): run", "torch/run.py(2): main", "torch/a.py(3): f"), "torch/run.py:2 main"),
        (("/e/site-packages/kit/a.py(4): go",), "/e/site-packages/kit/a.py:4 go"),
        (("kit/loop.py(5): fit", "/usr/lib/python3.11/queue.py(9): get"), "kit/loop.py:5 fit"),
        (("/tmp/ipykernel_7/15.py(2): go", "<frozen os>(3): stat"), "/tmp/ipykernel_7/15.py:2 go"),
        (("nn.Module: Net_0", "threading.py(3): run"), None),
    ],
)
def test_whose_code_a_call_is(tmp_path: Path, names: tuple[str, ...], line: str | None) -> None:
    calls = [call(name, depth, 4_000 - depth) for depth, name in enumerate(names)]
    events = [event("cuda_runtime", "cudaLaunchKernel", SHIFT, 10), kernel(SHIFT + 20, 5)]
    assert {line for line, _ in lines_of(tmp_path, *events, *calls)} == ({line} if line else set())


def test_only_the_thread_that_calls_most_is_sampled(tmp_path: Path) -> None:
    """Not that of a monitor, nor one of no known process."""
    others = [
        call("monitor.py(9): run", 0, STEPS * 10_000, tid=99),
        call("monitor.py(9): run", 0, STEPS * 10_000, pid=0, tid=0),
    ]
    events = trained(("data.py(30): augment", 0, 7_000), ("data.py(40): crop", 0, 3_000))
    met = lines_of(tmp_path, *others, *events)
    lines = {"train.py:1 <module>", "data.py:30 augment", "data.py:40 crop"}
    assert {line for line, _ in met} == lines
    with open_trace(tmp_path / "run.pt.trace.json") as trace:
        assert [process.pid for process in trace.processes] == [PID]


def test_the_first_finding_names_the_function_that_the_host_is_in(tmp_path: Path) -> None:
    events = trained(("mine/data.py(30): augment", 500, 7_000))
    report = lookups.analyze(write(tmp_path / "run.pt.trace.json", *events))
    found = report.findings[0]
    assert found.id == "host-work"
    assert found.message.endswith("while the host does other work at data.py:30 augment")
    text = report.render()
    assert "--python" not in text
    assert "(with_stack=True), which slows the host" in " ".join(text.split())


def test_samples_are_ticks_apart(tmp_path: Path) -> None:
    met = lines_of(tmp_path, *trained(("data.py(30): augment", 0, 7_000)))
    with open_trace(tmp_path / "run.pt.trace.json") as trace:
        times = trace.events([Kind.SAMPLE], ("start",)).start
    assert len(times) == met.total() == STEPS * 10_000 / 200
    assert set((times[1:] - times[:-1]).tolist()) == {200_000}


def test_a_call_of_a_year_is_no_matter(tmp_path: Path) -> None:
    year = call("train.py(9): serve", 0, 3.2e13)
    events = [event("cuda_runtime", "cudaLaunchKernel", SHIFT, 10), kernel(SHIFT + 20, 5)]
    with open_trace(write(tmp_path / "run.pt.trace.json", *events, year)) as trace:
        assert 500_000 < len(trace.events([Kind.SAMPLE], ("start",))) < 1_100_000
