"""The report as a page for a browser: one file that opens offline, or served for large traces.

``material`` is what a page shows, ``content`` its texts and tables, ``charts`` and ``timeline`` its
drawings; ``document`` puts them together, ``server`` serves them.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from gputrace.errors import MissingError


def load(name: str) -> ModuleType:
    """A module of this package that draws with bokeh; raises MissingError where that is not."""
    try:
        return import_module(f"gputrace.views.page.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("bokeh", "jinja2", "tornado"):
            raise
        raise MissingError("a page needs bokeh; install it with `pip install bokeh`") from None
