"""The patch that builds a cure into a program."""

from __future__ import annotations

import os
import re
from errno import ENOSPC
from pathlib import Path

import pytest

from gputrace.trials.cures import combine, read_candidates
from gputrace.trials.patch import apply, make_patch
from gputrace.trials.runs import Change
from tests.helpers import command
from tests.helpers.tried_programs import PROGRAM, Real


@pytest.mark.parametrize(
    ("before", "position", "after"),
    [
        ("DataLoader(data, num_workers=0)", -1, "DataLoader(data, num_workers=8)"),
        ("DataLoader(data)", -1, "DataLoader(data, num_workers=8)"),
        ("DataLoader()", -1, "DataLoader(num_workers=8)"),
        ("DataLoader(data, 64, 2)", 2, "DataLoader(data, 64, 8)"),
        (
            "torch.DataLoader(\n    data,  # é\n)",
            -1,
            "torch.DataLoader(\n    data, num_workers=8,  # é\n)",
        ),
        (
            "DataLoader(\n    data,\n    shuffle=True,\n)",
            -1,
            "DataLoader(\n    data,\n    shuffle=True,\n    num_workers=8,\n)",
        ),
        (
            "DataLoader(\n    data,\n    shuffle=(s is None),  # s)\n)",
            -1,
            "DataLoader(\n    data,\n    shuffle=(s is None), num_workers=8,  # s)\n)",
        ),
        ("DataLoader(i for i in range(9))", -1, None),
        (
            "DataLoader(data, **options.of['é'])",
            -1,
            "DataLoader(data, **{**options.of['é'], \"num_workers\": 8})",
        ),
        ("DataLoader(data, num_workers=0, **o)", -1, "DataLoader(data, num_workers=8, **o)"),
        ("DataLoader(data, **a, **b)", -1, None),
        ("DataLoader(*data)", -1, "DataLoader(*data, num_workers=8)"),
        ("DataLoader(*data, 2)", 2, None),
        ("DL(data)", -1, "DL(data, num_workers=8)"),
        ("getattr(data, 'DL')(d)", -1, "getattr(data, 'DL')(d, num_workers=8)"),
        ("DL(KINDS[kind](data))", -1, "DL(KINDS[kind](data), num_workers=8)"),
        ("KINDS[kind](data), KINDS[kind](data)", -1, None),
        ("super().__init__(data)", -1, "super().__init__(data, num_workers=8)"),
        ("make(data)", -1, None),
        ("DataLoader(a), DataLoader(b)", -1, None),
    ],
)
def test_an_argument_is_changed_where_the_program_gives_it(
    tmp_path: Path, before: str, position: int, after: str | None
) -> None:
    path = tmp_path / "train.py"
    head = "from torch.utils.data import DataLoader as DL; é = '→'\nloader"
    path.write_text(f"{head} = {before}\n", encoding="utf-8")
    change = Change("workers", "DataLoader", "num_workers", position, "0", "8", str(path), 2)
    patch = make_patch(read_candidates("workers=8")[0], [change], str(path), ["python", "train.py"])
    if after is None:
        assert patch.edits == ()
        assert patch.by_hand[0].endswith(f", at {os.path.relpath(path)}:2")
    else:
        [edit] = patch.edits
        assert edit.after == f"{head} = {after}\n"


