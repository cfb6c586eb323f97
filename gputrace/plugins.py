"""Plugins of other packages: readers, analyzers, views, collectors, cures and causes.

They are entry points. Names are listed without importing anything; a plugin is imported when it is
used. One that fails is reported on stderr and skipped wherever the command can go on.
`GPUTRACE_NO_PLUGINS` disables all. `gputrace.extend` is the API for plugins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gputrace.errors import GputraceError, PluginError
from gputrace.sanitize import message

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KINDS: Final = {
    "readers": "reader",
    "analyzers": "analyzer",
    "views": "view",
    "collectors": "collector",
    "cures": "cure",
    "causes": "cause",
}
"""Kinds of plugins and the noun for each; the entry point groups are ``gputrace.readers``…"""

NONE: Final = "GPUTRACE_NO_PLUGINS"
"""Environment variable that disables all plugins."""


class Plugin(NamedTuple):
    """Entry point of another package, not imported yet."""

    kind: str
    """One of `KINDS`."""
    name: str
    package: str
    """The distribution that provides it, with its version."""
    entry: EntryPoint

    @property
    def value(self) -> str:
        """Return the entry point's target: ``package.module:name``."""
        return self.entry.value

    def __str__(self) -> str:
        return f"the {KINDS[self.kind]} {self.name!r} of {self.package}"


def plugins(kind: str) -> tuple[Plugin, ...]:
    """Return the plugins of one of `KINDS`, by name; the first wins where two share a name."""
    by_name = {plugin.name: plugin for plugin in reversed(all_plugins()) if plugin.kind == kind}
    return tuple(by_name[name] for name in sorted(by_name))


def names(kind: str) -> tuple[str, ...]:
    """Return the names of the plugins of a kind."""
    return tuple(plugin.name for plugin in plugins(kind))


def named(kind: str, name: str) -> Plugin | None:
    """Return the plugin of that name, if any."""
    return next((plugin for plugin in plugins(kind) if plugin.name == name), None)


def all_plugins() -> tuple[Plugin, ...]:
    """Return all installed plugins, with duplicate names; none if plugins are disabled."""
    return () if os.environ.get(NONE) else _installed(tuple(sys.path))


@cache
def _installed(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    if not any(map(_may_have_some, path)):
        return ()
    from importlib.metadata import entry_points

    installed = []
    for kind in KINDS:
        for entry in entry_points(group=f"gputrace.{kind}"):
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "?"
            installed.append(Plugin(kind, entry.name, package, entry))
    return tuple(sorted(installed, key=lambda plugin: (plugin.kind, plugin.name, plugin.package)))


def _may_have_some(folder: str) -> bool:
    """Return whether a distribution in a folder of ``sys.path`` may provide plugins.

    Querying importlib.metadata takes ten times as long, and most people have no plugins; a
    `Path` takes half of the time for each of hundreds of distributions.
    """
    try:
        with os.scandir(folder or ".") as there:
            infos = [e.path for e in there if e.name.endswith((".dist-info", ".egg-info"))]
    except NotADirectoryError:
        return True  # An archive.
    except OSError:
        return False
    for info in infos:
        with suppress(OSError), open(f"{info}/entry_points.txt", "rb") as file:  # noqa: PTH123
            if b"[gputrace." in file.read():
                return True
    return False


_modules: dict[str, Plugin] = {}
"""Loaded plugins by their top-level module."""


def load(plugin: Plugin, *kinds: type) -> Any:
    """Import the entry point; raises PluginError if it is not of one of these types."""
    _modules[plugin.entry.module.partition(".")[0]] = plugin
    loaded = call(plugin, plugin.entry.load)
    return expect(plugin, loaded, *kinds) if kinds else loaded


def load_function(plugin: Plugin) -> Callable[..., Any]:
    """Load an entry point that must be callable."""
    loaded = load(plugin)
    if not callable(loaded):
        raise PluginError(f"{plugin} does not work: {plugin.value} cannot be called")
    return loaded  # type: ignore[no-any-return]


def expect(plugin: Plugin, value: Any, *kinds: type) -> Any:
    """Return a plugin's value; raises PluginError if it is not of one of these types."""
    if isinstance(value, kinds):
        return value
    wanted = " or ".join(kind.__name__ for kind in kinds)
    raise PluginError(f"{plugin} does not work: it gives {type(value).__name__}, not {wanted}")


def call(plugin: Plugin, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plugin's function; raises PluginError for any error that is not gputrace's own.

    What it prints goes to stderr: stdout has the answer, which programs may read.
    """
    try:
        with redirect_stdout(sys.stderr):
            return function(*arguments)
    except (GputraceError, MemoryError, BrokenPipeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(f"{plugin} does not work: {_text_of(error)}") from error


def warn(error: PluginError) -> None:
    """Report on stderr, once, a plugin that is skipped because it does not work."""
    _warn(" ".join(str(error).split()))


@cache
def _warn(line: str) -> None:
    print(f"gputrace: {message(line)}; left out", file=sys.stderr)  # noqa: T201


def blame(error: BaseException) -> PluginError | None:
    """Return a PluginError for the plugin in whose code an error was raised; None if in no plugin.

    For objects of a plugin that other code uses, such as the rows of a trace.
    """
    trace, plugin = error.__traceback__, None
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        plugin = _modules.get(module.partition(".")[0], plugin)
        trace = trace.tb_next
    return PluginError(f"{plugin} does not work: {_text_of(error)}") if plugin is not None else None


def _text_of(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
