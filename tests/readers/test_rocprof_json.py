"""rocprofv3's JSON: a run has the answer that its databases have."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import gputrace
from tests.helpers.command import gputrace as command
from tests.synthetic import Plan, simulate, write_rocpd

PLAN = Plan(ranks=2, steps=12, kernels_per_step=30, allreduces=2, data_wait_ns=3_000_000)


def written(database: Path) -> dict[str, Any]:
    """Return what rocprofv3 writes as JSON for the process of a database."""
    with closing(sqlite3.connect(database)) as connection:
        connection.row_factory = sqlite3.Row

        def rows(table: str) -> list[sqlite3.Row]:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            found = [name for (name,) in names if name.startswith(f"rocpd_{table}_0")]
            return connection.execute(f'SELECT * FROM "{found[0]}"').fetchall() if found else []

        events, threads = {row["id"]: row for row in rows("event")}, rows("info_thread")
        tids = {row["id"]: row["tid"] for row in threads}
        strings = {row["id"]: row["string"] for row in rows("string")}
        operations = list(strings.values())

        def common(row: sqlite3.Row) -> dict[str, Any]:
            correlation = {"internal": events[row["event_id"]]["stack_id"]}
            return {
                "start_timestamp": row["start"],
                "end_timestamp": row["end"],
                "thread_id": tids.get(row["tid"], 0),
                "correlation_id": correlation,
            }

        kernels = [
            common(row)
            | {"stream_id": {"handle": row["stream_id"]}}
            | {
                "dispatch_info": {
                    "kernel_id": row["kernel_id"],
                    "agent_id": {"handle": row["agent_id"]},
                }
            }
            for row in rows("kernel_dispatch")
        ]
        copies = [
            common(row)
            | {"stream_id": {"handle": row["stream_id"]}, "bytes": row["size"], "kind": 1}
            | {f"{end}_agent_id": {"handle": row[f"{end}_agent_id"]} for end in ("src", "dst")}
            | {"operation": operations.index(strings[row["name_id"]])}
            for row in rows("memory_copy")
        ]
        named = {row["id"]: str(row["name"]) for row in rows("info_category")} or strings
        calls: dict[str, list[dict[str, Any]]] = {"HIP": [], "MARKER": []}
        messages = []
        for row in rows("region"):
            event = events[row["event_id"]]
            call = common(row) | {"kind": 1, "operation": operations.index(strings[row["name_id"]])}
            kind = named[event["category_id"]].partition("_")[0]
            if kind == "MARKER":
                call["correlation_id"] = {"internal": 1_000_000 + row["event_id"]}
                message = json.loads(event["extdata"])["message"]
                messages.append({"key": 1_000_000 + row["event_id"], "value": message})
            calls[kind].append(call)
        agents = [
            {
                "id": {"handle": row["id"]},
                "type": 2 if row["type"] == "GPU" else 1,
                "logical_node_type_id": row["type_index"],
                "product_name": str(row["product_name"]),
            }
            for row in rows("info_agent")
        ]
        symbols = [
            {"kernel_id": row["id"], "formatted_kernel_name": row["display_name"]}
            for row in rows("info_kernel_symbol")
        ]
        return {
            "metadata": {"pid": rows("info_process")[0]["pid"], "node": {"hostname": "node0"}},
            "agents": agents,
            "kernel_symbols": symbols,
            "strings": {
                "buffer_records": [{"kind": kind, "operations": operations} for kind in "AB"],
                "marker_api": messages,
            },
            "buffer_records": {
                "kernel_dispatch": kernels,
                "memory_copy": copies,
                "hip_api": calls["HIP"],
                "marker_api": calls["MARKER"],
            },
        }


def figures(*paths: Path) -> dict[str, Any]:
    with gputrace.open(*paths) as trace:
        document = json.loads(trace.analyze().render("json"))
    found = {key: document[key] for key in ("span_ns", "steps", "breakdown")}
    return found | {"findings": [finding["id"] for finding in document["findings"]]}


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("amd")
    return write_rocpd(simulate(PLAN), folder / "run", ranges=("step",))


def test_a_file_has_the_answer_of_its_database(databases: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "4711_results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [written(databases[0])]}))
    assert figures(path) == figures(databases[0])
    assert figures(path)["steps"]["count"] == PLAN.steps


def test_a_broken_row_costs_only_itself(databases: list[Path], tmp_path: Path) -> None:
    document = written(databases[0])
    document["buffer_records"]["kernel_dispatch"][5]["start_timestamp"] = "soon"
    document["buffer_records"]["hip_api"][7] = None
    path = tmp_path / "4711_results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [document]}))
    with gputrace.open(path) as trace:
        report = trace.analyze()
    assert sum(report.dropped_rows.values()) == 2
    assert report.steps.count == PLAN.steps


@pytest.mark.parametrize("text", ['[{"metadata": 1}]', '[{"metadata": {"pid": 908}}]', "[{"])
def test_what_holds_nothing_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "4711_results.json"
    path.write_text(f'{{"rocprofiler-sdk-tool": {text}')
    ran = command("analyze", path)
    assert ran.code == 3
    assert "rocprofv3" in ran.err
