"""What each key does: the one list that the screen, its help and the documentation are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Key:
    """A binding."""

    keys: str
    """As Textual names them, with commas between."""
    action: str
    does: str
    shown: str = ""
    """Its word in the footer; nothing to leave it out."""
    display: str = ""
    """The keys as people write them."""

    @property
    def binding(self) -> Binding:
        return Binding(
            self.keys, self.action, self.shown or self.does, bool(self.shown), self.display or None
        )

    @property
    def written(self) -> str:
        """What the help calls the keys."""
        return self.display or self.keys.replace(",", " ")


GROUPS: Final[dict[str, tuple[Key, ...]]] = {
    "Gaps": (
        Key("n,down", "gap(1)", "next gap of the list", "gap", "n ↓"),
        Key("p,up", "gap(-1)", "previous gap", "", "p ↑"),
        Key("pagedown", "gap_page(1)", "a page further in the list", "", "PgDn"),
        Key("pageup", "gap_page(-1)", "a page back", "", "PgUp"),
        Key("home", "gap_first", "first gap of the list", "", "Home"),
        Key("g,enter", "fit_gap", "zoom to the gap", "", "g Enter"),
        Key("o", "sort", "sort by length, start, gpu, cause, step", "sort"),
        Key("O", "reverse", "the other way round"),
        Key("F", "filter", "filter: gpu=0 cause=data step=8:24 len>1ms", "filter"),
        Key("i", "steady", "steady steps only, or all"),
        Key("B", "between", "between batches only, or all"),
    ),
    "Time": (
        Key("plus,equals_sign,w", "zoom(0.5)", "zoom in at the cursor", "", "+ w"),
        Key("minus,s", "zoom(2.0)", "zoom out", "", "- s"),
        Key("right,d", "pan(0.25)", "to the right", "", "→ d"),
        Key("left,a", "pan(-0.25)", "to the left", "", "← a"),
        Key("right_square_bracket", "step(1)", "next step", "step", "]"),
        Key("left_square_bracket", "step(-1)", "previous step", "", "["),
        Key("f", "fit_step", "fit the step", "fit"),
        Key("0,r", "fit_run", "fit the whole run", "run", "0 r"),
        Key("t", "jump", "jump to a time (28.6s, +5ms) or a step (#17)"),
        Key("full_stop", "cursor(1)", "cursor a cell to the right", "", "."),
        Key("comma", "cursor(-1)", "cursor a cell to the left", "", ","),
        Key("m", "mark", "mark the cursor; a second mark measures", "mark"),
        Key("escape", "clear", "forget marks and selection", "", "Esc"),
    ),
    "Lanes": (
        Key("j", "lane(1)", "next lane"),
        Key("k", "lane(-1)", "previous lane"),
        Key("e", "pick", "the operation under the cursor"),
        Key("c", "follow", "follow it to its launch, and back"),
        Key("slash", "search", "search operations by name", "search", "/"),
        Key("greater_than_sign", "match(1)", "next match", "", ">"),
        Key("less_than_sign", "match(-1)", "previous match", "", "<"),
        Key("R", "ranks", "show some ranks only: 0,2-3"),
        Key("b", "beside", "this rank and the next alone, side by side; or all"),
        Key("A", "align", "align two traces at the step under the cursor, by its number"),
        Key("S", "streams", "a lane for each stream"),
        Key("H", "threads", "a lane for each host thread"),
        Key("v", "curves", "what NVML sampled: use, clock, power, memory, heat, or nothing"),
        Key("l", "letters", "letters in place of colours"),
        Key("z", "enlarge", "lanes on the whole screen, or the gaps below them again"),
    ),
    "Other": (
        Key("J", "scroll_detail(1)", "the detail further down"),
        Key("K", "scroll_detail(-1)", "the detail further up"),
        Key("y", "copy", "copy the detail"),
        Key("x", "export", "write the view (.svg), or its window as a trace"),
        Key("question_mark,f1", "help", "this help", "help", "?"),
        Key("q,ctrl+c", "quit", "leave", "quit", "q"),
    ),
}

KEYS: Final = tuple(key for group in GROUPS.values() for key in group)
