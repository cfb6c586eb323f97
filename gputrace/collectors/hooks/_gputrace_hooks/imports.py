"""Calls the hooks of a module after the program has imported it.

A finder at the front of ``sys.meta_path`` lets the others find the module and adds to its loader
what is to be done once the module has run: a module that is only looked for is not touched.

The hooks of a package are in the file of its name in ``frameworks``, or in those of `FILES`. They
are loaded when the program imports a module within the package.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Hook = Callable[[Any], None]

FILES = {
    "chainermn": ("chainer",),
    "ffcv": ("loaders",),
    "grain": ("loaders",),
    "nvidia": ("loaders",),
    "pytorch_lightning": ("lightning",),
    "tensorflow": ("tensorflow", "keras"),
    "tf_keras": ("keras",),
    "torch": ("torch", "torch_compile", "torch_data", "torch_memory"),
    "torchdata": ("torch_data", "loaders"),
}
"""Files of packages that have not one file of their name alone."""

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "frameworks")
_tables: "dict[str, dict[str, list[Hook]]]" = {}
"""By package, its modules' hooks."""
changes: "list[Callable[[str, list[Hook]], list[Hook]]]" = []
"""Functions by which `gputrace try` changes the hooks of a module."""


def hooks_of(name: str) -> "list[Hook]":
    """Return the hooks of a module; never raises."""
    package, within, _ = name.partition(".")
    if within and package not in _tables:
        _tables[package] = _load(package)
    hooks = _tables.get(package, {}).get(name, [])
    for change in changes:
        hooks = change(name, hooks)
    return hooks


def _load(package: str) -> "dict[str, list[Hook]]":
    """Return the hooks of a package, those of the same module in the order of its files."""
    hooks: dict[str, list[Hook]] = {}
    files = FILES.get(package, (package,))
    if os.path.exists(os.path.join(_FOLDER, f"{files[0]}.py")):
        from importlib import import_module

        from . import recorder

        try:
            for file in files:
                table = import_module(f"{__package__}.frameworks.{file}").PATCHES
                for module, hook in table:
                    hooks.setdefault(module, []).append(hook)
        except Exception:
            recorder.note_failure(f"loading the hooks of {package}")
    return hooks


class Finder:
    """Finder that watches modules found by the others."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if not hooks_of(name):
            return None
        for other in list(sys.meta_path):
            find = getattr(other, "find_spec", None)
            spec = find(name, path, target) if find and other is not self else None
            if spec is not None:
                _watch(spec.loader)
                return spec  # type: ignore[no-any-return]
        return None


def _watch(loader: "Any") -> None:
    run: Any = getattr(loader, "exec_module", None)

    def exec_module(module: "ModuleType") -> None:
        # Some loaders serve several modules.
        vars(loader).pop("exec_module", None)
        run(module)
        patch(module)

    try:
        if run is not None:
            loader.exec_module = exec_module
    except AttributeError:
        pass


def patch(module: "ModuleType") -> None:
    """Apply the hooks of a module, if there are any; never raises."""
    hooks = hooks_of(module.__name__)
    if not hooks:
        return
    from . import recorder

    if module.__name__ != "multiprocessing.util":
        _get_ready()
    for hook in hooks:
        try:
            hook(module)
        except Exception:
            recorder.note_failure(module.__name__)


def _get_ready() -> None:
    """Sample lines once something is recorded, and listen in an armed process."""
    if os.environ.get("GPUTRACE_LINES"):
        from . import sampler

        sampler.install_for_steps(os.environ["GPUTRACE_LINES"])
    if os.environ.get("GPUTRACE_ARM"):
        from . import remote

        remote.listen_unless_worker()


_installed: "list[None]" = []


def install() -> None:
    """Watch imports from now on, and patch modules that are already imported.

    A program that looks for a sitecustomize which it does not have comes here again.
    """
    if _installed:
        return
    _installed.append(None)
    if os.environ.get("GPUTRACE_TRY"):
        from . import cures

        cures.install()
        changes.append(cures.change_hooks)
    if os.environ.get("GPUTRACE_ARM"):
        from . import remote

        # It may have neither steps nor a framework; what it starts may be a helper of any kind.
        if remote.is_first():
            _get_ready()
    sys.meta_path.insert(0, Finder())
    loaded: dict[str, Any] = dict(sys.modules)
    for name, module in loaded.items():
        if module is not None and hooks_of(name):
            patch(module)
    if os.environ.get("GPUTRACE_STEPS"):
        from . import steps  # noqa: F401
    if os.environ.get("GPUTRACE_HANG"):
        from . import hangs

        hangs.install()
    if os.environ.get("GPUTRACE_PYTHON"):
        from . import sampler

        sampler.install(os.environ["GPUTRACE_PYTHON"])
