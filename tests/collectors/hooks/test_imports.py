"""The hooks are loaded when the program imports a framework, and leave all else alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from gputrace.collectors.session import HOOKS
from tests.helpers.programs import LOOP, Program, event_names, numbers


def test_a_program_that_trains_nothing_leaves_no_file_and_loads_one_module(
    program: Program,
) -> None:
    out = program.quietly(
        "import sys; print(*sorted(m for m in sys.modules if '_gputrace_hooks' in m))"
    )
    assert out.split() == ["_gputrace_hooks", "_gputrace_hooks.imports"]
    assert not program.files()


def test_looking_for_a_module_does_not_import_it(torch: Program) -> None:
    out = torch.quietly(
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('torch.utils.data.dataloader')\n"
        "print(spec.name in sys.modules, 'class' in spec.loader.get_source(spec.name))\n"
        "import inspect, importlib, torch.optim.optimizer as module\n"
        "print(inspect.getsource(module.Optimizer).startswith('class Optimizer'))\n"
        "importlib.reload(module).Optimizer().step()\n"
    )
    assert out == "False True\nTrue\n"
    assert numbers(torch.events(), "step") == [0]


def test_a_hook_that_fails_leaves_a_note(torch: Program) -> None:
    torch.write(
        {
            "torch/optim/optimizer.py": "def register_optimizer_step_post_hook(hook): "
            "raise RuntimeError('not today')\nclass Optimizer:\n    def step(self): pass\n"
        }
    )
    torch.quietly(LOOP + "Optimizer().step(); print(list(_BaseDataLoaderIter('a')))")
    [line] = event_names(torch.events(), "note")
    assert "torch.optim.optimizer" in line
    assert "not today" in line
    assert numbers(torch.events(), "data_wait") == [0, 1]


@pytest.mark.parametrize("option", ["-S", "-E", "-I"])
def test_a_program_without_environment_or_site_is_not_hooked(torch: Program, option: str) -> None:
    find = f"import sys; sys.path.insert(0, {str(torch.modules)!r})\n"
    hooked = "print([m for m in sys.modules if '_gputrace_hooks' in m], len(sys.meta_path))\n"
    source = find + LOOP + "Optimizer().step()\n" + hooked
    out = torch.quietly(source, option)
    assert out == torch.quietly(source, option, hooked=False)
    assert out.startswith("[]")
    assert not torch.files()


@pytest.mark.parametrize("folder", ["", "/nowhere/at/all", __file__])
def test_without_a_folder_to_write_to_nothing_is_hooked(torch: Program, folder: str) -> None:
    source = (
        LOOP
        + "Optimizer().step()\nimport sys\nprint(any('_gputrace_hooks' in m for m in sys.modules))"
    )
    assert torch.quietly(source, GPUTRACE_DIR=folder) == "False\n"


OWN_SITE: Final = {
    "works": "import sys; sys.own_site = __name__, __file__\n",
    "fails": "raise ValueError('of the user')\n",
    "lacks": "import not_there_at_all\n",
    "exits": "raise SystemExit(3)\n",
}


@pytest.mark.parametrize("kind", OWN_SITE)
def test_the_sitecustomize_of_the_user_still_runs(torch: Program, kind: str) -> None:
    torch.write({"sitecustomize.py": OWN_SITE[kind]})
    source = LOOP + "import sys, sitecustomize\nOptimizer().step()\n"
    source += "print(getattr(sys, 'own_site', None), sitecustomize.__file__)\n"
    if kind in ("fails", "lacks"):
        source = source.replace(", sitecustomize\n", "\n").replace(", sitecustomize.__file__", "")
    hooked, plain = torch.run(source), torch.run(source, hooked=False)
    assert hooked[:2] == plain[:2]
    # What ends the interpreter's start shows the lines of all who took part in it.
    assert hooked.err == plain.err or (kind == "exits" and "SystemExit: 3" in hooked.err)
    assert len(torch.files()) == (kind != "exits")


def test_a_program_may_import_a_sitecustomize_that_does_not_exist(torch: Program) -> None:
    source = "for again in range(2):\n    try: import sitecustomize\n"
    source += "    except ModuleNotFoundError as error: print(error, error.name)\n"
    source += LOOP + "print(Optimizer().step())\n"
    assert torch.quietly(source) == torch.quietly(source, hooked=False)
    assert numbers(torch.events(), "step") == [0]


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(7)",
        "os._exit(8)",
        "sys.exit('a message')",
        "raise ValueError('of the program')",
        "os.kill(os.getpid(), 15)",
        "os.kill(os.getpid(), 6)",
        "import warnings; warnings.warn('odd')",
        "os.execv(sys.executable, [sys.executable, '-c', 'print(5)'])",
    ],
)
def test_the_exit_code_and_output_are_the_same_as_without_hooks(
    torch: Program, ending: str
) -> None:
    source = LOOP + "import os, sys\nprint(list(_BaseDataLoaderIter('ab')), flush=True)\n"
    source += f"Optimizer().step()\nprint('to stderr', file=sys.stderr, flush=True)\n{ending}\n"
    assert torch.run(source) == torch.run(source, hooked=False)
    assert numbers(torch.events(), "step") == [0]


def test_forking_warns_of_no_thread_and_exceptions_pass_through(torch: Program) -> None:
    source = LOOP + "import os\nOptimizer().step()\n"
    source += "pid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)\n"
    source += "def items():\n    yield 1\n    raise OSError('disk')\n"
    source += "it = _BaseDataLoaderIter(items())\nnext(it)\n"
    source += "try: next(it)\nexcept OSError as error: print(error)\n"
    assert torch.quietly(source, "-W", "error") == "disk\n"
    assert numbers(torch.events(), "data_wait") == [0, 1]


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7", "3.8", "3.9", "3.10", "3.12", "3.13"])
def test_other_versions_of_python_run_the_hooks_or_go_without(torch: Program, version: str) -> None:
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    python = str(homes[0]) if homes else shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"no Python {version} is here")
    torch.write({"sitecustomize.py": "import sys; sys.own_site = True"})
    source = LOOP + "import sys\nprint(sys.own_site)\n"
    source += "for item in _BaseDataLoaderIter('ab'): Optimizer().step()\n"
    if version == "2.7":
        source = "import sys\nprint(sys.own_site)\n"
    assert torch.quietly(source, python=python) == "True\n"
    if version != "2.7":
        assert numbers(torch.events(), "data_wait") == [0, 0, 1]
        assert numbers(torch.events(), "step") == [0, 1]


def test_each_framework_has_a_test_of_its_name_and_its_hooks_are_found_by_package(
    program: Program,
) -> None:
    folder = HOOKS / "_gputrace_hooks" / "frameworks"
    names = {path.stem for path in folder.glob("[!_]*.py")}
    assert not [name for name in names if not (Path(__file__).parent / f"test_{name}.py").exists()]
    out = program.quietly(
        "import importlib\nfrom _gputrace_hooks import imports\n"
        f"for name in {names}:\n"
        "    module = importlib.import_module(f'_gputrace_hooks.frameworks.{name}')\n"
        "    for patched, _ in getattr(module, 'PATCHES', []):\n"
        "        package = patched.partition('.')[0]\n"
        "        if name not in imports.FILES.get(package, (package,)): print(name, patched)\n"
    )
    assert out == ""
