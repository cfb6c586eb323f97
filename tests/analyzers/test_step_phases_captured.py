"""Modules of what CUDA graphs run: those in which its nodes were captured, as without graphs."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.api import Report
from tests.helpers.exports import GRAPH_TRACE, KERNEL, STEP, Export, global_id
from tests.helpers.handmade import US

RANGES, MADE, STRETCHES = "GPUTRACE_HOST_RANGE", "CUDA_GRAPH_NODE_EVENTS", "GPUTRACE_GRAPH_NODES"
MAIN, AUTOGRAD = 100, 101
"""Threads."""
NETWORK: Final = (
    ("Net_0/Mlp_0", 0, 40, "gemm"),
    ("Net_0/Mlp_1", 0, 40, "gemm"),
    ("Net_0", 0, 10, "head"),
    ("Net_0/Mlp_1", 1, 70, "gemm"),
    ("Net_0/Mlp_0", 1, 70, "gemm"),
    ("", 0, 30, "adam"),
)
"""Module, 1 in the backward pass, microseconds and name of each kernel of a step."""
STEPS: Final = 60
COPY: Final = 1000
"""What is added to a node's number when its graph is instantiated."""


class Training:
    """A program being recorded: calls, kernels, modules and nodes."""

    def __init__(self) -> None:
        self.export, self.now = Export(), 1000
        self._calls, self._nodes = count(1), count(1)
        give = self.export.give
        give("GPUTRACE_META", "name", "value").add("GPUTRACE_META", name="job", value="")
        give(RANGES, "start", "end", "globalTid", "nameId", "kind", "number")
        give(MADE, "start", "end", "globalTid", "nameId", "graphNodeId", "originalGraphNodeId")
        give(STRETCHES, "start", "end", "globalPid")
        give(KERNEL, "graphId", "graphNodeId")

    def range(self, path: str, kind: int, start: int, number: int = 0, thread: int = MAIN) -> None:
        """A host range of a kind that ends now."""
        values = {"globalTid": global_id(100, thread=thread), "nameId": self.export.string(path)}
        self.export.add(RANGES, start=start, end=self.now, kind=kind, number=number, **values)

    def call(self, name: str, thread: int = MAIN) -> int:
        """A call of 5 µs; its number."""
        number = next(self._calls)
        self.export.call(self.now, self.now + 5 * US, name, correlation=number)
        self.export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["globalTid"] = global_id(
            100, thread=thread
        )
        self.now += 5 * US
        return number

    def eager(self, network: tuple[tuple[str, int, int, str], ...], modules: bool) -> None:
        """Launch each kernel, and wait for it."""
        for path, backward, length, name in network:
            start, thread = self.now, AUTOGRAD if backward else MAIN
            call = self.call("cudaLaunchKernel", thread)
            if path and modules:
                self.range(path, 7, start, backward, thread)
            self.run((("", 0, length, name),), call)

    def capture(self, network: tuple[tuple[str, int, int, str], ...]) -> list[int]:
        """Capture each kernel, and instantiate the graph; the numbers of its nodes."""
        nodes = []
        for path, backward, *_ in network:
            start, thread = self.now, AUTOGRAD if backward else MAIN
            nodes.append(next(self._nodes))
            self.made(nodes[-1], None, thread)
            self.call("cudaLaunchKernel", thread)
            if path:
                self.range(path, 7, start, backward, thread)
        for node in nodes:
            self.made(node + COPY, None)  # As CUPTI tells, too.
            self.made(node + COPY, node)
        return [node + COPY for node in nodes]

    def made(self, node: int, original: int | None, thread: int = MAIN) -> None:
        self.now += US
        values = {"globalTid": global_id(100, thread=thread), "nameId": self.export.string("node")}
        row = values | {"graphNodeId": node, "originalGraphNodeId": original}
        self.export.add(MADE, start=self.now, end=self.now, **row)

    def run(
        self,
        network: tuple[tuple[str, int, int, str], ...],
        call: int,
        nodes: list[int] | None = None,
    ) -> None:
        """Kernels without a pause, of a graph if they have nodes; the host waits for them."""
        self.now += 5 * US
        for place, (_, _, length, name) in enumerate(network):
            of = {"graphId": 1, "graphNodeId": nodes[place]} if nodes else {}
            end = self.now + length * US
            self.export.kernel(self.now, end, name, correlationId=call, **of)
            self.now = end
        self.now += 5 * US

    def replay(
        self, network: tuple[tuple[str, int, int, str], ...], nodes: list[int], whole: bool
    ) -> None:
        call = self.call("cudaGraphLaunch")
        if not whole:
            self.run(network, call, nodes)
            return
        end = self.now + sum(length for _, _, length, _ in network) * US
        self.export.graph(self.now, end, correlationId=call)
        self.now = end + 5 * US

    def step(self, number: int, start: int) -> None:
        values = {"globalTid": global_id(100, thread=MAIN), "nameId": self.export.string("step")}
        self.export.add(STEP, start=start, end=self.now, step=number, **values)

    def report(self, folder: Path) -> Report:
        path = folder / "run.sqlite"
        path.unlink(missing_ok=True)
        with gputrace.open(self.export.write(path)) as trace:
            return trace.analyze()


