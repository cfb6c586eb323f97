"""Page on a local Bokeh server, which sends every window in full detail.

The address contains a secret token, which keeps out other users of the machine and other pages in
the browser. The server listens on 127.0.0.1 only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from typing import Any, Final

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from bokeh.server.util import bind_sockets
from bokeh.settings import settings
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.web import ErrorHandler

from gputrace.errors import UsageError
from gputrace.model.options import Window
from gputrace.report.html.page import add_charts, find_charts, page_template, page_variables
from gputrace.report.html.timeline import Material, file_name

_PAUSE_MS: Final = 120
"""Milliseconds without movement after which a window is sent."""
_MOST_SENT: Final = 150_000
"""Maximum number of runs sent for a window."""
_HOST: Final = "127.0.0.1"
_CALLERS: Final = ("tornado.access", "tornado.application", "bokeh.server.views.ws")
"""Loggers of invalid requests."""
_FORBIDDEN: Final = 403
_SILENT: Final = logging.CRITICAL + 1


def serve(material: Material, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until KeyboardInterrupt; pass its address to ``ready`` once it can be opened.

    Port 0 is any free one. Raises UsageError where the port is unavailable.
    """
    asyncio.run(_serve(material, port, ready))


async def _serve(material: Material, port: int, ready: Callable[[str], None]) -> None:
    # Requests for other paths, or from other origins, are not worth a message.
    for name in _CALLERS:
        logging.getLogger(name).setLevel(_SILENT)
    token = secrets.token_urlsafe(24)
    application = Application(FunctionHandler(lambda document: _fill(document, material)))
    try:
        sockets, port = bind_sockets(_HOST, port)
    except OSError as error:
        advice = "give another with --port, or leave it out"
        raise UsageError(f"port {port}: {error.strerror}; {advice}") from None
    names = [f"{host}:{port}" for host in (_HOST, "localhost")]
    # Overrides the environment: pages of other origins must not open the web socket.
    settings.allowed_ws_origin = names
    site = _Site({"/": application}, prefix=f"/{token}", use_index=False, redirect_root=False)
    site.names = names
    http = HTTPServer(site)
    http.add_sockets(sockets)
    server = BaseServer(IOLoop.current(), site, http)
    server.start()
    ready(f"http://{_HOST}:{port}/{token}/")
    try:
        await asyncio.Event().wait()
    finally:
        # Open views are cut off when the server stops, which is no error.
        logging.getLogger("tornado").setLevel(_SILENT)
        server.stop()


class _Site(BokehTornado):
    """Site that answers to these names only, not to one that an attacker lets resolve to it."""

    names: Collection[str] = ()

    def find_handler(self, request: HTTPServerRequest, **more: Any) -> Any:
        if request.host in self.names:
            return super().find_handler(request, **more)
        return self.get_handler_delegate(request, ErrorHandler, {"status_code": _FORBIDDEN})


def _fill(document: Document, material: Material) -> None:
    """Fill the document of one view of the page."""
    charts = find_charts(material)
    add_charts(document, charts)
    document.title = f"gputrace: {file_name(material.analysis)}"
    document.template = page_template()
    document.template_variables.update(page_variables(material, charts), sources="'self'")
    if "timeline" in charts and not material.whole:
        _Follower(document, material)


class _Follower:
    """Sender of the window that a view shows, once it rests."""

    def __init__(self, document: Document, material: Material) -> None:
        self._document, self._material = document, material
        timeline: Any = document.get_model_by_name("timeline")
        self._range = timeline.x_range
        named: Any = document.get_model_by_name("rows")
        self._names = None if named is None or material.has_names else named.tags[0]
        self._sources = [tag for tag in timeline.tags if tag.name.startswith("lane-")]
        self._waiting: Any = None
        for end in ("start", "end"):
            self._range.on_change(end, self._moved)

    def _moved(self, name: str, old: object, new: object) -> None:
        if self._waiting is not None:
            self._document.remove_timeout_callback(self._waiting)
        self._waiting = self._document.add_timeout_callback(self._send, _PAUSE_MS)

    def _send(self) -> None:
        """Send the window in view, extended by its length on either side."""
        self._waiting = None
        origin, shown = self._material.scene.origin, self._range
        start, end = (round(at * 1e9) + origin for at in (shown.start, shown.end))
        width = end - start
        runs = self._material.runs_around(start - width, end + width, _MOST_SENT)
        for source, lane_runs in zip(self._sources, runs, strict=True):
            source.data = {"length": lane_runs.length, "kind": lane_runs.kind}
        if self._names is not None:
            text = self._material.window_rows(Window(start - width, end + width))
            self._names.data = {"text": [text or self._material.parts.rows]}
