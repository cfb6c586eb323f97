"""``gputrace mcp``: what an agent is told of traces, and what it can't reach."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gputrace
from tests.helpers import command
from tests.helpers.handmade import MS, Run, train

Ask = Callable[..., dict[str, Any]]


def trained(path: Path, wait: int) -> None:
    run = Run()
    train(run, wait=wait)
    run.export.write(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one waits for data in each step."""
    folder = tmp_path_factory.mktemp("mcp") / "runs"
    folder.mkdir()
    trained(folder / "waiting.sqlite", 3 * MS)
    trained(folder / "quick.sqlite", 0)
    trained(folder.parent / "outside.sqlite", 0)
    (folder / "link.sqlite").symlink_to(folder.parent / "outside.sqlite")
    return folder


@pytest.fixture(scope="module")
def ask(folder: Path) -> Iterator[Ask]:
    """Sends a request to a running server, and returns its response."""
    server = subprocess.Popen(
        [sys.executable, "-m", "gputrace", "mcp", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=command.environment(),
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def ask(method: str, text: str = "", **parameters: Any) -> dict[str, Any]:
        request = {"jsonrpc": "2.0", "id": 7, "method": method, "params": parameters}
        server.stdin.write((text or json.dumps(request)) + "\n")  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]
        response: dict[str, Any] = json.loads(server.stdout.readline())  # type: ignore[union-attr]
        assert response["jsonrpc"] == "2.0"
        return response

    with server:
        yield ask
        server.stdin.close()
        assert server.wait(10) == 0


def called(ask: Ask, name: str, **arguments: Any) -> list[dict[str, Any]]:
    """The sentences of a tool that works."""
    result = ask("tools/call", name=name, arguments=arguments)["result"]
    assert "isError" not in result, result
    sentences: list[dict[str, Any]] = result["structuredContent"]["sentences"]
    text = result["content"][0]["text"]
    assert all(said["text"] in text for said in sentences)
    return sentences


def refused(ask: Ask, name: str, **arguments: Any) -> str:
    """Why a tool does not answer."""
    result = ask("tools/call", name=name, arguments=arguments)["result"]
    assert result["isError"]
    return str(result["content"][0]["text"])


def at(report: Any, address: str) -> dict[str, Any]:
    """The row of a report that an address names, as ``kernels.top[0]``."""
    for part in address.replace("]", "").replace("[", ".").split("."):
        report = report[int(part)] if part.isdecimal() else report[part]
    assert isinstance(report, dict)
    return report


def test_a_client_learns_the_version_and_the_tools(ask: Ask) -> None:
    hello = ask("initialize", protocolVersion="2025-03-26", capabilities={}, clientInfo={})
    assert hello["result"]["protocolVersion"] == "2025-03-26"
    assert hello["result"]["serverInfo"] == {"name": "gputrace", "version": gputrace.__version__}
    newest = ask("initialize", protocolVersion="2999-01-01")["result"]["protocolVersion"]
    assert newest == "2025-11-25"
    tools = {tool["name"]: tool for tool in ask("tools/list")["result"]["tools"]}
    assert list(tools) == ["verdict", "breakdown", "gaps", "kernels", "compare", "what_if"]
    assert all(tool["annotations"]["readOnlyHint"] for tool in tools.values())
    assert ask("ping")["result"] == {}


@pytest.mark.parametrize("tool", ["verdict", "breakdown", "gaps", "kernels", "what_if"])
def test_each_row_is_that_of_the_json(tool: str, ask: Ask, folder: Path) -> None:
    report = json.loads(gputrace.open(folder / "waiting.sqlite").analyze().render("json"))
    rows = [row for said in called(ask, tool, trace="waiting.sqlite") for row in said["rows"]]
    assert rows
    for row in rows:
        assert row.items() <= at(report, row.pop("row")).items()


def test_the_verdict_comes_with_the_rows_it_rests_on(ask: Ask) -> None:
    verdict, *_ = called(ask, "verdict", trace="waiting.sqlite")
    assert " for data " in verdict["text"]
    assert "What to do:" in verdict["text"]
    finding, breakdown, *_ = verdict["rows"]
    assert (finding["row"], finding["id"]) == ("findings[0]", "data-feeding")
    share = breakdown["data_feeding_ns"] / breakdown["total_ns"]
    assert finding["evidence"]["share"] == pytest.approx(share, rel=0.01)


def test_a_comparison_says_what_changed(ask: Ask) -> None:
    verdict, *changes = called(ask, "compare", before="waiting.sqlite", after="quick.sqlite")
    assert "faster" in verdict["text"]
    assert any("data feeding" in said["text"] and said["rows"] for said in changes)


def test_only_traces_of_the_folder_are_read(ask: Ask, folder: Path) -> None:
    outside = str(folder.parent / "outside.sqlite")
    for path in ("../outside.sqlite", outside, "link.sqlite"):
        assert "only what is in it can be read" in refused(ask, "verdict", trace=path)
    said = refused(ask, "verdict", trace=".")
    assert said.startswith(f"{folder}/link.sqlite: lies outside"), "a link in a folder"
    assert "can be read" in refused(ask, "verdict", trace="s3://bucket/a.sqlite")
    assert called(ask, "breakdown", trace=str(folder / "quick.sqlite"))


def test_a_batch_is_answered_at_once(folder: Path) -> None:
    ping = {"jsonrpc": "2.0", "method": "ping"}
    lines = [[ping | {"id": 1}, ping, 5, ping | {"id": "b"}], [ping], ping | {"id": 2}]
    ran = subprocess.run(
        [sys.executable, "-m", "gputrace", "mcp", str(folder)],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
        env=command.environment(),
        check=True,
    )
    batch, single = map(json.loads, ran.stdout.splitlines())
    assert [answer["id"] for answer in batch] == [1, None, "b"]
    assert single["id"] == 2, "nothing is said of a batch of notifications"


def test_wrong_requests_are_answered_and_the_server_goes_on(ask: Ask) -> None:
    assert ask("", text="{")["error"]["code"] == -32700
    assert ask("", text="[]")["error"]["code"] == -32600
    assert ask("", text='{"id": 1e400, "method": "ping"}')["error"]["code"] == -32600
    assert ask("", text="x" * (1 << 20) + "y")["error"]["code"] == -32600
    assert ask("resources/list")["error"]["code"] == -32601
    assert ask("tools/call", name="rm")["error"]["code"] == -32602
    assert "no such file" in refused(ask, "verdict", trace="none.sqlite")
    assert "trace" in refused(ask, "verdict")
    assert "arguments are" in refused(ask, "verdict", trace="quick.sqlite", force=True)
    assert "1 to 50" in refused(ask, "gaps", trace="quick.sqlite", limit=1000)
    assert "steps" in refused(ask, "verdict", trace="quick.sqlite", steps="900:901")
    assert ask("ping")["result"] == {}
