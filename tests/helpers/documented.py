"""The blocks of commands and code in README.md and docs, and what the pages say of running them.

Comments in a page, each on lines of its own, are for those who run it (a reader sees none):

    <!-- files: trace.sqlite = starved, main.sqlite = fed -->  files of `documented_files` are there
    <!-- numbers vary -->       of the next block's output, only the words are compared
    <!-- not run: needs Slurm -->  the next block is not run; the reason begins like one of REASONS
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMMANDS: Final = ("console", "sh")
REASONS: Final = (
    "needs a GPU",
    "needs a terminal",
    "needs a framework",
    "needs a notebook",
    "needs Slurm",
    "needs nsys",
    "needs a cluster",
    "needs the network",
    "needs several machines",
    "goes on until Ctrl-C",
    "takes minutes",
    "run by another test",
)
"""How a reason for not running a block begins: what a machine that runs tests need not have."""

_COMMENT: Final = re.compile(r"<!--\s*(files|not run|numbers vary)(?::\s*(.*?))?\s*-->", re.DOTALL)
_LINES: Final = r"(?:.*\n)*"
_SHELL_ENDS: Final = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "2>"})


@dataclass(frozen=True)
class Block:
    """A fenced block, or an indented one, with the comments before it."""

    page: Path
    line: int
    language: str
    """The first word after the fence; nothing of an indented block."""
    text: str
    notes: dict[str, str] = field(default_factory=dict)
    """The comments, by their first word."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Return true if it holds commands or code to be run."""
        runs = self.language in (*COMMANDS, "python") or (not self.language and self.calls)
        return bool(runs) and "not run" not in self.notes

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each ``gputrace`` that it calls, whether it is run or not."""
        if self.language not in (*COMMANDS, "yaml", ""):
            return []
        return [call for command, _ in commands(self) if (call := gputrace_call(command))]


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """All blocks of a page, in order."""
    return tuple(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    notes: dict[str, str] = {}
    for token in MarkdownIt("commonmark").disable("inline").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            for name, told in _COMMENT.findall(token.content):
                notes[name] = ", ".join(filter(None, (notes.get(name), told)))
        elif token.type in ("fence", "code_block") and token.map:
            language = token.info.split()[0] if token.info.strip() else ""
            yield Block(page, token.map[0] + 1, language, token.content, notes)
            notes = {}


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a block, each with the output that is shown below it.

    In ``console`` blocks commands begin with ``$``, in others every line is one.
    """
    text = re.sub(r"\\\n\s*(?:> )?", "", block.text)
    if block.language != "console":
        return [(line, "") for line in text.splitlines() if line.strip() and line[0] != "#"]
    parts = re.split(r"^\$ ", text, flags=re.M)[1:]
    return [(first, output) for first, _, output in (part.partition("\n") for part in parts)]


def words(command: str) -> list[str]:
    """A command's words, up to what a shell would do with its output; without comments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    try:
        found = list(lexer)
    except ValueError:  # no shell's quotes: a program or a picture, say
        return []
    ends = [index for index, word in enumerate(found) if word in _SHELL_ENDS]
    return found[: ends[0]] if ends else found


def gputrace_call(command: str) -> list[str]:
    """The arguments of the ``gputrace`` in a command, which a launcher may start."""
    found = words(command)
    return found[found.index("gputrace") + 1 :] if "gputrace" in found else []


def same_output(shown: str, printed: str, numbers_vary: bool) -> bool:
    """Return true if a page shows what was printed.

    ``...`` on a line of its own stands for any lines, elsewhere for anything on its line. Where
    numbers vary so do the places where lines are wrapped, and ``...`` stands for any words.
    """
    if numbers_vary:
        pattern = ".*".join(map(re.escape, _words_alone(shown).split("...")))
        return re.fullmatch(pattern, _words_alone(printed)) is not None
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    pattern = "".join(_LINES if line == "..." else f"{_line(line)}\n" for line in lines)
    text = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None


def _line(line: str) -> str:
    return re.escape(line).replace(re.escape("..."), ".*")


def _words_alone(text: str) -> str:
    """Without numbers, and on one line."""
    return " ".join(re.sub(r"\d[\d.,]*", "#", text).replace("<#", "#").split())
