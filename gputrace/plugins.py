"""What other packages add: readers, analyzers, views and collectors, as entry points.

Names are listed without importing anything; a plugin is imported when it is used. One that does not
work costs a line on stderr, and nothing else where anything else can go on. `GPUTRACE_NO_PLUGINS`
leaves all out. `gputrace.extend` has what a plugin is made of.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gputrace.cleaning import message
from gputrace.errors import GputraceError, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KINDS: Final = {
    "readers": "reader",
    "analyzers": "analyzer",
    "views": "view",
    "collectors": "collector",
}
"""What there can be plugins of, and what one is called; their groups are ``gputrace.readers``…"""

NONE: Final = "GPUTRACE_NO_PLUGINS"
"""The variable that leaves all plugins out."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point of another package, not imported yet."""

    kind: str
    """One of `KINDS`."""
    name: str
    package: str
    """The distribution that brings it, with its version."""
    entry: EntryPoint

    @property
    def value(self) -> str:
        """The module, and what of it: ``package.module:name``."""
        return self.entry.value

    def __str__(self) -> str:
        return f"the {KINDS[self.kind]} {self.name!r} of {self.package}"


def plugins(kind: str) -> tuple[Plugin, ...]:
    """The plugins of one of `KINDS`, in order of names; of two with one name, the first counts."""
    found = {plugin.name: plugin for plugin in reversed(all_plugins()) if plugin.kind == kind}
    return tuple(found[name] for name in sorted(found))


def names(kind: str) -> tuple[str, ...]:
    """What they are called."""
    return tuple(plugin.name for plugin in plugins(kind))


def named(kind: str, name: str) -> Plugin | None:
    """The plugin of that name."""
    return next((plugin for plugin in plugins(kind) if plugin.name == name), None)


def all_plugins() -> tuple[Plugin, ...]:
    """All that are installed, of two with one name both; none where they are left out."""
    return () if os.environ.get(NONE) else _installed(tuple(sys.path))


@cache
def _installed(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    if not any(map(_may_have_some, path)):
        return ()
    from importlib.metadata import entry_points

    found = [
        Plugin(kind, entry.name, _package(entry), entry)
        for kind in KINDS
        for entry in entry_points(group=f"gputrace.{kind}")
    ]
    return tuple(sorted(found, key=lambda plugin: (plugin.kind, plugin.name, plugin.package)))


def _may_have_some(folder: str) -> bool:
    """Whether a package in a folder of the path may bring plugins.

    Asking importlib.metadata takes ten times as long, and most people have none.
    """
    try:
        with os.scandir(folder or ".") as there:
            infos = [e.path for e in there if e.name.endswith((".dist-info", ".egg-info"))]
    except NotADirectoryError:
        return True  # An archive.
    except OSError:
        return False
    return any(b"[gputrace." in _bytes(os.path.join(info, "entry_points.txt")) for info in infos)  # noqa: PTH118


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "?"


_modules: dict[str, Plugin] = {}
"""Top-level modules of the plugins that were asked for."""


def load(plugin: Plugin, *kinds: type) -> Any:
    """What the entry point names, imported; raises PluginError where it is not of these types."""
    _modules[plugin.entry.module.partition(".")[0]] = plugin
    loaded = call(plugin, plugin.entry.load)
    return expect(plugin, loaded, *kinds) if kinds else loaded


def load_function(plugin: Plugin) -> Callable[..., Any]:
    """The same of a function."""
    loaded = load(plugin)
    if not callable(loaded):
        raise PluginError(f"{plugin} does not work: {plugin.value} cannot be called")
    return loaded  # type: ignore[no-any-return]


def expect(plugin: Plugin, value: Any, *kinds: type) -> Any:
    """What a plugin gave, if it is of these types; else raises PluginError."""
    if isinstance(value, kinds):
        return value
    wanted = " or ".join(kind.__name__ for kind in kinds)
    raise PluginError(f"{plugin} does not work: it gives {type(value).__name__}, not {wanted}")


def call(plugin: Plugin, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a plugin gives; raises PluginError for anything but our own errors."""
    try:
        return function(*arguments)
    except (GputraceError, MemoryError, BrokenPipeError):
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{plugin} does not work: {_told(error)}") from error


def tell(error: PluginError) -> None:
    """Says once on stderr what does not work, where one goes on without."""
    _tell(" ".join(str(error).split()))


@cache
def _tell(line: str) -> None:
    print(f"gputrace: {message(line)}; left out", file=sys.stderr)  # noqa: T201


def blame(error: BaseException) -> PluginError | None:
    """The plugin in whose code an error was raised, as an error; None where it was in none.

    For what a plugin gave and others use, as the rows of a trace.
    """
    trace, found = error.__traceback__, None
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        found = _modules.get(module.partition(".")[0], found)
        trace = trace.tb_next
    return PluginError(f"{found} does not work: {_told(error)}") if found is not None else None


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
