"""Links of the GPUs: how fast they are, what slow ones cost, and what passes through the host."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import gputrace
from gputrace.analyzers.collectives import match_collectives
from gputrace.analyzers.gpu_links import Links, able, badness, measure_links, pcie_rate
from gputrace.api import Report
from gputrace.model.nvml import Card
from tests.helpers.examples import few
from tests.helpers.exports import D2H, H2D, Export, Opened
from tests.helpers.handmade import MS, US, ids
from tests.helpers.lookups import finding_of
from tests.helpers.per_gpu import gpus_of
from tests.helpers.sentences import words_of
from tests.synthetic import Plan, simulate, write_nsys, write_nvml
from tests.synthetic.link_plants import switches
from tests.synthetic.nvml import Row, Values, nvlinks, pcie

Link = Callable[[int, int], Row]
ONE_PROCESS = Plan(
    steps=12, warmup_steps=0, kernels_per_step=60, gpus_per_process=4, seed=3, sync_every_step=True
)
RANKS = Plan(
    steps=12, warmup_steps=0, kernels_per_step=60, ranks=4, allreduces=3, seed=3,
    allreduce_ns=2_000_000, sync_every_step=True,
)  # fmt: skip
HOST_BRIDGE = ((0, 2), (0, 3), (1, 2), (1, 3))
"""Pairs of cards that are not under one switch."""


def run(
    tmp_path: Path,
    plan: Plan,
    link: Link | None = None,
    value: Callable[[int, int, Row], Values] | None = None,
    **changes: object,
) -> Report:
    path = tmp_path / "run.sqlite"
    path.unlink(missing_ok=True)
    recording = simulate(Plan(**(plan.__dict__ | changes)))
    write_nsys(recording, path)
    write_nvml(recording, path, link=link, value=value)
    with gputrace.open(path) as trace:
        return trace.analyze()


class TestWhatLinksCarry:
    @pytest.mark.parametrize(
        ("model", "link", "gigabytes"),
        [
            ("Tesla P100-SXM2-16GB", "NV1", 20),
            ("Tesla V100-SXM2-32GB", "NV6", 150),
            ("NVIDIA A100-SXM4-80GB", "NV12", 300),
            ("NVIDIA H200", "NV18", 450),
            ("NVIDIA B200", "NV18", 900),
        ],
    )
    def test_nvlinks_by_generation(self, model: str, link: str, gigabytes: int) -> None:
        card = Card(0, name=model)
        assert able(link, card, card) == gigabytes * 10**9

    def test_pcie_is_as_fast_as_the_slower_slot(self) -> None:
        fast, slow = Card(0, pcie_gen_max=4, pcie_width_max=16), Card(1, pcie_gen_max=3)
        assert able("PIX", fast, fast) == pytest.approx(31.5e9, rel=0.01)
        assert able("PHB", fast, slow) is None
        slow = Card(1, pcie_gen_max=3, pcie_width_max=8)
        assert able("PHB", fast, slow) == pytest.approx(7.88e9, rel=0.01)
        assert able("", fast, fast) is None

    def test_a_lane_carries_what_its_generation_s_coding_leaves(self) -> None:
        """Of generation 6, which sends flits of 256 bytes, 242: 64 GT/s make 7.5625 GB/s."""
        lanes = [pcie_rate(generation, 1) for generation in range(1, 7)]
        coded = [2.5 * 8 / 10, 5 * 8 / 10, 8 * 128 / 130, 16 * 128 / 130, 32 * 128 / 130]
        assert lanes == [int(rate * 1e9 / 8) for rate in (*coded, 64 * 242 / 256)]
        assert pcie_rate(None, 16) == pcie_rate(6, None) == pcie_rate(9, 16) == 0

    def test_links_have_an_order(self) -> None:
        worst_last = ["NV18", "NV4", "PIX", "PXB", "PHB", "NODE", "SYS", ""]
        assert sorted(worst_last, key=badness) == worst_last


class TestSlowerLinks:
    @pytest.mark.parametrize("ratio", [1.17, 1.22])
    def test_a_server_on_a_gpu_loses_to_phb_what_was_measured(
        self, tmp_path: Path, ratio: float
    ) -> None:
        """Published for six GTX 1070: pairs under one switch are 1.17 to 1.22 times as fast."""
        server: dict[str, Any] = {"exchange": "gpu-server", "slow_link": ratio}
        even = run(tmp_path, ONE_PROCESS, switches, **server)
        slow = run(tmp_path, ONE_PROCESS, switches, **server, slow_pairs=HOST_BRIDGE)
        assert "topology" not in ids(even)
        finding = finding_of(slow, "topology")
        assert finding.evidence["ratio"] == pytest.approx(ratio, rel=0.01)
        assert (finding.evidence["link"], finding.evidence["than"]) == ("PHB", "PIX")
        lost = (slow.steps.mean_ns or 0) - (even.steps.mean_ns or 0)
        assert finding.impact_ns == pytest.approx(lost, rel=0.05)

    def test_all_reduces_of_pairs_lose_to_phb_what_was_measured(self, tmp_path: Path) -> None:
        def link(gpu: int, peer: int) -> Row:
            return pcie("PIX" if {gpu, peer} == {0, 1} else "PHB")(gpu, peer)

        pairs: dict[str, Any] = {"group_size": 2, "slow_link": 1.2}
        assert "topology" not in ids(run(tmp_path, RANKS, link, **pairs))
        finding = finding_of(run(tmp_path, RANKS, link, **pairs, slow_pairs=((2, 3),)), "topology")
        assert finding.evidence["ratio"] == pytest.approx(1.2, rel=0.01)
        assert finding.gpus == (2, 3)
        # Three all-reduces of 2 ms take 0.4 ms longer each, partly beside the backward pass.
        assert 0.5 * 1.2 * MS < finding.impact_ns <= 1.2 * MS * 1.1

    def test_a_server_on_the_cpu_has_no_use_for_links(self, tmp_path: Path) -> None:
        """Published: pairs under one switch are 1.01 times as fast."""
        server: dict[str, Any] = {
            "exchange": "cpu-server",
            "slow_link": 1.22,
            "slow_pairs": HOST_BRIDGE,
        }
        assert "topology" not in ids(run(tmp_path, ONE_PROCESS, switches, **server))

    @pytest.mark.parametrize("seed", range(few(2)))
    def test_links_that_scatter_are_not_slower(self, tmp_path: Path, seed: int) -> None:
        plan = {**RANKS.__dict__, "seed": seed, "jitter": 0.15, "group_size": 2}
        assert "topology" not in ids(run(tmp_path, Plan(**plan), switches))

    @pytest.mark.parametrize(("slower", "named"), [(1.0, False), (1.17, True), (2.0, True)])
    def test_a_ring_that_crosses_host_bridges_loses_there(
        self, tmp_path: Path, slower: float, named: bool
    ) -> None:
        crossings = ((1, 2), (3, 0))
        plan = {"exchange": "ring", "slow_pairs": crossings, "slow_link": slower}
        report = run(tmp_path, Plan(**(ONE_PROCESS.__dict__ | plan)), switches)
        assert ("topology" in ids(report)) is named
        assert "gpu0-skew" not in ids(report)

    def test_far_slower_links_are_the_verdict(self, tmp_path: Path) -> None:
        report = run(
            tmp_path, RANKS, lambda a, b: pcie("PIX" if {a, b} == {0, 1} else "SYS")(a, b),
            group_size=2, slow_pairs=((2, 3),), slow_link=3.0,
        )  # fmt: skip
        assert report.findings[0].id == "topology"


class TestABetterChoice:
    def test_cards_of_the_machine_that_are_joined_better_are_named(self, tmp_path: Path) -> None:
        """Cards 0 and 1 are apart; 0 and 2 share a switch, and so do 1 and 3."""
        path, recording = tmp_path / "run.sqlite", simulate(Plan(**RANKS.__dict__ | {"ranks": 2}))
        write_nsys(recording, path)
        write_nvml(recording, path, link=pcie("SYS"))
        names = ("gpu", "peer", "link", "ancestor")
        with closing(sqlite3.connect(path)) as database, database:
            for a, b in [(2, 3), (0, 3), (1, 2), (0, 2), (1, 3)]:
                shown = "PIX" if (a, b) in [(0, 2), (1, 3)] else "SYS"
                for pair in ((a, b), (b, a)):
                    database.execute(
                        f"INSERT INTO GPUTRACE_TOPOLOGY ({', '.join(names)}) VALUES (?, ?, ?, ?)",
                        (*pair, shown, shown),
                    )
        with gputrace.open(path) as trace:
            finding = finding_of(trace.analyze(), "topology")
        assert finding.evidence["better_choice"] == "0,2"
        assert "CUDA_VISIBLE_DEVICES=0,2" in finding.advice
        assert (finding.severity, finding.impact_ns) == ("low", 0)

    def test_no_other_cards_no_advice(self, tmp_path: Path) -> None:
        report = run(tmp_path, RANKS, pcie("SYS"), ranks=2)
        assert "topology" not in ids(report)


class TestThroughTheHost:
    def test_copies_by_way_of_the_host_are_paired(self, tmp_path: Path) -> None:
        report = run(
            tmp_path, ONE_PROCESS, pcie("PHB", "CNS"), exchange="gpu-server", peer_access=False
        )
        rows = {(row.from_, row.to): row for row in report.links}
        # In each of 12 steps three GPUs send to the first, and it to each of them.
        assert [rows[0, gpu].staged_copies for gpu in (1, 2, 3)] == [12, 12, 12]
        assert [rows[gpu, 0].staged_copies for gpu in (1, 2, 3)] == [12, 12, 12]
        assert rows[1, 2].staged_copies == 0
        assert rows[0, 1].staged_bytes == 12 * ONE_PROCESS.exchange_bytes
        finding = report.findings[0]
        assert finding.id == "host-staged-comm"
        assert finding.evidence["peer_access"] == "CNS"

    def test_straight_copies_are_not_staged(self, tmp_path: Path) -> None:
        report = run(tmp_path, ONE_PROCESS, switches, exchange="gpu-server")
        assert "host-staged-comm" not in ids(report)
        assert sum(row.staged_copies for row in report.links) == 0

    def test_copies_as_slow_as_pcie_do_not_use_nvlink(self, tmp_path: Path) -> None:
        """The generated copies run at 40 GB/s; 18 NVLinks carry 450."""
        report = run(tmp_path, ONE_PROCESS, nvlinks, exchange="gpu-server")
        finding = finding_of(report, "host-staged-comm")
        assert finding.evidence["bandwidth"] == pytest.approx(40e9, rel=0.01)

    @pytest.mark.parametrize(("nvlink", "named"), [(0, True), (200, False)])
    def test_nvlink_that_carries_nothing_gives_nccl_through_the_host_away(
        self, tmp_path: Path, nvlink: int, named: bool
    ) -> None:
        def counters(gpu: int, time: int, row: Row) -> Values:
            return {"nvlinkTx": 10**9 + time * nvlink, "pcieTx": 10**9 + time * 5}

        report = run(tmp_path, RANKS, nvlinks, counters)
        assert ("host-staged-comm" in ids(report)) is named
        if named:
            finding = report.findings[0]
            assert finding.id == "host-staged-comm"
            assert "NCCL_P2P_DISABLE" in finding.advice

    def test_nccl_without_peer_access_is_through_the_host(self, tmp_path: Path) -> None:
        finding = finding_of(run(tmp_path, RANKS, pcie("PHB", "CNS")), "host-staged-comm")
        assert "(CNS)" in words_of(finding)
        assert "host-staged-comm" not in ids(run(tmp_path, RANKS, pcie("PHB")))


class TestPairingOfCopies:
    """Two GPUs of one process; a copy of 1 MB takes 100 µs."""

    def links(self, opened: Opened, export: Export) -> Links:
        with opened(export) as trace:
            gpus = gpus_of(trace)
            links = measure_links(gpus, match_collectives(gpus))
        assert links is not None
        return links

    def copies(self, *rows: tuple[int, int, int, int]) -> Export:
        """Copies by kind, device, start in us, and process."""
        export = Export().kernel(0, 1).kernel(0, 1, deviceId=1).kernel(0, 1, pid=200, deviceId=1)
        for kind, device, start, pid in rows:
            end = (start + 100) * US
            export.copy(start * US, end, kind, pid=pid, deviceId=device, bytes=1_000_000)
        return export

    def test_the_next_copy_of_the_size_to_another_gpu_is_the_second_half(
        self, opened: Opened
    ) -> None:
        links = self.links(opened, self.copies((D2H, 0, 10, 100), (H2D, 1, 115, 100)))
        assert [(row.from_, row.to) for row in links.rows if row.staged_copies] == [(0, 1)]
        assert links.rows[0].staged_ns == 205 * US

    def test_a_copy_much_later_is_another_one(self, opened: Opened) -> None:
        links = self.links(opened, self.copies((D2H, 0, 10, 100), (H2D, 1, 3_000, 100)))
        assert len(links.staged) == 0

    @pytest.mark.parametrize(("communicates", "staged"), [(False, 2), (True, 0)])
    def test_a_gpu_that_gets_back_its_own_is_not_staged_where_gpus_communicate(
        self, opened: Opened, communicates: bool, staged: int
    ) -> None:
        """An optimizer on the CPU: gradients to it, parameters back, on both GPUs at once."""
        rows = [(D2H, gpu, 10, 100) for gpu in (0, 1)] + [(H2D, gpu, 200, 100) for gpu in (0, 1)]
        export = self.copies(*rows)
        if communicates:
            export.kernel(1_000 * US, 1_010 * US, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
        assert len(self.links(opened, export).staged) == staged


def test_the_json_calls_the_ends_from_and_to(tmp_path: Path) -> None:
    report = run(tmp_path, ONE_PROCESS, switches, exchange="gpu-server")
    rows = json.loads(report.render("json"))["links"]
    assert {(row["from"], row["to"]) for row in rows} == {
        (a, b) for a in range(4) for b in range(4) if a != b
    }


def test_reports_show_what_went_between_gpus(tmp_path: Path) -> None:
    report = run(tmp_path, ONE_PROCESS, switches, exchange="gpu-server")
    for form in ("text", "markdown"):
        shown = report.render(form)
        assert "Copies between GPUs" in shown
        line = next(line for line in shown.splitlines() if "gpu 0 to gpu 1" in line)
        assert [cell for cell in line.replace("|", " ").split() if cell not in "–"] == [
            "gpu", "0", "to", "gpu", "1", "PIX", "12", "720", "MB", "39.9", "63"
        ]  # fmt: skip
