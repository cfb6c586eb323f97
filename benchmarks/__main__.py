"""`python -m benchmarks [NAME…]`: runs the benchmarks named, or all."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, Final

from benchmarks.options import Options


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One entry: `module` has a function `run(options) -> exit code`."""

    name: str
    module: str
    summary: str
    share: float = 0
    """Its part of --minutes, beside those run with it; 0: it has all of them."""

    def run(self, options: Options) -> int:
        """Imported only now: what one benchmark needs must not weigh on another."""
        module: Any = import_module(self.module)
        code: int = module.run(options)
        return code


BENCHMARKS: Final = (
    Benchmark("speed", "benchmarks.speed", "time and memory, beside the floor and the peers"),
    Benchmark("profile", "benchmarks.profiles", "what the processor does (needs py-spy)"),
    Benchmark("ranks", "benchmarks.ranks", "many ranks, by one process and by a cluster"),
    Benchmark("harmless", "benchmarks.harmless", "programs end as without a recorder (GPU)", 4),
    Benchmark("overhead", "benchmarks.overhead", "what recording costs training (GPU)", 9),
    Benchmark("phases", "benchmarks.phases", "phases of a step, by the loops' clocks (GPU)", 4),
    Benchmark("modules", "benchmarks.modules", "modules, MFU, energy, by others' counts (GPU)", 3),
    Benchmark("sick", "benchmarks.sick", "cures by gputrace try and by hand (GPU)", 6),
    Benchmark("causes", "benchmarks.causes.run", "planted faults, named by the first line (GPU)"),
    Benchmark("loaders", "benchmarks.loaders", "steps by loader workers, as predicted (GPU)", 4),
    Benchmark("idle", "benchmarks.idle", "what a CUPTI that records nothing costs (needs a GPU)"),
    Benchmark("hour", "benchmarks.hour", "an hour in a ring: is its cost flat (--minutes 60)"),
    Benchmark("minutes", "benchmarks.minutes", "the same on two GPUs (--minutes 4)"),
    Benchmark("agreement", "benchmarks.agreement", "whether nsys sees the same (needs GPUs)"),
    Benchmark("browse", "benchmarks.browse", "the browser: opening, and answering a key"),
    Benchmark("page", "benchmarks.page", "the page: time, memory and size"),
    Benchmark("frames", "benchmarks.frames", "the page: a frame while it moves (needs Chromium)"),
    Benchmark("accuracy", "benchmarks.accuracy", "steps and causes found in generated runs"),
    Benchmark("kinds", "benchmarks.kinds", "what was recorded, and how often it turned"),
    Benchmark("compared", "benchmarks.compared", "what differs between generated runs"),
    Benchmark("losses", "benchmarks.losses", "whether rows that are missing are reported"),
    Benchmark("hosts", "benchmarks.hosts", "planted causes of a late host, in real processes"),
    Benchmark("diagnosis", "benchmarks.diagnosis", "planted causes found in generated runs"),
    Benchmark("verdicts", "benchmarks.verdicts", "the first line of recordings with known truth"),
    Benchmark("cures", "benchmarks.cures", "faults of real training, and their cures (two GPUs)"),
    Benchmark("whatif", "benchmarks.whatif", "predicted against simulated step times"),
    Benchmark("bounds", "benchmarks.bounds", "no prediction undercuts the compute that stays"),
    Benchmark("trials", "benchmarks.trials", "answers of gputrace try in generated trials"),
    Benchmark("budgets", "benchmarks.budgets", "what gputrace try proves in a budget"),
)

GROUPS: Final = {"gpu": ("harmless", "overhead", "phases", "modules", "sick", "loaders")}
"""Names that stand for several."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; gives back the worst exit code."""
    # Who installs a package has it compiled; so must be what is measured.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    parser = _parser()
    parsed = parser.parse_args(arguments)
    names = {one for name in parsed.names for one in GROUPS.get(name, (name,))}
    if "help" in names:
        parser.print_help()
        return 0
    if unknown := names - {benchmark.name for benchmark in BENCHMARKS}:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; try help")
    options = Options(
        parsed.check,
        parsed.large,
        parsed.peers,
        parsed.runs,
        parsed.chart,
        parsed.seeds,
        parsed.minutes + parsed.seconds / 60,
        tuple(filter(None, parsed.parts.split(","))),
        parsed.save,
        parsed.cpu,
        parsed.huge,
    )
    chosen = [benchmark for benchmark in BENCHMARKS if not names or benchmark.name in names]
    return max(_run_all(chosen, options))


def _run_all(chosen: Sequence[Benchmark], options: Options) -> Iterator[int]:
    """Run benchmarks one by one, and yield their exit codes.

    Experiments get their shares of the minutes that are left: what one leaves, the next ones have.
    """
    ends = monotonic() + 60 * options.minutes
    for at, benchmark in enumerate(chosen):
        minutes = options.minutes
        if minutes and benchmark.share:
            share = benchmark.share / sum(other.share for other in chosen[at:])
            # None at all would mean that there is no limit.
            minutes = max((ends - monotonic()) / 60 * share, 1e-3)
        yield benchmark.run(replace(options, minutes=minutes))


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(
        [f"  {benchmark.name:<12}{benchmark.summary}" for benchmark in BENCHMARKS]
        + [f"  {name:<12}{', '.join(group)}" for name, group in GROUPS.items()]
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Benchmarks of gputrace; all of them unless some are named:\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a benchmark, or help")
    parser.add_argument(
        "--check", action="store_true", help="only compare with the committed bounds; 1 if worse"
    )
    parser.add_argument("--large", action="store_true", help="10 million kernels too (minutes)")
    parser.add_argument(
        "--huge",
        action="store_true",
        help="speed: 100 million kernels, ranks: 1,000 and 10,000, and no other (40 GB of disk)",
    )
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="leave other programs out"
    )
    parser.add_argument(
        "--runs", type=int, metavar="N", help="runs a command (5; 30 of harmless, 3 rounds)"
    )
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="draw speed beside the peers' as SVG"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=200,
        metavar="N",
        help="generated runs of diagnosis, and of each kind (200)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=0,
        metavar="N",
        help="how long hour and minutes record (left out), and what GPU experiments may take",
    )
    parser.add_argument("--seconds", type=float, default=0, metavar="N", help="the same")
    parser.add_argument(
        "--parts", default="", metavar="A,B", help="parts of GPU experiments, by what they print"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="keep figures of GPU experiments as they come"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="GPU experiments with tiny models on the CPU: a trial"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
