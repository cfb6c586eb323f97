"""A CUDA ordinal is not a card: which card a process means, as far as an export tells."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

import gputrace
from tests.helpers.exports import KERNEL, STEP, Export, global_id


class Shown(NamedTuple):
    gpu: int
    known: bool
    device: int
    rank: int
    busy_ns: int


def shown(export: Export, folder: Path) -> list[Shown]:
    """The GPUs as the report names them."""
    with gputrace.open(export.write(folder / "trace.sqlite")) as trace:
        gpus = trace.analyze().gpus
    return [
        Shown(gpu.gpu, gpu.gpu_known, gpu.device, gpu.rank, gpu.span_ns - gpu.idle_ns)
        for gpu in gpus
    ]


def four_cards() -> Export:
    """A real node: nsys numbers its four cards against the order of their PCI addresses."""
    buses = ("0000:c1:00.0", "0000:82:00.0", "0000:41:00.0", "0000:03:00.0")
    export = Export()
    for id, bus in enumerate(buses):
        export.card(id, bus, "NVIDIA A100")
    return export


def test_cards_are_numbered_by_pci_address_as_nvidia_smi_does(tmp_path: Path) -> None:
    export = four_cards().ordinal(100, 0, 3).ordinal(100, 1, 0)
    export.kernel(0, 10, deviceId=0).kernel(0, 30, deviceId=1)
    assert shown(export, tmp_path) == [Shown(0, True, 0, 0, 10), Shown(3, True, 1, 0, 30)]


def test_addresses_are_hexadecimal_in_either_case(tmp_path: Path) -> None:
    export = Export().card(0, "0000:C1:00.0").card(1, "0000:0a:00.0").card(2, "0000:9B:00.0")
    export.ordinal(100, 0, 0).kernel(0, 10)
    assert shown(export, tmp_path) == [Shown(2, True, 0, 0, 10)]


def test_the_recorder_s_own_number_stands_where_addresses_are_missing(tmp_path: Path) -> None:
    export = Export().card(0, None).card(5, None).ordinal(100, 0, 5).kernel(0, 10)
    assert shown(export, tmp_path) == [Shown(5, True, 0, 0, 10)]


def test_processes_that_mean_one_card_share_it(tmp_path: Path) -> None:
    export = four_cards().ordinal(7, 0, 2).ordinal(8, 1, 2)
    export.kernel(0, 10, pid=7, deviceId=0).kernel(20, 40, pid=8, deviceId=1)
    (gpu,) = shown(export, tmp_path)
    assert (gpu.gpu, gpu.known, gpu.busy_ns) == (1, True, 30)


def test_processes_that_each_see_one_card_have_different_ones(tmp_path: Path) -> None:
    export = four_cards().ordinal(7, 0, 3).ordinal(8, 0, 2)
    export.kernel(0, 10, pid=7).kernel(0, 20, pid=8)
    assert shown(export, tmp_path) == [Shown(0, True, 0, 0, 10), Shown(1, True, 0, 1, 20)]


def test_the_only_card_of_a_machine_is_known_without_a_map(tmp_path: Path) -> None:
    export = Export().card(0, "0000:03:00.0").kernel(0, 10)
    assert shown(export, tmp_path) == [Shown(0, True, 0, 0, 10)]


@pytest.mark.parametrize(
    "export",
    [
        Export().kernel(0, 10, deviceId=1),
        four_cards().kernel(0, 10, deviceId=1),
        four_cards().ordinal(100, 1, None).kernel(0, 10, deviceId=1),
        four_cards().ordinal(999, 1, 2).kernel(0, 10, deviceId=1),
    ],
    ids=["no cards", "no map", "a map without the card", "a map of another process"],
)
def test_an_ordinal_that_nothing_explains_is_shown_as_it_is(export: Export, tmp_path: Path) -> None:
    assert shown(export, tmp_path) == [Shown(1, False, 1, 0, 10)]


def test_cards_that_the_capture_made_visible_are_known(tmp_path: Path) -> None:
    export = Export().kernel(0, 10, deviceId=0).kernel(0, 20, deviceId=1)
    export.add("META_DATA_CAPTURE", name="ENVIRONMENT", value="A=1;CUDA_VISIBLE_DEVICES=6,2;B=0")
    assert shown(export, tmp_path) == [Shown(2, True, 1, 0, 20), Shown(6, True, 0, 0, 10)]


@pytest.mark.parametrize("value", ["CUDA_VISIBLE_DEVICES=GPU-8adfe2b8", "CUDA_VISIBLE_DEVICES="])
def test_cards_made_visible_by_uuid_are_not_guessed(value: str, tmp_path: Path) -> None:
    export = Export().kernel(0, 10).add("META_DATA_CAPTURE", name="ENVIRONMENT", value=value)
    assert shown(export, tmp_path) == [Shown(0, False, 0, 0, 10)]


def test_without_a_map_processes_on_different_ordinals_count_alike(tmp_path: Path) -> None:
    """torchrun: each rank works on its own ordinal, and leaves a little on ordinal 0."""
    export = Export().kernel(0, 90, pid=7).kernel(100, 190, pid=7)
    export.kernel(0, 90, pid=8, deviceId=1).kernel(100, 190, pid=8, deviceId=1)
    export.kernel(200, 210, pid=8, deviceId=0)
    assert shown(export, tmp_path) == [Shown(0, False, 0, 0, 190), Shown(1, False, 1, 1, 180)]


def test_without_a_map_processes_on_the_same_ordinal_have_their_own_card(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES set for each: every rank calls its card 0."""
    export = Export().kernel(0, 10, pid=8).kernel(0, 20, pid=7)
    assert shown(export, tmp_path) == [Shown(0, False, 0, 0, 20), Shown(0, False, 0, 1, 10)]


