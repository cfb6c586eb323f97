"""``python -m tests.fuzz``: gives targets inputs for a while, and says what became of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz import page
from tests.fuzz.runner import Runner, best_engine, write_summary
from tests.fuzz.targets import TARGETS

NAMES = [target.name for target in TARGETS]


def main() -> int:
    """1 where an input failed, 0 where none did."""
    options = _options()
    names = options.targets or NAMES
    folder = options.folder or Path(tempfile.mkdtemp(prefix="gputrace-fuzz-"))
    engine = best_engine() if options.engine == "auto" else options.engine
    say(f"fuzz: {', '.join(names)}; engine {engine}; in {folder}")
    runner = Runner(folder, engine)
    for name in names:
        runner.run(name, options.seed, options.inputs, 60 * options.minutes / len(names))
        say(page.line(name, runner.summary([name])[name]))
    summary = runner.summary(names)
    if options.summary:
        write_summary(summary, options.summary)
    if options.page:
        page.write(summary, options.page)
    failures = runner.failures(names)
    for path, why in failures.items():
        say(f"fuzz: {path}: {why}")
    return 1 if failures else 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*NAMES, []], metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=10, help="for all targets together")
    parser.add_argument("--inputs", type=int, help="at most, for each target")
    parser.add_argument("--engine", choices=["auto", "atheris", "random"], default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="adds to what earlier runs left there")
    parser.add_argument("--summary", type=Path, help="a JSON file of the counts to write")
    parser.add_argument("--page", type=Path, help="a page whose table is to be written anew")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