@pytest.mark.parametrize(
    ("program", "call", "argument"),
    [
        ("train.py", "DataLoader", "num_workers"),
        ("finetune.py", "TrainingArguments", "dataloader_num_workers"),
    ],
)
def test_the_tutorial_shows_the_patches_of_its_programs(
    program: str, call: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(command.ROOT / "examples" / "try")
    path = Path(program).absolute()
    lines = path.read_text(encoding="utf-8").splitlines()
    line = 1 + next(at for at, text in enumerate(lines) if f" = {call}(" in text)
    change = Change("workers", call, argument, -1, "0", "8", str(path), line)
    patch = make_patch(read_candidates("workers=8")[0], [change], str(path), ["python", program])
    page = (command.ROOT / "docs" / "tutorial-try.md").read_text(encoding="utf-8")
    assert f"\n{patch.diff}" in page


def test_settings_become_statements_and_variables_become_a_command(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n\ntrain()\n")
    [candidate] = read_candidates("cudnn-benchmark+threads=2+compile")
    call = Change("compile", "forward", "", -1, "", "", str(path), 3)
    patch = make_patch(candidate, [call], str(path), ["python", "train.py"])
    assert patch.edits[0].after.splitlines()[2] == "torch.backends.cudnn.benchmark = True"
    assert "OMP_NUM_THREADS=2" in patch.by_hand[0]
    assert patch.by_hand[0].endswith("python train.py")
    compiled = "compile=default: model = torch.compile(model); see "
    assert patch.by_hand[1] == f"{compiled}{os.path.relpath(path)}:3"


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        ("import torch\r\nimport os\r\n", "def main():\r\n    import json\r\n"),
        ("#!/bin/python\n# -*- coding: utf-8 -*-\n", "def main():\n    import torch\n"),
        ('"""It trains."""\n', "def main():\n    import torch\n"),
        ("from __future__ import annotations\nimport torch.nn as nn\n", "train()\n"),
        ("import torch\n\x0c\nimport os\n", "for i in range(3):\n    pass\nimport json\n"),
    ],
)
def test_a_statement_works_where_it_is_put_and_all_else_stays(
    tmp_path: Path, head: str, rest: str
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes((head + rest).encode())
    [candidate] = read_candidates("cudnn-benchmark")
    patch = make_patch(candidate, [], str(path), ["python", "train.py"])
    apply(patch)
    written = path.read_bytes().decode()
    assert written.startswith(head)
    assert written.endswith(rest)
    new = written.removeprefix(head).removesuffix(rest)
    end = "\r\n" if "\r\n" in head else "\n"
    assert all(line.endswith(end) for line in new.splitlines(keepends=True))
    assert ("import torch" in new) == (not head.startswith("import torch"))
    assert new.rstrip().endswith("torch.backends.cudnn.benchmark = True")


def test_a_program_that_cannot_be_written_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after some bytes; then there is space, and its mode and links stay."""
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_text("import torch\ntrain()\n")
    path.chmod(0o750)
    link.symlink_to(path)
    patch = make_patch(read_candidates("cudnn-benchmark")[0], [], str(link), ["python"])

    def write_some(file: Path, data: bytes) -> None:
        with file.open("wb") as opened:
            opened.write(data[:9])
        raise OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write_some)
        with pytest.raises(OSError, match="No space"):
            apply(patch)
    assert path.read_text() == "import torch\ntrain()\n"
    apply(patch)
    assert "benchmark = True" in path.read_text()
    assert (link.is_symlink(), path.stat().st_mode & 0o777) == (True, 0o750)
    assert {each.name for each in tmp_path.iterdir()} == {"train.py", "link.py"}


@pytest.mark.parametrize("why", ["has changed meanwhile", "is read-only"])
def test_all_files_are_written_or_none(tmp_path: Path, why: str) -> None:
    calls = []
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("loader = DataLoader(data)\n")
        path = str(tmp_path / name)
        calls.append(Change("workers", "DataLoader", "num_workers", -1, "0", "8", path, 1))
    patch = make_patch(read_candidates("workers=8")[0], calls, "", ["python"])
    if why == "is read-only":
        (tmp_path / "b.py").chmod(0o444)
    else:
        (tmp_path / "b.py").write_text("loader = DataLoader(other)\n")
    with pytest.raises(OSError, match=why):
        apply(patch)
    assert (tmp_path / "a.py").read_text() == "loader = DataLoader(data)\n"
    assert "num_workers" not in (tmp_path / "b.py").read_text()


@pytest.mark.parametrize(
    ("handed", "call", "line"),
    [
        ("num_workers=num_workers", "num_workers=1", 7),
        ("**{'num_workers': num_workers}", "num_workers=1", 7),
        ("num_workers=num_workers", "", 5),
        ("num_workers=1", "num_workers=1", 5),
    ],
)
def test_what_the_programs_own_loader_hands_on_is_changed_where_it_is_called(
    real: Real, handed: str, call: str, line: int
) -> None:
    own = (
        "class Base(DataLoader): pass\n"
        "class Own(Base):\n"
        "    def __init__(self, data, num_workers=1):\n"
        f"        super().__init__(data, {handed})\n"
        "class Trainer:\n"
        f"    def __init__(self): self.loader = Own(range(500), {call})\n"
        "loader = Trainer().loader\n"
    )
    program = re.sub("optimizer = .*\nloader = .*\n", "", PROGRAM).replace("\n\n", f"\n{own}")
    program = program.replace("import sys\nfrom", "import sys; from", 1)
    program = program.replace("loader:\n", "loader:\n    optimizer = SGD([], 0.1)\n")
    run = real.run("workers=2", program)
    patch = make_patch(combine(read_candidates("workers=2")), run.changes, "", ["x"])
    [changed] = patch.edits[0].lines
    assert changed.startswith(f"{line + 1}: ")
    assert "num_workers=2" in changed
    assert patch.by_hand == ()


@pytest.mark.parametrize(
    ("imported", "value"),
    [
        ("import tensorflow as tf", "tf.data.AUTOTUNE"),
        ("import tensorflow", "tensorflow.data.AUTOTUNE"),
        ("from tensorflow.data import Dataset", "-1"),
    ],
)
def test_autotune_is_written_as_the_program_can_name_it(
    tmp_path: Path, imported: str, value: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{imported}\ndata = data.map(decode).batch(8, num_parallel_calls=2)\n")
    calls = [
        Change("tf-parallel", call, "num_parallel_calls", -1, old, "-1", str(path), 2)
        for call, old in (("map", "None"), ("batch", "2"))
    ]
    patch = make_patch(read_candidates("tf-parallel")[0], calls, str(path), ["python"])
    after = f"map(decode, num_parallel_calls={value}).batch(8, num_parallel_calls={value})"
    assert patch.edits[0].after == f"{imported}\ndata = data.{after}\n"


def test_a_diff_has_the_lines_that_patch_sees(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n\x0c\n# a\x0cb\ntrain()\n")
    patch = make_patch(read_candidates("cudnn-benchmark")[0], [], str(path), ["python"])
    assert "\\ No newline" not in patch.diff
    assert patch.diff.count("\n ") == 4


def test_a_statement_for_a_program_that_cannot_be_edited_is_told() -> None:
    [candidate] = read_candidates("cudnn-benchmark")
    for main in ("", "/nowhere/train.py"):
        patch = make_patch(candidate, [], main, ["python"])
        assert patch.by_hand[-1] == "torch.backends.cudnn.benchmark = True"


@pytest.mark.parametrize(
    ("file", "line", "place"),
    [
        ("/site-packages/trainer.py", 7, f"{os.path.relpath('/site-packages/trainer.py')}:7"),
        ("", 0, "an unknown line"),
    ],
)
def test_a_call_that_is_in_no_file_of_the_program_is_named(
    file: str, line: int, place: str
) -> None:
    change = Change("workers", "DataLoader", "num_workers", -1, "0", "8", file, line)
    patch = make_patch(read_candidates("workers=8")[0], [change], "train.py", ["python"])
    assert patch.edits == ()
    assert patch.by_hand == (f"workers: give DataLoader num_workers=8 (now 0), at {place}",)
