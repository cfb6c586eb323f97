"""Where the real recordings are, and what is known of them."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).parents[1] / "data"
SHARED: Final = Path(__file__).parents[3] / "shared"
"""Beside the checkout on the machines of some developers: recordings too large for it."""

SMALL: Final = tuple(sorted(path.name.removesuffix(".xz") for path in DATA.glob("*.sqlite.xz")))
CUTS: Final = (
    "h200x2-ddp-validation-12-19.sqlite",
    "h200x4-dataparallel-7-9.sqlite",
    "h200x4-ddp-starved-9-15.sqlite",
)
"""Those of them that are parts of larger recordings, of which only the whole is a reference."""
REFERENCE: Final[dict[str, dict[str, dict[str, int]]]] = json.loads(
    (DATA / "nsys-reference.json").read_text(encoding="utf-8")
)
"""By file and CUDA ordinal: the partition of the whole span, by a plain union of intervals."""


def packed(name: str) -> Path:
    """The xz file of a recording, which may not be here."""
    small = DATA / f"{name}.xz"
    return small if small.exists() else SHARED / "traces" / "nsys" / f"{name}.xz"


def unpack(name: str, folder: Path) -> Path:
    """The recording, unpacked into a folder."""
    target = folder / name
    with lzma.open(packed(name)) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    return target


def shared(*parts: str) -> Path:
    """A path in the shared folder, which may not be here."""
    return SHARED.joinpath(*parts)
