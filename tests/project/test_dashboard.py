"""The dashboard for Grafana shows the metrics of `gputrace watch`, all of them and no other."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from gputrace.cli.watch import families
from gputrace.model.sketches import SketchReport
from tests.helpers.command import ROOT

DASHBOARD: Final[dict[str, Any]] = json.loads((ROOT / "docs" / "grafana.json").read_text())
LABELS: Final = {
    f"gputrace_{name}": set(labels)
    for name, _, labels, _ in families(SketchReport(1, "sketches", (), ()))
}
QUERIES: Final = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES: Final = [one["query"]["query"] for one in DASHBOARD["templating"]["list"][1:]]


def test_every_metric_is_shown_and_no_other() -> None:
    assert set(re.findall(r"\bgputrace_\w+", " ".join(QUERIES))) == LABELS.keys()
    assert set(re.findall(r"\bgputrace_\w+", " ".join(VARIABLES))) <= LABELS.keys()


def test_queries_and_legends_use_labels_that_their_metrics_have() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            metrics = re.findall(r"\b(gputrace_\w+)(?:\{(.*?)\})?", target["expr"])
            assert metrics
            for name, selectors in metrics:
                assert set(re.findall(r"(\w+)=", selectors)) <= LABELS[name]
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= LABELS[metrics[0][0]]


def test_panels_have_a_place_and_an_id_of_their_own() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in DASHBOARD["panels"]}) == len(QUERIES)
