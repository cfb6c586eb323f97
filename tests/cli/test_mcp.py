"""``gputrace mcp``: what an agent is told of traces, and what it can't reach."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.report import to_json
from tests.helpers import command
from tests.helpers.handmade import MS, Run, train
from tests.helpers.mcp_client import STATELESS, Client

READING: Final = (
    "verdict", "breakdown", "gaps", "kernels", "what_if",
    "causes", "lines", "slow_steps", "ranks", "memory",
)  # fmt: skip
"""Tools that take a trace alone."""


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
def ask(folder: Path) -> Iterator[Client]:
    with Client(folder) as client:
        yield client


def at(report: Any, address: str) -> dict[str, Any]:
    """The row of a report that an address names, as ``kernels.top[0]``."""
    for part in address.replace("]", "").replace("[", ".").split("."):
        report = report[int(part)] if part.isdecimal() else report[part]
    assert isinstance(report, dict)
    return report


def known(value: Any) -> Any:
    """A value of the JSON without what is unknown."""
    if isinstance(value, list):
        return [known(each) for each in value]
    if isinstance(value, dict):
        return {name: known(each) for name, each in value.items() if each is not None}
    return value


def test_a_client_learns_the_version_and_the_tools(ask: Client) -> None:
    hello = ask("initialize", protocolVersion="2025-03-26", capabilities={}, clientInfo={})
    assert hello["result"]["protocolVersion"] == "2025-03-26"
    assert hello["result"]["serverInfo"] == {"name": "gputrace", "version": gputrace.__version__}
    newest = ask("initialize", protocolVersion="2999-01-01")["result"]["protocolVersion"]
    assert newest == "2025-11-25"
    tools = {tool["name"]: tool for tool in ask("tools/list")["result"]["tools"]}
    assert set(tools) == {*READING, "compare", "recordings", "step"}, "none that runs a program"
    assert all(tool["annotations"]["readOnlyHint"] for tool in tools.values())
    assert ask("ping")["result"] == {}


def test_a_request_without_a_handshake_says_its_version(ask: Client) -> None:
    found = ask("server/discover", _meta=STATELESS)["result"]
    assert found["supportedVersions"][0] == "2026-07-28"
    assert found["resultType"] == "complete"
    assert found["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "gputrace"
    tools = ask("tools/list", _meta=STATELESS)["result"]
    assert (tools["resultType"], tools["cacheScope"]) == ("complete", "private")
    arguments = {"trace": "quick.sqlite"}
    called = ask("tools/call", name="breakdown", arguments=arguments, _meta=STATELESS)["result"]
    assert called["resultType"] == "complete"
    assert ask("ping", _meta=STATELESS)["error"]["code"] == -32601, "it has none any more"
    version = next(iter(STATELESS))
    wrong = ask("tools/list", _meta=STATELESS | {version: "1900-01-01"})["error"]
    assert (wrong["code"], wrong["data"]["requested"]) == (-32022, "1900-01-01")
    assert "2025-11-25" in wrong["data"]["supported"]
    assert ask("tools/list", _meta={version: "2026-07-28"})["error"]["code"] == -32602
    assert ask("server/discover")["error"]["code"] == -32602


@pytest.mark.parametrize("tool", READING)
def test_each_row_is_that_of_the_json(tool: str, ask: Client, folder: Path) -> None:
    report = json.loads(gputrace.open(folder / "waiting.sqlite").analyze().render("json"))
    answer = ask.called(tool, trace="waiting.sqlite")
    rows = [row for said in answer for row in said["rows"]]
    assert rows or (tool in ("memory", "lines") and "recorded" in answer[0]["text"])
    for row in rows:
        assert row.items() <= known(at(report, row.pop("row"))).items()


def test_a_step_is_explained_by_rows_of_its_json(ask: Client, folder: Path) -> None:
    slow, *_ = ask.called("slow_steps", trace="waiting.sqlite", limit=1)
    [row] = slow["rows"]
    with gputrace.open(folder / "waiting.sqlite") as opened:
        explained = json.loads(to_json(opened.explain_step(row["step"])))
    answer, *_ = ask.called("step", trace="waiting.sqlite", number=row["step"])
    assert answer["rows"]
    for part in answer["rows"]:
        assert part.items() <= known(at(explained, part.pop("row"))).items()
    assert "it has steps 0 to" in ask.refused("step", trace="waiting.sqlite", number=900)
    assert ask.called("step", trace="waiting.sqlite")[0]["text"] == answer["text"], "the slowest"


def test_the_causes_name_their_cures(ask: Client) -> None:
    first, *_ = ask.called("causes", trace="waiting.sqlite")
    assert "[data-feeding]" in first["text"]
    assert "To try: workers=N, prefetch=N" in first["text"]


def test_an_id_in_the_verdict_has_all_that_is_known_of_it(ask: Client) -> None:
    verdict, *_ = ask.called("verdict", trace="waiting.sqlite")
    assert verdict["text"].startswith("[data-feeding] The GPU waits for data")
    finding, cause, *more = ask.called("causes", trace="waiting.sqlite", cause="data-feeding")
    assert finding["text"] == verdict["text"]
    assert {row["row"].partition("[")[0] for row in cause["rows"]} == {"ledger"}
    texts = [said["text"] for said in more]
    cures = next(text for text in texts if text.startswith("To try: "))
    assert "workers=N (set num_workers of DataLoaders)" in cures
    assert "tf-parallel" not in cures, "its kernels are PyTorch's"
    gap = next(said for said in more if " idles " in said["text"])
    assert "[data-feeding]" in gap["text"]
    assert next(iter(gap["rows"][0]["charges"])) == "data-feeding"
    refused = ask.refused("causes", trace="waiting.sqlite", cause="launching")
    assert "the ids are " in refused
    assert "data-feeding" in refused


def test_recordings_are_listed_without_what_lies_elsewhere(ask: Client, folder: Path) -> None:
    listed = [said["rows"][0] for said in ask.called("recordings")]
    assert {row["path"] for row in listed} == {"waiting.sqlite", "quick.sqlite"}
    assert listed[0]["bytes"] == (folder / listed[0]["path"]).stat().st_size
    assert "can be read" in ask.refused("recordings", folder="..")
    assert "`recordings` lists" in ask.refused("verdict", trace="none.sqlite")


def test_answers_are_short_unless_more_is_asked_for(ask: Client) -> None:
    for tool in READING:
        answer = ask("tools/call", name=tool, arguments={"trace": "waiting.sqlite"})["result"]
        assert len(answer["content"][0]["text"].encode()) <= 4096
        assert len(json.dumps(answer["structuredContent"])) <= 4096
    *_, said = ask.called("verdict", trace="waiting.sqlite", max_kb=1)
    assert said["text"].startswith("Cut to 1 kB: max_kb=")
    enough = int(said["text"].partition("max_kb=")[2].split()[0])
    assert not any(
        "Cut to" in said["text"]
        for said in ask.called("verdict", trace="waiting.sqlite", max_kb=enough)
    )
    whole = ask.called("verdict", trace="waiting.sqlite", max_kb=100)
    assert not any("Cut to" in said["text"] for said in whole)
    firsts: dict[str, int] = {}
    for row in (row for said in whole for row in said["rows"]):
        firsts.setdefault(row["row"], len(row))
    assert min(firsts.values()) > 1, "each is whole where it is first named"


def test_the_verdict_comes_with_the_rows_it_rests_on(ask: Client) -> None:
    verdict, *_ = ask.called("verdict", trace="waiting.sqlite")
    assert " for data " in verdict["text"]
    assert "What to do:" in verdict["text"]
    finding, breakdown, *_ = verdict["rows"]
    assert (finding["row"], finding["id"]) == ("findings[0]", "data-feeding")
    share = breakdown["data_feeding_ns"] / breakdown["total_ns"]
    assert finding["evidence"]["share"] == pytest.approx(share, rel=0.01)


def test_a_comparison_says_what_changed(ask: Client) -> None:
    verdict, *changes = ask.called("compare", before="waiting.sqlite", after="quick.sqlite")
    assert "faster" in verdict["text"]
    assert any("data feeding" in said["text"] and said["rows"] for said in changes)
    gone = next(said for said in changes if said["text"].startswith("Gone: data-feeding: "))
    assert gone["rows"][0]["a_severity"] == "high"


def test_only_traces_of_the_folder_are_read(ask: Client, folder: Path) -> None:
    outside = str(folder.parent / "outside.sqlite")
    for path in ("../outside.sqlite", outside, "link.sqlite"):
        assert "only what is in it can be read" in ask.refused("verdict", trace=path)
    said = ask.refused("verdict", trace=".")
    assert said.startswith(f"{folder}/link.sqlite: lies outside"), "a link in a folder"
    assert "can be read" in ask.refused("verdict", trace="s3://bucket/a.sqlite")
    assert ask.called("breakdown", trace=str(folder / "quick.sqlite"))


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


def test_wrong_requests_are_answered_and_the_server_goes_on(ask: Client) -> None:
    assert ask("", text="{")["error"]["code"] == -32700
    assert ask("", text="[]")["error"]["code"] == -32600
    assert ask("", text='{"id": 1e400, "method": "ping"}')["error"]["code"] == -32600
    assert ask("", text="x" * (1 << 20) + "y")["error"]["code"] == -32600
    assert ask("resources/list")["error"]["code"] == -32601
    assert ask("tools/call", name="rm")["error"]["code"] == -32602
    assert "no such file" in ask.refused("verdict", trace="none.sqlite")
    assert "trace" in ask.refused("verdict")
    refused = ask.refused("verdict", trace="quick.sqlite", force=True)
    assert refused.startswith("force: no such argument; it takes trace, steps")
    assert "1 to 50" in ask.refused("gaps", trace="quick.sqlite", limit=1000)
    assert "steps" in ask.refused("verdict", trace="quick.sqlite", steps="900:901")
    assert ask("ping")["result"] == {}
