"""How severe a finding can be."""

from __future__ import annotations

from typing import Final

SEVERITIES: Final = ("high", "medium", "low", "info")
"""The worst first."""