def rows_of(report: Report) -> dict[str, tuple[int, int, int, float]]:
    return {
        row.path: (row.instances, row.forward_ns, row.backward_ns, row.launches)
        for row in report.modules
    }


def eager(folder: Path) -> Report:
    training = Training()
    for step in range(STEPS):
        start = training.now
        training.eager(NETWORK, modules=step in (24, 25))
        training.step(step, start)
    return training.report(folder)


def graph(folder: Path, whole: bool = True) -> Report:
    """A step is one graph, whose nodes are recorded in four steps or, unless ``whole``, in all."""
    training = Training()
    nodes = training.capture(NETWORK)
    for step in range(STEPS):
        start = training.now
        training.replay(NETWORK, nodes, whole=whole and step not in range(16, 20))
        training.step(step, start)
        if step == 19:
            first = next(row["start"] for row in training.export.rows[STEP] if row["step"] == 16)
            times = {"start": first, "end": training.now}
            training.export.add(STRETCHES, globalPid=global_id(100), **times)
    return training.report(folder)


EXPECTED: Final = {
    "": (0, 30 * US, 0, 1),
    "Net": (1, 90 * US, 140 * US, 5),
    "Net/Mlp": (2, 80 * US, 140 * US, 4),
}


@pytest.mark.parametrize("whole", [True, False])
def test_nodes_are_those_of_the_modules_that_captured_them(tmp_path: Path, whole: bool) -> None:
    assert rows_of(eager(tmp_path)) == EXPECTED
    assert rows_of(graph(tmp_path, whole)) == EXPECTED


def partly(folder: Path, captured: str) -> Report:
    """The first Mlp is a graph, captured by itself; modules are recorded in two steps."""
    training = Training()
    first, second, *rest = NETWORK
    nodes = training.capture(((captured, *first[1:]),))
    for step in range(STEPS):
        start, recorded = training.now, step in (24, 25)
        training.replay((first,), nodes, whole=False)
        if recorded:
            training.range(first[0], 7, start)
        training.eager((second, *rest), recorded)
        training.step(step, start)
    return training.report(folder)


@pytest.mark.parametrize("captured", ["Mlp_0", ""])
def test_a_part_of_a_network_is_where_its_graph_is_launched(tmp_path: Path, captured: str) -> None:
    assert rows_of(partly(tmp_path, captured)) == EXPECTED


def test_parts_of_what_a_graph_has_captured_lie_within_what_launches_it(tmp_path: Path) -> None:
    rows = rows_of(partly(tmp_path, "Mlp_0/Linear_0"))
    assert rows.pop("Net/Mlp/Linear") == (1, 40 * US, 0, 1)
    assert rows == EXPECTED


def test_ranges_of_nvtx_are_modules_of_the_nodes_that_nsys_records(tmp_path: Path) -> None:
    """nsys profile --cuda-graph-trace=node; ranges named as modules while the graph is captured."""
    training = Training()
    layers = tuple((f"model.layers.{layer}.mlp", 0, 20, "gemm") for layer in range(3))
    start = training.now
    nodes = training.capture(layers)
    training.export.rows["NVTX_EVENTS"] = [
        {"eventType": 59, "textId": row["nameId"], "domainId": 0, **row}
        for row in training.export.rows.pop(RANGES)
    ]
    spans = [(start, training.now, "model")]
    for step in range(STEPS):
        begin = training.now
        training.replay(layers, nodes, whole=False)
        spans.append((begin, training.now, f"step {step}"))
    thread = global_id(100, thread=MAIN)
    for begin, end, text in spans:
        times = {"start": begin, "end": end, "eventType": 59, "globalTid": thread}
        training.export.add("NVTX_EVENTS", **times, text=text)
    for table in ("GPUTRACE_META", STEP, STRETCHES):
        training.export.rows.pop(table, None)
    assert GRAPH_TRACE not in training.export.rows
    assert rows_of(training.report(tmp_path)) == {
        "model": (1, 60 * US, 0, 3),
        "model/layers": (3, 60 * US, 0, 3),
        "model/layers/mlp": (3, 60 * US, 0, 3),
    }


def test_lines_that_call_modules_and_define_kernels_are_named(tmp_path: Path) -> None:
    training = Training()
    for path, line in (
        *(("Net_0", "/job/train.py:9 <module>"), ("adam", "/job/ops.py:5 adam")),
        *((f"Net_0/Mlp_{n}", "/job/net.py:20 Net.forward") for n in range(2)),
    ):
        training.range(f"{path} at {line}", 8, training.now)
    for step in range(STEPS):
        start = training.now
        training.eager(NETWORK, modules=step in (24, 25))
        training.step(step, start)
    report = training.report(tmp_path)
    lines = {row.path: row.line for row in report.modules}
    assert lines == {"": "", "Net": "train.py:9 <module>", "Net/Mlp": "net.py:20 Net.forward"}
    assert report.kernels is not None
    kernels = {use.name: use.line for use in report.kernels.top}
    assert kernels == {"adam": "ops.py:5 adam", "gemm": "", "head": ""}
    assert "net.py:20" in report.render("text")
