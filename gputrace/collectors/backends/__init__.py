"""List of backends, and the choice of the one that records here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from gputrace.collectors.backend import Backend, Merged, Plan, has_driver
from gputrace.collectors.backends.cupti import CUPTI
from gputrace.collectors.backends.nsys import NSYS
from gputrace.collectors.backends.nvprof import NVPROF
from gputrace.collectors.launch import CannotRun, Launch
from gputrace.errors import MissingError, PluginError
from gputrace.plugins import Plugin, call, expect, load, named

HOST: Final = replace(
    CUPTI,
    name="host",
    obstacle=lambda _inherited: None,
    launch=lambda plan, _folder, command, environment: Launch(
        tuple(command), environment, look_s=plan.look_s
    ),
)
"""Backend that records the host's signals alone, which every backend records, and no GPU."""

BACKENDS: Final = {backend.name: backend for backend in (CUPTI, NSYS, NVPROF, HOST)}
"""Backends by name, the best first."""


def choose(plan: Plan, inherited: Mapping[str, str]) -> Backend:
    """Return the backend that a plan asks for; raise MissingError if it cannot record here."""
    if plan.backend == "auto" and not has_driver():
        return HOST
    backend = CUPTI if plan.backend == "auto" else backend_named(plan.backend)
    obstacle = backend.obstacle(inherited)
    if obstacle is not None:
        raise MissingError(obstacle)
    return backend


def backend_named(name: str) -> Backend:
    """Return one of `BACKENDS`, or a plugin's; raise MissingError for any other name."""
    if name in BACKENDS:
        return BACKENDS[name]
    plugin = named("collectors", name)
    if plugin is None:
        raise MissingError(f"no backend is called {name!r} here; `gputrace plugins` lists plugins")
    return backend_of(plugin)


def backend_of(plugin: Plugin) -> Backend:
    """Load a plugin's backend, whose errors are reported as the plugin's."""
    backend: Backend = load(plugin, Backend)
    if backend.name != plugin.name:
        raise PluginError(f"{plugin} does not work: its Backend is called {backend.name!r}")

    def guard(function: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
        def attempt(*arguments: Any) -> Any:
            # Errors that the contract of a backend names pass unchanged.
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