def test_an_export_without_processes_is_one_process(tmp_path: Path) -> None:
    export = Export().kernel(0, 10, deviceId=0).kernel(0, 20, deviceId=1).strip(KERNEL, "globalPid")
    assert shown(export, tmp_path) == [Shown(0, False, 0, 0, 10), Shown(1, False, 1, 0, 20)]


def test_an_export_without_devices_is_one_gpu(tmp_path: Path) -> None:
    export = Export().kernel(0, 10).kernel(20, 40).strip(KERNEL, "deviceId")
    assert [gpu.busy_ns for gpu in shown(export, tmp_path)] == [30]


def test_cards_of_two_machines_are_different(tmp_path: Path) -> None:
    export = Export().card(0, "0000:03:00.0")
    export.kernel(0, 10, globalPid=global_id(7, host=1))
    export.kernel(0, 20, globalPid=global_id(7, host=2))
    assert [gpu.busy_ns for gpu in shown(export, tmp_path)] == [10, 20]


def test_an_ordinal_that_is_another_card_s_number_is_not_that_card(tmp_path: Path) -> None:
    """Of the two devices of a process only one has its card listed, and that is number 1."""
    export = Export().card(0, "0000:06:00.0").card(1, "0000:07:00.0").ordinal(100, 0, 1)
    for step in range(30):
        for device in (0, 1):
            begin = 1_000_000 * step + 5_000 * device + 1_000
            at = begin, begin + 990_000
            thread, mark = global_id(100, thread=100), export.string("step")
            export.add(STEP, start=at[0], end=at[1], globalTid=thread, nameId=mark, step=step)
            for start in range(begin, at[1] - 60_000, 70_000):
                name = f"kernel_{(start - begin) // 70_000}"
                export.kernel(start, start + 50_000, name, deviceId=device)
    busy_ns = 30 * 14 * 50_000
    assert shown(export, tmp_path) == [
        Shown(2, False, 1, 0, busy_ns),
        Shown(1, True, 0, 0, busy_ns),
    ]
