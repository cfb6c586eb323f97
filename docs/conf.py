"""How Sphinx builds the site: `make docs`, into build/site. Who views it fetches nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.util.docutils import SphinxDirective

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import gputrace  # noqa: E402
from docs.site import commands, pairs  # noqa: E402
from gputrace.cli import json_schema  # noqa: E402

project = "gputrace"
release = gputrace.__version__
copyright = "the authors of gputrace, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["site"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "code"  # docstrings are written in Markdown's way
smartquotes = False  # options begin with two hyphens

html_theme = "furo"
html_title = f"gputrace {release}"
html_static_path = ["site/style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options: dict[str, list[str]] = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "monokai"


class Pages(TocTree):  # type: ignore[misc]
    """A toctree in which a page that is not there (yet) is passed over."""

    content: StringList

    def run(self) -> list[nodes.Node]:
        there = [page for page in self.content if (HERE / f"{page}.md").exists()]
        self.content = StringList(there, source=self.get_source_info()[0])
        made: list[nodes.Node] = super().run()
        return made


def _made_by(make: Callable[[], str]) -> type[SphinxDirective]:
    """A directive that stands for Markdown that is made when the site is built."""

    class Made(SphinxDirective):  # type: ignore[misc]
        def run(self) -> list[nodes.Node]:
            made: list[nodes.Node] = self.parse_text_to_nodes(make(), allow_section_headings=True)
            return made

    return Made


def _write_schemas(app: Sphinx, error: Exception | None) -> None:
    """Write the JSON Schemas next to the pages."""
    folder = Path(app.outdir, "schema")
    folder.mkdir(exist_ok=True)
    for name in json_schema.ROOTS if error is None else ():
        text = json.dumps(json_schema.schema(name), indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("pages", Pages)
    app.add_directive("commands", _made_by(commands.markdown))
    app.add_directive("pairs", _made_by(pairs.markdown))
    app.connect("build-finished", _write_schemas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
