"""How well the step time without one cause is predicted, on generated runs.

A run is generated, analysed, and generated again with the cause really taken away: the prediction
is compared with the step of that second run. What one run cannot have is left out: data waits that
are drawn by chance differ from run to run, and a CUDA graph of the generator has one stream.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import numpy as np

from benchmarks.options import Options
from tests.synthetic import random_plan
from tests.synthetic.cured import CLOSE, CURED, Score, compare, fair

RUNS: Final = 100
LEAST_CLOSE: Final = 0.95


def run(options: Options) -> int:
    """Prints the table; gives 1 where too few predictions are close."""
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        scores = [score for part in pool.map(_scores, range(RUNS)) for score in part]
    print(table(scores))
    close = sum(abs(score.error) <= CLOSE for score in scores)
    return int(close < LEAST_CLOSE * len(scores)) if options.check else 0


def _scores(seed: int) -> list[Score]:
    return list(compare(fair(random_plan(seed))))


def table(scores: list[Score]) -> str:
    """The figures by cure, as Markdown."""
    lines = [
        "| cure | runs | gain | median error | 90 % within | largest | within 5 % | in range |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for cure in (*CURED, "all"):
        own = [score for score in scores if cure in (score.cure, "all")]
        if own:
            lines.append(_row(cure, own))
    wrong = [
        f"- run {s.seed}, {s.cure}: {s.error:+.1%}, {s.before / 1e6:.2f} to {s.true / 1e6:.2f} ms"
        for s in scores
        if abs(s.error) > CLOSE
    ]
    return "\n".join([*lines, "", *(wrong and ["Off by more:", "", *wrong])])


def _row(cure: str, scores: list[Score]) -> str:
    errors = np.abs([score.error for score in scores])
    gain = float(np.mean([1 - score.true / score.before for score in scores]))
    cells = [
        cure,
        str(len(scores)),
        f"{gain:.0%}",
        f"{np.median(errors):.2%}",
        f"{np.percentile(errors, 90):.2%}",
        f"{errors.max():.1%}",
        f"{np.mean(errors <= CLOSE):.0%}",
        f"{np.mean([score.inside for score in scores]):.0%}",
    ]
    return f"| {' | '.join(cells)} |"
