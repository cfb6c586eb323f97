"""Readers of plugins, whose mistakes are told as theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

from gputrace.errors import InputError, PluginError
from gputrace.plugins import Plugin, call, expect, load, plugins, tell
from gputrace.traces.candidate import Candidate
from gputrace.traces.readers import Reader
from gputrace.traces.trace import Trace


def plugged_readers() -> Iterator[Reader]:
    """Those that can be had."""
    yield from filter(None, map(_of_plugin, plugins("readers")))


@cache
def _of_plugin(plugin: Plugin) -> Reader | None:
    """A plugin's reader, whose mistakes are told as the plugin's; None where it cannot be had."""
    try:
        reader: Reader = load(plugin, Reader)
    except PluginError as error:
        tell(error)
        return None
    return replace(
        reader,
        recognises=partial(_recognises, plugin, reader),
        open=partial(_open_by_plugin, plugin, reader),
    )


def _recognises(plugin: Plugin, reader: Reader, candidate: Candidate) -> bool:
    try:
        return bool(call(plugin, reader.recognises, candidate))
    except PluginError as error:
        tell(error)
        return False


def _open_by_plugin(plugin: Plugin, reader: Reader, candidate: Candidate) -> Trace:
    try:
        opened: Trace = expect(plugin, call(plugin, reader.open, candidate), Trace)
    except PluginError as error:
        raise InputError(candidate.path, str(error)) from error
    return opened
