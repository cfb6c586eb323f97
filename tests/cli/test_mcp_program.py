"""``gputrace mcp FOLDER -- COMMAND``: an agent records the program, tries cures, has the patch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.mcp_client import STATELESS, Client
from tests.helpers.tried_programs import PROGRAM, Real

_WAITS: Final = """
class Batches:
    def __init__(self, items): self.items = items
    def __next__(self): return next(self.items)
    def __iter__(self): return self
all_items = DataLoader.__iter__
DataLoader.__iter__ = lambda self: Batches(all_items(self))
"""
"""Addition to the stand-in for torch: an iterator, whose waits the hooks record."""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Client of a server that may run the program, with modules that stand for torch."""
    real = Real(tmp_path, monkeypatch)
    real.script.write_text(PROGRAM)
    with (tmp_path / "modules/torch/utils/data/dataloader.py").open("a") as loader:
        loader.write(_WAITS)
    with Client(tmp_path, sys.executable, "train.py") as client:
        yield client


def test_a_slow_program_is_made_fast_in_seven_calls(agent: Client, tmp_path: Path) -> None:
    [recorded] = agent.called("record", target="before.sqlite", measure=30)
    assert recorded["rows"][0]["path"] == "before.sqlite"
    assert "workers=4" in recorded["rows"][0]["cures"]
    verdict, *_ = agent.called("verdict", trace="before.sqlite")
    assert "data" in verdict["text"]
    causes = agent.called("causes", trace="before.sqlite")
    assert "To try: workers=N" in next(s["text"] for s in causes if "[data-feeding]" in s["text"])
    tried, *answers = agent.called("try", cures=["workers=4"], trace="before.sqlite", budget="30s")
    assert "faster" in tried["text"]
    [row] = answers[0]["rows"]
    assert (row["row"], row["cure"], row["verdict"]) == ("rows[0]", "workers=4", "faster")
    assert (tmp_path / "train.py").read_text() == PROGRAM, "nothing is written by the server"
    patch, *_ = agent.called("apply", trial="trial-1")
    diff = patch["rows"][0]["diff"]
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    assert "num_workers=4" in (tmp_path / "train.py").read_text()
    agent.called("record", target="after.sqlite", measure=30)
    compared, *_ = agent.called("compare", before="before.sqlite", after="after.sqlite")
    assert "faster" in compared["text"]
    assert agent.calls == 7
    places = agent.called("lines", trace="before.sqlite", limit=2)
    assert places[0]["text"].startswith("Rank 0 is at ")
    assert places[0]["rows"][0]["row"].startswith("host_lines[")


def test_the_person_is_asked_about_each_change(agent: Client) -> None:
    meta = STATELESS | {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}

    def tried(**response: Any) -> dict[str, Any]:
        call: dict[str, Any] = {"name": "try", "_meta": meta}
        call["arguments"] = {"cures": ["workers=4", "bf16"], "budget": "2s"}
        call |= {"inputResponses": {"consent": response}} if response else {}
        result: dict[str, Any] = agent("tools/call", **call)["result"]
        return result

    asked = tried()
    assert asked["resultType"] == "input_required"
    form = asked["inputRequests"]["consent"]["params"]
    assert "Its files stay" in form["message"]
    boxes = form["requestedSchema"]["properties"]
    assert list(boxes) == ["workers=4", "bf16"]
    assert "changes numerics" in boxes["bf16"]["description"]
    for content in (None, {"bf16": False}):
        refused = tried(action="accept" if content else "decline", content=content)
        assert "agrees to none" in refused["content"][0]["text"]
    yes = tried(action="accept", content={"workers=4": True, "bf16": False})
    assert yes["resultType"] == "complete"
    shown = yes["content"][0]["text"]
    assert "workers=4" in shown
    assert "bf16" not in shown


def test_a_trial_ends_where_it_is_cancelled(agent: Client, tmp_path: Path) -> None:
    call = {"name": "try", "arguments": {"cures": ["workers=4"]}, "_meta": {"progressToken": "p"}}
    agent.send({"jsonrpc": "2.0", "id": "long", "method": "tools/call", "params": call})
    while not agent.notified:
        # A ping is answered after the trial; its progress comes before.
        line = json.loads(agent.server.stdout.readline())  # type: ignore[union-attr]
        agent.notified.append(line)
    began = time.monotonic()
    cancelled = {"requestId": "long", "reason": "enough"}
    agent.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": cancelled})
    assert agent("ping")["id"] == 7, "no answer is due for the trial"
    assert time.monotonic() - began < 30, "of a budget of 90 s"
    assert "none" in agent.refused("apply", trial="trial-1")


def test_what_is_not_agreed_to_is_not_run(agent: Client, tmp_path: Path) -> None:
    assert "no such argument" in agent.refused("try", command=["rm"], cures=["gc"])
    assert "give a list" in agent.refused("try")
    assert "name each change" in agent.refused("try", cures=[])
    assert "did you mean workers?" in agent.refused("try", cures=["worker=8"])
    assert "not a time" in agent.refused("try", cures=["gc"], budget="soon")
    assert "name another" in agent.refused("record", target="train.py")
    assert "can be read" in agent.refused("record", target="../x.sqlite")
    assert "these have one: none" in agent.refused("apply", trial="trial-1")
    tools = {tool["name"]: tool for tool in agent("tools/list")["result"]["tools"]}
    hints = {
        name: tools[name]["annotations"]["readOnlyHint"] for name in ("record", "try", "apply")
    }
    assert hints == {"record": False, "try": False, "apply": True}


def test_a_program_that_fails_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Real(tmp_path, monkeypatch).script.write_text("raise SystemExit('no data here')")
    with Client(tmp_path, sys.executable, "train.py") as client:
        assert "no data here" in client.refused("record", target="run.sqlite")
