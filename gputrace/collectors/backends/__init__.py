"""The list of backends, and which one records here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from gputrace.collectors.backend import Backend, Merged, Plan, has_driver
from gputrace.collectors.backends.cupti import CUPTI
from gputrace.collectors.backends.host import HOST
from gputrace.collectors.backends.nsys import NSYS
from gputrace.collectors.backends.nvprof import NVPROF
from gputrace.collectors.launch import CannotRun, Launch
from gputrace.errors import MissingError, PluginError
from gputrace.plugins import Plugin, call, expect, load, named

BACKENDS: Final = {backend.name: backend for backend in (CUPTI, NSYS, NVPROF, HOST)}
"""By name, the best first."""


def choose(plan: Plan, inherited: Mapping[str, str]) -> Backend:
    """The backend that a plan means; raises MissingError where it cannot record on this machine."""
    if plan.backend == "auto" and not has_driver():
        return HOST
    backend = CUPTI if plan.backend == "auto" else backend_named(plan.backend)
    obstacle = backend.obstacle(inherited)
    if obstacle is not None:
        raise MissingError(obstacle)
    return backend


def backend_named(name: str) -> Backend:
    """One of `BACKENDS`, or a plugin's; raises MissingError for any other name."""
    if name in BACKENDS:
        return BACKENDS[name]
    plugin = named("collectors", name)
    if plugin is None:
        raise MissingError(f"no backend is called {name!r} here; `gputrace plugins` lists plugins")
    return backend_of(plugin)


def backend_of(plugin: Plugin) -> Backend:
    """A plugin's backend, whose mistakes are reported as the plugin's."""
    backend: Backend = load(plugin, Backend)
    if backend.name != plugin.name:
        raise PluginError(f"{plugin} does not work: its Backend is called {backend.name!r}")

    def guard(function: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
        def attempt(*arguments: Any) -> Any:
            # The errors that the contract of a backend names pass unchanged.
            try:
                return function(*arguments), None
            except (CannotRun, OSError) as error:
                return None, error

        def guarded(*arguments: Any) -> Any:
            given, error = call(plugin, partial(attempt, *arguments))
            if error is not None:
                raise error
            return expect(plugin, given, *kinds)

        return guarded

    return replace(
        backend,
        obstacle=guard(backend.obstacle, str, type(None)),
        launch=guard(backend.launch, Launch),
        merge=guard(backend.merge, Merged),
        run=guard(backend.run, int),
    )
