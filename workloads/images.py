# /// script
# requires-python = ">=3.8"
# dependencies = ["numpy>=1.19", "pillow>=9"]
# ///
"""Makes a folder of pictures to train on: grey, like chest X-rays, with 14 findings as labels.

    python images.py DIR --count 512 --size 264 --format png

DIR/train and DIR/validation (an eighth) hold the pictures, DIR/labels.csv a line for each
(`name,l0,...,l13`, the name as `train/00000.png`), and DIR/done.json, written last, the settings.
The same seed makes the same pictures. Where they are already, nothing is done. A finding is a
soft spot, each of its own place and size, so that a network can learn to see it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image

LABELS = 14
SPLITS = ("train", "validation")
# A finding's place (out and down from the middle, the edge at 1), radius and brightness. It may
# be on either side, so that a flipped picture keeps its labels.
FINDINGS = [
    (x, y, radius, light)
    for radius, light in ((0.04, 0.46), (0.10, 0.26))
    for x, y in (
        (0.36, -0.52),
        (0.52, -0.28),
        (0.30, -0.16),
        (0.54, 0.02),
        (0.34, 0.14),
        (0.54, 0.30),
        (0.38, 0.42),
    )
]


def main() -> None:
    """Makes the folder, or says in one line why it cannot."""
    options = _options()
    try:
        _make(options.folder, options)
    except OSError as error:
        where = getattr(error, "filename", None) or options.folder
        sys.exit(f"images.py: {where}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("images.py: interrupted; the same command starts anew", file=sys.stderr)
        sys.exit(130)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=512, help="pictures in all")
    parser.add_argument("--size", type=int, default=264, help="pixels along a side")
    parser.add_argument("--format", choices=("png", "jpeg"), default="png")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.count < 8 or options.size < 32 or options.seed < 0:
        parser.error("--count must be 8 or more, --size 32 or more, --seed 0 or more")
    return options


def _make(folder: Path, options: argparse.Namespace) -> None:
    settings = {name: value for name, value in vars(options).items() if name != "folder"}
    done, making = folder / "done.json", folder / "making.json"
    if done.exists():
        if done.read_text() == json.dumps(settings):
            return
        sys.exit(f"images.py: {folder} holds pictures of other settings: name another folder")
    _clear(folder, making)
    making.write_text(json.dumps(settings))
    rows = _draw_all(folder, options)
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["name", *(f"l{n}" for n in range(LABELS))], *rows])
    making.rename(done)


def _clear(folder: Path, making: Path) -> None:
    """Makes an empty folder, or empties one that was left half made; touches no other."""
    folder.mkdir(parents=True, exist_ok=True)
    if not making.exists() and any(folder.iterdir()):
        sys.exit(f"images.py: {folder} holds other files: name an empty or a new folder")
    for split in SPLITS:
        shutil.rmtree(folder / split, ignore_errors=True)
        (folder / split).mkdir()


def _draw_all(folder: Path, options: argparse.Namespace) -> list[list[object]]:
    validation = options.count // 8
    counts = zip(SPLITS, (options.count - validation, validation))
    tasks = [(split, index) for split, count in counts for index in range(count)]
    rows = []
    with Pool(len(os.sched_getaffinity(0))) as pool:
        for row in pool.imap(partial(_draw, folder, options), tasks, chunksize=8):
            rows.append(row)
            if sys.stderr.isatty():
                print(f"\r{len(rows)} of {len(tasks)} pictures", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return rows


def _draw(folder: Path, options: argparse.Namespace, task: tuple[str, int]) -> list[object]:
    """Writes one picture; its row of labels.csv."""
    split, index = task
    random = np.random.default_rng((options.seed, SPLITS.index(split), index))
    labels = random.random(LABELS) < 0.15
    picture = _picture(options.size, labels, random)
    name = f"{split}/{index:05d}.{options.format}"
    Image.fromarray(picture).save(folder / name, quality=90)
    return [name, *labels.astype(int).tolist()]


def _picture(size: int, labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A chest from the front: a bright body, dark lungs, spine, heart, ribs, and the findings."""
    turn, (right, down) = random.normal(0, 0.04), random.normal(0, 0.03, 2)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j].astype(np.float32)
    x, y = (x + turn * y - right) * random.normal(1, 0.05), (y - turn * x - down)
    width = 0.86 - 0.45 * _edge(-0.62 - y, 0.07)  # the neck is narrower than the shoulders
    body = _edge(width - np.abs(x), 0.04)
    lungs = _edge(1 - np.hypot((np.abs(x) - 0.42) / 0.28, (y + 0.02) / 0.66), 0.06)
    lungs *= _edge(0.52 - 0.35 * (np.abs(x) - 0.4) ** 2 - y, 0.03)  # the diaphragm's domes
    ribs = np.clip(np.sin(24 * (y + 0.9 * (np.abs(x) - 0.45) ** 2) + random.normal(0, 0.5)), 0, 1)
    picture = body * (0.62 - 0.44 * lungs) + 0.13 * body * lungs * ribs**2
    picture += 0.16 * body * np.exp(-((x / 0.10) ** 2)) * (1 + 0.15 * np.sin(45 * y))
    picture += 0.30 * lungs * _edge(1 - np.hypot((x - 0.14) / 0.34, (y - 0.28) / 0.28), 0.12)
    for right, down, radius, light in (f for f, there in zip(FINDINGS, labels) if there):
        right, down = random.normal((right * random.choice((-1, 1)), down), 0.02)
        picture += light * np.exp(-((x - right) ** 2 + (y - down) ** 2) / radius**2)
    picture += _clouds(size, random) * body + random.normal(0, 0.02, picture.shape)
    return (255 * np.clip(picture, 0, 1)).astype(np.uint8)


def _edge(inside: np.ndarray, softness: float) -> np.ndarray:
    """1 inside, 0 outside, and a soft edge between them."""
    return 0.5 + 0.5 * np.tanh(inside / softness)


def _clouds(size: int, random: np.random.Generator) -> np.ndarray:
    """Smooth unevenness, as tissue has."""
    coarse = random.normal(0, 0.05, (12, 12)).astype(np.float32)
    return np.asarray(Image.fromarray(coarse).resize((size, size), Image.BICUBIC))


if __name__ == "__main__":
    main()
