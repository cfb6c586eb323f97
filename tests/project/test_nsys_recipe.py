"""Our recipe for Nsight Systems, over a stand-in of the package that NVIDIA's nsys brings.

It has been run by the `nsys recipe` of nsys 2023.4, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pandas
import pytest

from tests.helpers import command

RECIPES: Final = command.ROOT / "gputrace" / "data" / "recipe"


class Option(Enum):
    INPUT = "--input"
    OUTPUT = "--output"
    FORCE_OVERWRITE = "--force-overwrite"
    CSV = "--csv"


class Parser(argparse.ArgumentParser):
    def add_recipe_argument(self, option: Any, **settings: Any) -> None:
        if not isinstance(option, Option):
            self.add_argument(option, **settings)
        elif option in (Option.CSV, Option.FORCE_OVERWRITE):
            self.add_argument(option.value, action="store_true", **settings)
        else:
            nargs = "+" if option is Option.INPUT else None
            self.add_argument(option.value, nargs=nargs, **settings)


class Recipe:
    """Context that a recipe gets from its base."""

    def __init__(self, parsed_args: argparse.Namespace) -> None:
        self._parsed_args = parsed_args
        self._output_files: dict[str, str] = {}
        self._analysis_dict: dict[str, Any] = {}

    def run(self, context: object) -> None:
        self._analysis_dict = {"RecipeName": type(self).__module__}

    def add_output_file(self, name: str, kind: str | None = None) -> str:
        folder = Path(self._parsed_args.output)
        folder.mkdir(exist_ok=True)
        if kind:
            self._output_files[name] = kind
        return str(folder / name)

    def create_analysis_file(self) -> None:
        path = self.add_output_file("out.nsys-analysis")
        Path(path).write_text(json.dumps(self._analysis_dict))

    @classmethod
    def get_argument_parser(cls) -> Parser:
        return Parser()


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's class, as `nsys recipe` finds it by the folder's metadata.json."""
    modules = {name: ModuleType(name) for name in ("nsys_recipe", "nsys_recipe.lib")}
    modules |= {f"nsys_recipe.lib.{name}": ModuleType(name) for name in ("recipe", "args")}
    package = tmp_path / "target" / "python" / "packages" / "nsys_recipe" / "__init__.py"
    modules["nsys_recipe"].__file__ = str(package)
    vars(modules["nsys_recipe.lib.recipe"])["Recipe"] = Recipe
    vars(modules["nsys_recipe.lib.args"])["Option"] = Option
    vars(modules["nsys_recipe.lib"])["recipe"] = modules["nsys_recipe.lib.recipe"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = tmp_path / "bin"
    ours.write_text(f'#!/bin/sh\nexec {sys.executable} -m gputrace "$@"\n')
    ours.chmod(0o755)
    monkeypatch.setenv("GPUTRACE", str(ours))
    monkeypatch.setenv("PYTHONPATH", str(command.ROOT))
    (folder,) = (path for path in RECIPES.iterdir() if (path / "metadata.json").exists())
    name = json.loads((folder / "metadata.json").read_text())["module_name"]
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GputraceAnalyze


def run_recipe(recipe: Any, *words: str | Path) -> None:
    parsed = recipe.get_argument_parser().parse_args(list(map(str, words)))
    recipe(parsed).run(object())


def test_the_recipe_writes_the_tables_of_analyze(
    recipe: Any, h100: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run_recipe(recipe, "--input", h100, "--output", out, "--csv")
    shown = capfd.readouterr().out
    found = json.loads((out / "analysis.json").read_text())
    assert found == json.loads(command.gputrace("analyze", h100, "--json").out)
    assert shown == (out / "report.txt").read_text()
    assert found["findings"][0]["message"][1:40] in " ".join(shown.split())
    breakdown = pandas.read_parquet(out / "breakdown.parquet")
    assert breakdown.to_dict("records") == [
        {key: row[key] for key in breakdown.columns} for row in found["breakdown"]
    ]
    gaps = pandas.read_csv(out / "gaps.csv")
    assert gaps["cause"].tolist() == [gap["cause"] for gap in found["gaps"]["largest"]]
    made = json.loads((out / "out.nsys-analysis").read_text())["Outputs"]
    assert set(made) == {path.name for path in out.iterdir()} - {"out.nsys-analysis"}
    assert (out / "report.html").read_text().startswith("<!")


def test_a_report_that_cannot_be_read_ends_the_recipe(
    recipe: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="3"):
        run_recipe(recipe, "--input", tmp_path / "none.nsys-rep", "--output", tmp_path / "out")
    assert capfd.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_says_where_the_recipe_is() -> None:
    ran = command.gputrace("recipe")
    assert (ran.code, ran.out, ran.err) == (0, f"{RECIPES}\n", "")
