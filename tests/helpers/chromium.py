"""A headless Chromium that is driven over its DevTools protocol, and tells what a page did."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from tornado.websocket import WebSocketClientConnection, websocket_connect

_PATIENCE_S: Final = 60.0
_LARGEST: Final = 1 << 28
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")

PROGRAM: Final = next(filter(None, map(shutil.which, _NAMES)), None)

needs_chromium = pytest.mark.skipif(
    PROGRAM is None, reason=f"no browser here: none of {', '.join(_NAMES)} is in PATH"
)


class Browser:
    """One tab. Commands wait for their answers; events between are kept."""

    def __init__(self, socket: WebSocketClientConnection, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop, self._last, self._address = socket, loop, 0, ""
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, **params: Any) -> Any:
        """One command of the protocol; raises AssertionError where the browser refuses it."""
        self.post(method, **params)
        while True:
            message = self._next()
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]
            if "method" in message:
                self.events.append(message)

    def post(self, method: str, **params: Any) -> None:
        """A command whose answer nobody waits for."""
        self._last += 1
        self._loop.run_until_complete(
            self._write({"id": self._last, "method": method, "params": params})
        )

    def _next(self) -> dict[str, Any]:
        async def read() -> Any:
            return await asyncio.wait_for(self._read(), _PATIENCE_S)

        text = self._loop.run_until_complete(read())
        assert text is not None, "the browser has gone"
        message: dict[str, Any] = json.loads(text)
        return message

    async def _write(self, message: dict[str, Any]) -> None:
        """In a running loop: tornado asks for one."""
        self._socket.write_message(json.dumps(message))

    async def _read(self) -> Any:
        return await self._socket.read_message()

    def open(self, address: str) -> None:
        """Opens a page of ours and waits until it is drawn; forgets what was before."""
        self._address = ""
        self.ask("Page.navigate", url="about:blank")
        self.events.clear()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=address)
        self.until("document.body && document.body.dataset.ready === 'yes'")
        self._address = address

    def show(self, address: str) -> None:
        """Opens a page unless it is open, for a test that asks nothing of what others did to it."""
        if address != self._address:
            self.open(address)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Waits for an expression to come true."""
        end = time.monotonic() + _PATIENCE_S
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def key(self, key: str) -> None:
        """Presses and releases a key where the focus is."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {})
            )

    @property
    def complaints(self) -> list[str]:
        """Scripts of the page that failed, and all that the console calls errors."""
        self.run("0")
        told = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                told.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                told.append(str(params["entry"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "assert",
            ):
                told.append(str(params["args"]))
        return told

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def picture(
        self, target: Path, width: int = 1400, height: int = 1000, dark: bool = False
    ) -> None:
        """Draws the page as PNG."""
        look = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[look])
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        time.sleep(1)
        target.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with a profile in a folder, ended afterwards."""
    assert PROGRAM is not None
    profile = folder / "profile"
    command = [
        PROGRAM,
        "--headless=new",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-dev-shm-usage",
        "--js-flags=--no-opt",  # pages are gone before what is compiled anew pays
        "--no-first-run",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "--window-size=1400,1000",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "about:blank",
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        loop = asyncio.new_event_loop()
        try:
            port = _port(profile, process)
            socket = loop.run_until_complete(_connect(port))
            yield Browser(socket, loop)
            loop.run_until_complete(_close(socket))
        finally:
            # Its helpers too, which would go on writing into the folder.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)
            loop.close()


async def _close(socket: WebSocketClientConnection) -> None:
    """In a running loop, too."""
    socket.close()


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that the browser chose, once it has written it down."""
    told, end = profile / "DevToolsActivePort", time.monotonic() + _PATIENCE_S
    while not (told.exists() and told.read_text().count("\n")):
        assert process.poll() is None, "the browser ended"
        assert time.monotonic() < end, "the browser did not start"
        time.sleep(0.05)
    return int(told.read_text().splitlines()[0])


async def _connect(port: int) -> WebSocketClientConnection:
    from tornado.httpclient import AsyncHTTPClient

    answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
    tab = next(tab for tab in json.loads(answer.body) if tab["type"] == "page")
    return await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=_LARGEST)
