"""HTML report: one file that opens offline, or served for large traces.

``timeline`` gathers the data of a page and draws its timeline, ``charts`` draws the other charts,
``page`` adds texts and tables and assembles the document, ``server`` serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import ModuleType

from gputrace.errors import MissingError
from gputrace.report import check_target, write_for_people


def load(name: str) -> ModuleType:
    """Import a module of this package; raise MissingError where bokeh is not installed."""
    if not all(map(find_spec, ("bokeh", "jinja2", "tornado"))):
        raise MissingError("a page needs bokeh; install it with `pip install bokeh`")
    return import_module(f"gputrace.report.html.{name}")


def write_page(
    target: str | PathLike[str],
    inputs: Sequence[Path],
    force: bool,
    render: Callable[[ModuleType], str],
) -> None:
    """Write what ``render`` makes with the module of pages, once the target is known to be free."""
    path = check_target(Path(target), inputs, force)
    write_for_people(path, render(load("page")))


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """Page of a trace for a cell of a notebook: lanes, causes and gaps, to zoom into."""

    html: str
    """The whole page, which loads nothing."""
    height: int
    """Height of the cell in pixels."""

    def __repr__(self) -> str:
        return f"<gputrace.Page of {len(self.html):,} characters, for a notebook>"

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, whose styles and scripts stay in it."""
        from html import escape

        look = f"width:100%;height:{self.height}px;border:0"
        what = f'style="{look}" sandbox="allow-scripts allow-popups allow-downloads"'
        return f'<iframe {what} srcdoc="{escape(self.html)}"></iframe>'
