"""A result in the form that was asked for, by the module that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from gputrace.errors import UsageError


def render_as(result: object, form: str, forms: Mapping[str, str]) -> str:
    """What ``render(result)`` of a form's module gives; raises UsageError for an unknown form.

    Args:
        result: what the modules take.
        form: a key of ``forms``.
        forms: names of modules by form; only the one that is asked for is imported.
    """
    if form not in forms:
        raise UsageError(f"no format is called {form!r}; there are {', '.join(forms)}")
    rendered: str = import_module(forms[form]).render(result)
    return rendered
