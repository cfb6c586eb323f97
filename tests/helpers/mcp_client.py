"""Scripted client of ``gputrace mcp``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from tests.helpers import command

STATELESS: Final[dict[str, object]] = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
"""What each request says of itself in the version without a handshake."""


class Client:
    """Starts a server, and sends it one request after the other."""

    def __init__(self, folder: Path, *program: str, env: Mapping[str, str] | None = None) -> None:
        self.notified: list[dict[str, Any]] = []
        self.calls = 0
        words = ["mcp", str(folder), *(["--", *program] if program else [])]
        self.server = subprocess.Popen(
            [sys.executable, "-m", "gputrace", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=command.environment(env),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.server:
            assert self.server.stdin is not None
            self.server.stdin.close()
            assert self.server.wait(30) == 0

    def send(self, message: object) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(
            (message if isinstance(message, str) else json.dumps(message)) + "\n"
        )
        self.server.stdin.flush()

    def received(self) -> dict[str, Any]:
        """The next message that is no notification."""
        assert self.server.stdout is not None
        while True:
            message: dict[str, Any] = json.loads(self.server.stdout.readline())
            assert message["jsonrpc"] == "2.0"
            if "id" in message:
                return message
            self.notified.append(message)

    def __call__(self, method: str, text: str = "", **parameters: Any) -> dict[str, Any]:
        request = {"jsonrpc": "2.0", "id": 7, "method": method, "params": parameters}
        self.send(text or request)
        return self.received()

    def called(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        """The sentences of a tool that works."""
        self.calls += 1
        meta = STATELESS | {"progressToken": self.calls}
        result = self("tools/call", name=name, arguments=arguments, _meta=meta)["result"]
        assert "isError" not in result, result
        sentences: list[dict[str, Any]] = result["structuredContent"]["sentences"]
        text = result["content"][0]["text"]
        assert all(said["text"] in text for said in sentences)
        return sentences

    def refused(self, name: str, **arguments: Any) -> str:
        """Why a tool does not answer."""
        result = self("tools/call", name=name, arguments=arguments)["result"]
        assert result["isError"]
        return str(result["content"][0]["text"])
