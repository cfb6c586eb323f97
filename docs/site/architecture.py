"""The drawing of the architecture: gputrace's packages by layer, and which imports which.

Layers come from the contract on imports in pyproject.toml, arrows from the code. An import that
others imply is left out, and so are those of the lowest layer, which everything may use.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parents[2]
COLUMNS: Final = {
    **{"__main__": 0, "extend": 0, "trials": 0, "api": 0, "distributed": 0},
    **{"studies": 2, "pytest_plugin": 3, "notebook_magic": 3, "collectors": 3},
}
"""Column of a package; 1 unless named."""
WIDTH, HEIGHT = 150, 34
STEP_X, STEP_Y = 190, 68
PICTURE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="15"
     font-family="DejaVu Sans, Verdana, sans-serif" text-anchor="middle">
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"
 orient="auto"><path d="M0 0L8 4L0 8z" fill="#5b6b7a"/></marker></defs>
<rect width="{width}" height="{height}" fill="#ffffff"/>
{arrows}
{boxes}
</svg>
"""


def layers() -> list[list[str]]:
    """Return the packages of each layer, the highest first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (found,) = (one["layers"] for one in contracts if one["type"] == "layers")
    return [row.replace("|", ":").replace(" ", "").split(":") for row in found]


def imports() -> dict[str, set[str]]:
    """Return which packages each one imports, without what its other imports imply."""
    graph = grimp.build_graph("gputrace")
    names = [name.partition(".")[2] for name in graph.find_children("gputrace")]
    direct: dict[str, set[str]] = {name: set() for name in names}
    for module in graph.modules - {"gputrace"}:
        own = module.split(".")[1]
        used = {
            name.split(".")[1]
            for name in graph.find_modules_directly_imported_by(module)
            if "." in name
        }
        direct[own] |= used - {own}

    def reached(name: str) -> set[str]:
        return direct[name].union(*map(reached, direct[name]))

    return {
        name: {each for each in used if not any(each in reached(other) for other in used)}
        for name, used in direct.items()
    }


def svg() -> str:
    """Return the drawing."""
    *rows, base = layers()
    place = {
        name: (20 + STEP_X * COLUMNS.get(name, 1), 16 + STEP_Y * row)
        for row, names in enumerate(rows)
        for name in names
    }
    width, bottom = 40 + 3 * STEP_X + WIDTH, 16 + STEP_Y * len(rows)
    arrows = [
        _arrow(place[name], place[used])
        for name, all_used in sorted(imports().items())
        if name in place
        for used in sorted(all_used & place.keys())
    ]
    boxes = [_box(*at, WIDTH, name) for name, at in place.items()]
    boxes.append(_box(20, bottom, width - 40, f"used by all: {', '.join(base)}"))
    return PICTURE.format(
        width=width, height=bottom + HEIGHT + 16, arrows="\n".join(arrows), boxes="\n".join(boxes)
    )


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    if y1 == y2:
        x1, x2 = (x1 + WIDTH, x2) if x1 < x2 else (x1, x2 + WIDTH)
        y1 = y2 = y1 + HEIGHT // 2
    else:
        x1, x2, y1 = x1 + WIDTH // 2, x2 + WIDTH // 2, y1 + HEIGHT
        x2 += max(-WIDTH // 3, min(WIDTH // 3, (x1 - x2) // 6))
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#5b6b7a" stroke-width="1.4"'
        ' marker-end="url(#head)"/>'
    )


def _box(x: int, y: int, width: int, text: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="5" fill="#e6eef5"'
        f' stroke="#3c5a75"/><text x="{x + width // 2}" y="{y + 22}" fill="#14212d">{text}</text>'
    )
