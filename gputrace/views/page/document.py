"""A page put together: the template, its figures, and a policy that lets nothing else run."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

from bokeh.embed import file_html
from bokeh.model import Model
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from bokeh.resources import INLINE
from jinja2 import Environment, FunctionLoader, Template, select_autoescape

from gputrace import __version__
from gputrace.views.page.charts import class_chart, run_charts, step_chart
from gputrace.views.page.colors import class_list
from gputrace.views.page.content import GAP_HEADER, find_content
from gputrace.views.page.material import Material, file_name
from gputrace.views.page.plain import plain_text
from gputrace.views.page.timeline import facts, timeline_charts
from gputrace.views.tables import TEXT_COLUMNS

_SCRIPT: Final = re.compile(r"<script(?: type=\"text/javascript\")?>(.*?)</script>", re.DOTALL)
_SCRIPTS: Final = ("timeline.js", "page.js")


def render(material: Material) -> str:
    """The page as one HTML text that loads nothing from anywhere."""
    charts = find_charts(material)
    return render_page("page.html", charts, page_variables(material, charts))


def render_page(template: str, charts: dict[str, figure], variables: dict[str, Any]) -> str:
    """A page of one of the templates beside this module."""
    # Bokeh draws nothing without a model.
    models: list[Model] = [*charts.values()] or [Div(visible=False)]
    return file_html(
        models,
        resources=INLINE,
        title=f"gputrace: {variables['content'].title}",
        template=page_template(template),
        template_variables=variables,
        suppress_callback_warning=True,
    )


def find_charts(material: Material) -> dict[str, figure]:
    """All figures of a page by name."""
    analysis = material.analysis
    drawn = {"classes": class_chart(analysis), "steps": step_chart(analysis)}
    there = {name: chart for name, chart in drawn.items() if chart is not None}
    timeline = timeline_charts(material) if material.scene.lanes else {}
    return timeline | there | run_charts(analysis)


def page_variables(material: Material, charts: dict[str, figure]) -> dict[str, Any]:
    """What the template of a report needs beside what Bokeh gives it."""
    own = {
        "content": find_content(material, file_name(material.analysis)),
        "gap_header": GAP_HEADER,
        "facts": facts(material),
    }
    return common_variables(charts) | own


def common_variables(charts: dict[str, figure]) -> dict[str, Any]:
    """What all templates need; ``sources`` is what a page may load from its own server."""
    return {
        "charts": list(charts),
        "classes": class_list(),
        "style": _file("page.css"),
        "scripts": [_file(name) for name in _SCRIPTS],
        "version": __version__,
        "sources": "",
        "text_columns": TEXT_COLUMNS,
        "facts": {"classes": class_list()},
    }


@cache
def page_template(name: str = "page.html") -> Template:
    """A template; everything that it is given is escaped unless it says otherwise."""
    environment = Environment(
        loader=FunctionLoader(_file),
        autoescape=select_autoescape(default=True, default_for_string=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(hashes=hashes, cut=plain_text)
    return environment.get_template(name)


def hashes(html: str) -> str:
    """The scripts in a piece of HTML as sources of a content security policy.

    A browser runs these and no other: a script that got in through somebody's words stays dead.
    """
    found = [match[1] for match in _SCRIPT.finditer(html)]
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _file(name: str) -> str:
    """One of the files beside this module."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
