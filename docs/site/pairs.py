"""The table of measured predictions, from the pairs that ship with gputrace."""

from __future__ import annotations

from gputrace.analyzers import whatif


def markdown() -> str:
    """A row for each pair of a prediction and its outcome, with how far it was off."""
    lines = ["| cure | training | recorded | predicted | range | measured | off by |"]
    lines.append("| :-- | :-- | --: | --: | --: | --: | --: |")
    for pair in whatif.pairs():
        now = "" if pair.now_ms is None else f"{pair.now_ms:g}"
        known = "" if pair.within is None else f"{pair.low_ms:g} to {pair.high_ms:g}"
        cells = [
            f"`{pair.cure}`" if pair.cure else "not known",
            f"{pair.program}{'' if pair.counts else ' (earlier rules)'}",
            *(now, f"{pair.predicted_ms:g}", known, f"{pair.measured_ms:g}"),
            f"{100 * (1 / pair.ratio - 1):+.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
