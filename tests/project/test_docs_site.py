"""The documentation as a site: it builds without a warning, its links lead somewhere, and it
fetches nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest

from tests.helpers import command
from tests.helpers.once import once

DOCS: Final = command.ROOT / "docs"
PAGES: Final = sorted(page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md"))
TOOLS: Final = ("sphinx", "myst_parser", "furo")
MISSING: Final = [tool for tool in TOOLS if find_spec(tool) is None]

needs_sphinx = pytest.mark.skipif(
    bool(MISSING), reason=f"not here: {', '.join(MISSING)} (dependency group docs)"
)


class Page(HTMLParser):
    """Links of a page, what it loads by itself, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loads.append(values["src"])


@pytest.fixture(scope="module")
def site(common: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ["-q", "-W", "--keep-going", "-d", str(tmp_path_factory.mktemp("doctrees"))]

    def build(folder: Path) -> None:
        words = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(folder)]
        done = subprocess.run(
            words, capture_output=True, text=True, env=command.environment(), check=False
        )
        assert done.returncode == 0, done.stderr

    return once(common / "site", build)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_page_is_in_the_navigation() -> None:
    lists = re.findall(r"```\{pages\}\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    named = [line for text in lists for line in text.splitlines() if re.match(r"\w", line)]
    assert len(named) == len(set(named))
    assert {page.as_posix() for page in PAGES} - {"index"} <= set(named)


@needs_sphinx
def test_every_page_is_built(site: Path) -> None:
    assert [page for page in PAGES if not (site / page).with_suffix(".html").exists()] == []


@needs_sphinx
def test_links_between_pages_lead_to_what_is_there(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if url.scheme or url.path.startswith("_sources"):
                continue
            if not target.exists() or (
                url.fragment and target in pages and url.fragment not in pages[target].anchors
            ):
                broken.append(f"{path.name}: {link}")
    assert broken == []


@needs_sphinx
def test_the_site_fetches_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    fetched = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}
    for style in site.rglob("*.css"):
        found = re.findall(r"(?:@import|url\()\s*[\"']?(https?:)?//", style.read_text())
        fetched |= {f"{style.name}: {one}" for one in found}
    assert fetched == set()


@needs_sphinx
def test_references_are_made_from_the_code(site: Path) -> None:
    from gputrace.cli import COMMANDS
    from gputrace.errors import ExitCode

    commands = (site / "reference" / "command-line.html").read_text()
    assert [name for name in COMMANDS if f"gputrace {name}" not in commands] == []
    python = (site / "reference" / "python.html").read_text()
    for name in ("gputrace.open", "gputrace.compare", "gputrace.step", "gputrace.annotate"):
        assert f'id="{name}"' in python
    written = {int(code) for code in re.findall(r"\b(\d+)\b", commands)}
    assert {int(code) for code in ExitCode} <= written
