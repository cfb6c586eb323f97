"""Study files: what they ask for, and the one line that says what is wrong in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputrace.errors import InputError, UsageError
from gputrace.studies.plan import Study, read_study
from tests.helpers.command import assert_refused
from tests.helpers.study_scripts import Bench

ONE = '[matrix]\nframework = ["stub"]\n'


def read(folder: Path, text: str) -> Study:
    path = folder / "study.toml"
    path.write_text(text)
    return read_study(path)


def test_a_study_runs_every_combination_of_its_matrix_with_its_options(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        """
        title = "Scaling"
        question = "What does a second GPU bring?"
        repeats = 3
        timeout = "10min"
        [options]
        model = "resnet50"
        [matrix]
        framework = ["torch", "jax"]
        gpus = [1, 2]
        """,
    )
    assert (study.title, study.question, study.repeats) == (
        "Scaling",
        "What does a second GPU bring?",
        3,
    )
    assert study.timeout_ns == 600 * 10**9
    assert study.combinations == tuple(
        {"model": "resnet50", "framework": framework, "gpus": gpus}
        for framework in ("torch", "jax")
        for gpus in (1, 2)
    )


def test_what_is_not_said_has_a_default(tmp_path: Path) -> None:
    study = read(tmp_path, ONE)
    assert (study.title, study.question, study.repeats) == ("study", "", 1)
    assert (study.recording, study.timeout_ns, study.cards) == ("recorded", None, None)


@pytest.mark.parametrize(
    ("value", "recording"), [("true", "recorded"), ("false", "bare"), ('"both"', "both")]
)
def test_runs_are_recorded_bare_or_both(value: str, recording: str, tmp_path: Path) -> None:
    assert read(tmp_path, f"record = {value}\n{ONE}").recording == recording


def test_an_excluded_table_drops_the_combinations_that_have_all_of_it(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        """
        [matrix]
        framework = ["torch", "jax"]
        gpus = [1, 2, 4]
        [[exclude]]
        framework = "jax"
        gpus = [2, 4]
        """,
    )
    left = [(each["framework"], each["gpus"]) for each in study.combinations]
    assert left == [("torch", 1), ("torch", 2), ("torch", 4), ("jax", 1)]


def test_an_included_table_is_a_matrix_of_its_own(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        """
        [options]
        framework = "torch"
        [matrix]
        batch = [32]
        [[include]]
        batch = 64
        staging = [true, false]
        """,
    )
    assert study.combinations == (
        {"framework": "torch", "batch": 32},
        {"framework": "torch", "batch": 64, "staging": "on"},
        {"framework": "torch", "batch": 64, "staging": "off"},
    )


def test_a_combination_that_is_named_twice_is_run_once(tmp_path: Path) -> None:
    study = read(
        tmp_path, '[matrix]\nframework = ["torch", "torch"]\n[[include]]\nframework = "torch"\n'
    )
    assert study.combinations == ({"framework": "torch"},)


def test_a_folder_of_data_is_meant_as_seen_from_the_study(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    study = read(tmp_path, f'[options]\ndata = "pictures"\n{ONE}')
    assert study.combinations[0]["data"] == str((tmp_path / "pictures").resolve())


WRONG = {
    f"repeat = 3\n{ONE}": ("no key 'repeat' at the top", "did you mean 'repeats'?"),
    f"[option]\nbatch = 3\n{ONE}": ("no key 'option'", "'options'"),
    f'[options]\nmodle = "resnet20"\n{ONE}': ("no key 'modle' in [options]", "'model'"),
    '[matrix]\nframework = ["stub"]\ngpu = [1]\n': ("no key 'gpu' in [matrix]", "'gpus'"),
    f"{ONE}[[exclude]]\nbatchsize = 3\n": ("'batchsize' in [[exclude]]", "'batch'"),
    f"{ONE}[[include]]\nzzz = 3\n": ("'zzz' in [[include]]", "there are: framework, gpus, model"),
    f'{ONE}[cards]\nvisble = "each"\n': ("'visble' in [cards]", "'visible'"),
    f'repeats = "3"\n{ONE}': ("repeats: expected int, got str",),
    f"repeats = 0\n{ONE}": ("repeats: expected int >= 1",),
    f'record = "never"\n{ONE}': ("record: invalid enum value 'never'",),
    f'timeout = "soon"\n{ONE}': ("timeout: 'soon' is not a time",),
    f'timeout = "0s"\n{ONE}': ("timeout: a run cannot end within 0 ns",),
    f'[options]\nbatch = "64"\n{ONE}': ("[options] batch: expected int, got str",),
    f"[options]\nbatch = true\n{ONE}": ("[options] batch: expected int, got bool",),
    f'[options]\nmodel = "resnet18"\n{ONE}': (
        "[options] model: 'resnet18' is not a value of it",
        "'resnet110'?",
    ),
    f"[options]\nlearning-rate = 0\n{ONE}": ("[options] learning-rate: expected float > 0.0",),
    f"[options]\ntarget = 1.5\n{ONE}": ("[options] target: expected float < 1.0",),
    f'[options]\ndata = "pictures"\n{ONE}': ("[options] data: 'pictures' is not a folder",),
    "matrix = 3\n": ("matrix: expected object, got int",),
    '[matrix]\nframework = ["stub"]\ngpus = []\n': ("[matrix] gpus is empty",),
    '[matrix]\nframework = ["stub"]\ngpus = [1, "2"]\n': ("[matrix] gpus: expected int",),
    "[matrix]\n": ("no framework is named",),
    "": ("no framework is named",),
    f'{ONE}[[exclude]]\nframework = "stub"\n': ("nothing is left to run",),
    f"{ONE}[[exclude]]\n": ("a table [[exclude]] is empty",),
    f'{ONE}gpus = [1]\n[cards]\nvisible = "each"\n': ("[cards] says how many GPUs",),
    f"{ONE}[cards]\nvisible = []\n": ("[cards] visible: [] is not a list of distinct GPUs",),
    f"{ONE}[cards]\nvisible = [[0, 0]]\n": ("[cards] visible: [0, 0]",),
    f'{ONE}[cards]\nvisible = "all"\n': ("cards.visible: invalid enum value 'all'",),
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text.replace("\n", " "))
def test_what_makes_no_sense_is_told_with_the_file_and_the_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / 'study.toml'}: ")
    assert "\n" not in told
    for words in WRONG[text]:
        assert words in told.replace("`", "")


@pytest.mark.parametrize("content", [b"[matrix", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_is_no_toml_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"study\.toml: is not (TOML|UTF-8)"):
        read_study(path)


def test_the_command_tells_what_is_wrong_in_one_line_and_makes_no_folder(tmp_path: Path) -> None:
    bench = Bench(tmp_path).framework("stub")
    assert_refused(bench.run(), 3, "study.toml: cannot be read (No such file or directory)")
    bench.write(f"{ONE}gpu = [1]\n")
    assert_refused(bench.run(), 2, "study.toml: no key 'gpu' in [matrix]; did you mean 'gpus'?")
    bench.write('[matrix]\nframework = ["stud"]\n')
    assert_refused(bench.run(), 2, "study.toml: no framework 'stud'; did you mean 'stub'?")
    assert not bench.results.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--python", "torch"], "--python torch: write it as torch=/path/to/python"),
        (["--python", "stab=/usr/bin/python3"], "--python stab: no such framework; stub"),
        (["--only", "gpus"], "--only gpus: write it as framework=torch"),
        (["--only", "gpu=1"], "--only gpu=1: no such setting; did you mean 'gpus'?"),
        (["--only", "gpus=2"], "--only gpus=2: the study has no such run"),
    ],
)
def test_options_that_name_nothing_are_wrong_usage(
    options: list[str], words: str, tmp_path: Path
) -> None:
    bench = Bench(tmp_path).framework("stub").write(ONE)
    assert_refused(bench.run(*options), 2, words)


def test_scripts_are_looked_for_beside_the_study_and_above_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path).framework("stub").write(ONE)
    (bench.workloads / "frameworks.toml").rename(tmp_path / "frameworks.toml")
    assert_refused(bench.run(), 3, "holds no frameworks.toml", "--workloads")
    (bench.workloads / "stub.py").rename(tmp_path / "stub.py")
    assert "to run" in bench.run("--workloads", tmp_path, "--dry-run").out


def test_an_entry_of_frameworks_toml_is_looked_at_as_closely(tmp_path: Path) -> None:
    bench = Bench(tmp_path).framework("stub", module=["json"]).write(ONE)
    assert_refused(bench.run(), 2, "frameworks.toml: no key 'module' in [stub]", "'modules'")
    (bench.workloads / "frameworks.toml").write_text('[stub]\ntitle = "Stub"\nscript = "no.py"\n')
    assert_refused(bench.run(), 3, "no.py: is not there, and [stub] names it")
