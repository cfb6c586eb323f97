"""Cures of the host: modes for debugging; cores of the node of a rank's GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.tried_programs import InProgram


def test_ranks_get_whole_cores_of_the_node_of_their_gpu(
    hooks: InProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of four cores with two threads each: cores 0 to 3 and 8 to 11 are of node 0."""
    monkeypatch.setattr(hooks.host, "_SYSTEM", str(tmp_path))
    for core in range(16):
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{core}"
        (folder / f"node{core // 4 % 2}").mkdir(parents=True)
        (folder / "topology").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    layout = sorted(hooks.host._layout(core) for core in range(16))
    assert [hooks.host._cores_of(rank, [1, 1, 0, 0], layout) for rank in range(4)] == [
        [4, 12, 5, 13],
        [6, 14, 7, 15],
        [0, 8, 1, 9],
        [2, 10, 3, 11],
    ]
    assert hooks.host._cores_of(1, [-1, -1], layout) == [4, 12, 5, 13, 6, 14, 7, 15]
    assert hooks.host._layout(99) == (0, 99, 99)


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
    ],
)
def test_a_rank_is_known_by_what_its_launcher_says(
    hooks: InProgram, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: given.append(cores))
    monkeypatch.setattr(hooks.host, "_layout", lambda core: (0, core, core))
    hooks.host.pin_cores()
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    hooks.host.pin_cores()
    assert given == [[2, 3]]


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        (None, [0, 1]),
        ("2, 0", [1, 0]),
        ("GPU-c2,GPU-a0b1", [1, 0]),
        ("GPU-none,GPU-a0b1", [-1, -1]),
        ("7,0", [-1, -1]),
    ],
)
def test_the_node_of_a_gpu_is_known_by_its_number_and_by_its_uuid(
    hooks: InProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    nodes: list[int],
) -> None:
    monkeypatch.setattr(hooks.host, "_SYSTEM", str(tmp_path))
    monkeypatch.setattr(hooks.host, "_GPUS", str(tmp_path / "gpus"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for number, uuid in enumerate(("GPU-a0b1", "GPU-b1", "GPU-c2d3")):
        bus = f"0000:{number}A:00.0"
        card, device = (tmp_path / "gpus" / bus, tmp_path / "bus/pci/devices" / bus.lower())
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\n")
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{min(number, 1)}\n")
    assert hooks.host._gpu_nodes(2) == nodes


def test_a_mode_for_debugging_is_off_while_its_cure_is_on(
    hooks: InProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[tuple[bool, bool]] = []
    torch = SimpleNamespace(
        set_anomaly_enabled=lambda mode, check_nan=True: enabled.append((mode, check_nan)),
        cuda=SimpleNamespace(_lazy_init=lambda: None),
    )
    hooks.start("skip-anomalies", "async-launches")
    hooks.host._skip_anomalies(torch)
    torch.set_anomaly_enabled(True, False)
    hooks.state._switch_to(set())
    hooks.state._switch_to({"skip-anomalies"})
    assert enabled == [(False, False), (True, False), (False, False)]
    hooks.host._let_launches_return(torch)
    # As many programs do, in their first lines.
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    torch.cuda._lazy_init()
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "0"
    assert hooks.state.trial.has >= {"anomalies", "launches-wait"}
    assert [change["cure"] for change in hooks.changes] == ["skip-anomalies", "async-launches"]
