"""From a study to its runs: their order, their keys, what each script gets, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputrace.errors import MissingError, UsageError
from gputrace.studies.framework_environments import Framework, check_names
from gputrace.studies.plan import (
    PlannedRun,
    arguments_of,
    configurations_of,
    find_gpus,
    groups,
    make_plan,
    read_study,
    run_label,
    why_not,
)

FRAMEWORKS = {
    "torch": Framework("torch", "PyTorch", Path("torch_ddp.py"), updates=("single", "ddp")),
    "keras": Framework("keras", "Keras", Path("keras_fit.py"), arguments=("--backend", "jax")),
}


def plan(folder: Path, text: str, gpus: int = 8) -> list[PlannedRun]:
    path = folder / "study.toml"
    path.write_text(text)
    return make_plan(read_study(path), FRAMEWORKS, gpus)


def one(folder: Path, settings: str, gpus: int = 8) -> PlannedRun:
    (planned,) = plan(folder, f'[options]\nframework = "torch"\n{settings}\n', gpus)
    return planned


def test_repeats_are_run_in_turn(tmp_path: Path) -> None:
    runs = plan(tmp_path, 'repeats = 2\n[matrix]\nframework = ["torch"]\ngpus = [1, 2]\n')
    assert [(run.repeat, run.configuration.gpus) for run in runs] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]


def test_bare_and_recorded_runs_take_turns_in_being_the_first(tmp_path: Path) -> None:
    runs = plan(tmp_path, 'repeats = 2\nrecord = "both"\n[matrix]\nframework = ["torch"]\n')
    assert [(run.repeat, run.recorded) for run in runs] == [
        (1, False),
        (1, True),
        (2, True),
        (2, False),
    ]


def test_a_configuration_keeps_its_key_whatever_else_the_study_has(tmp_path: Path) -> None:
    alone = one(tmp_path, "batch = 64\ngpus = 2").configuration.key
    among = plan(
        tmp_path,
        '[matrix]\ngpus = [1, 2]\nbatch = [32, 64]\nframework = ["keras", "torch"]\n',
    )
    keys = [run.configuration.key for run in among]
    assert len(set(keys)) == 8
    assert keys.count(alone) == 1
    same = among[keys.index(alone)].configuration
    assert (same.framework, same.gpus, same.settings["batch"]) == ("torch", 2, 64)


def test_two_ways_to_say_the_same_are_one_configuration(tmp_path: Path) -> None:
    text = '[options]\nframework = "torch"\n[matrix]\nbatch = [32]\n[[include]]\nbatch = 32\n'
    assert len(plan(tmp_path, f"{text}gpus = 1\n")) == 1


def test_the_learning_rate_grows_with_the_gpus(tmp_path: Path) -> None:
    planned = one(tmp_path, "learning-rate = 0.1\ngpus = 3\nbatch = 32")
    assert arguments_of(planned) == ["--gpus", "3", "--batch", "32", "--learning-rate", "0.3"]
    assert planned.configuration.settings["learning-rate"] == 0.1


def test_the_arguments_of_a_framework_come_before_those_of_the_study(tmp_path: Path) -> None:
    (planned,) = plan(tmp_path, '[matrix]\nframework = ["keras"]\nstaging = [true]\n')
    assert arguments_of(planned) == ["--backend", "jax", "--gpus", "1", "--staging", "on"]


def test_images_that_were_made_are_named_by_their_folder(tmp_path: Path) -> None:
    planned = one(tmp_path, 'data = "png"')
    assert arguments_of(planned, "made/png") == ["--gpus", "1", "--data", "made/png"]


def test_another_number_of_images_is_another_configuration(tmp_path: Path) -> None:
    text = '[matrix]\nframework = ["torch"]\ndata = ["png", "synthetic"]\n'
    few, many = (plan(tmp_path, f"images = {count}\n{text}") for count in (10, 20))
    same = [a.configuration.key == b.configuration.key for a, b in zip(few, many, strict=True)]
    assert same == [False, True]


def test_a_label_names_what_differs(tmp_path: Path) -> None:
    runs = plan(tmp_path, '[matrix]\nframework = ["torch"]\nbatch = [32]\ngpus = [1, 2]\n')
    configurations = configurations_of(runs)
    assert [run_label(each, configurations) for each in configurations] == [
        "torch, 1 GPU",
        "torch, 2 GPUs",
    ]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ('"each"', [[0], [1], [2]]),
        ('"pairs"', [[0, 1], [0, 2], [1, 2]]),
        ("[[0], [2, 1]]", [[0], [2, 1]]),
    ],
)
def test_a_study_on_cards_has_a_configuration_for_each_group(
    visible: str, seen: list[list[int]], tmp_path: Path
) -> None:
    runs = plan(tmp_path, f'[matrix]\nframework = ["torch"]\n[cards]\nvisible = {visible}\n', 3)
    assert [run.configuration.settings["visible"] for run in runs] == seen
    assert [run.configuration.gpus for run in runs] == [len(group) for group in seen]


def test_groups_take_as_many_gpus_as_they_have() -> None:
    with pytest.raises(MissingError, match='"pairs" takes 2 or more GPUs; there are 1 here'):
        groups("pairs", 1)
    with pytest.raises(MissingError, match='"each" takes 1 or more GPUs; there are 0 here'):
        groups("each", 0)


@pytest.mark.parametrize(
    ("settings", "gpus", "why"),
    [
        ("gpus = 4", 4, ""),
        ("gpus = 4", 2, "takes 4 GPUs, and this machine has 2"),
        ("gpus = 2", 0, "takes 2 GPUs, and this machine has none"),
        ('gpus = 4\ndevice = "cpu"', 0, ""),
        ("gpus = 1", 0, ""),
        ('gpus = 1\ndevice = "cuda"', 0, "takes 1 GPU, and this machine has none"),
        ("[cards]\nvisible = [[3]]", 3, "takes GPU 3, and this machine has 3"),
        ("[cards]\nvisible = [[3]]", 4, ""),
        ('update = "ddp"', 1, ""),
        ('update = "horovod"', 1, "PyTorch knows no placement horovod; it has single, ddp"),
    ],
)
def test_why_a_run_cannot_be_made(settings: str, gpus: int, why: str, tmp_path: Path) -> None:
    assert why_not(one(tmp_path, settings, gpus), gpus) == why


@pytest.mark.parametrize(
    ("allowed", "seen"),
    [
        (None, ["0", "1", "2", "3"]),
        ("1,3", ["1", "3"]),
        ("GPU-aa, GPU-bb", ["GPU-aa", "GPU-bb"]),
        ("2,-1,3", ["2"]),
        ("", []),
    ],
)
def test_gpus_are_those_that_we_may_see_ourselves(
    allowed: str | None, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(
        "NVMLError = OSError\ndef nvmlInit(): pass\ndef nvmlDeviceGetCount(): return 4\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert find_gpus() == seen


def test_a_framework_that_has_no_entry_is_told_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"study\.toml: no framework 'torsh'; did you mean 'torch'?"
    ):
        check_names(Path("study.toml"), ["torsh"], FRAMEWORKS)
