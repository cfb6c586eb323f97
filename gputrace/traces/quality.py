"""What is wrong with a trace: files and rows that cannot be used, and complaints."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file of a run that could not be read, or not to its end."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(slots=True)
class Quality:
    """What is wrong with a trace, gathered while it is read."""

    warnings: list[str] = field(default_factory=list)
    """The recorder's own complaints."""
    notes: list[str] = field(default_factory=list)
    """What limits the figures though the recording is whole."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Files that one goes on without."""
    _dropped: dict[tuple[str, str], int] = field(default_factory=dict)

    def drop(self, reason: str, rows: int, where: str = "") -> None:
        """Counts rows that cannot be used; those of one place once, however often it is read."""
        if rows:
            key = (reason, where)
            self._dropped[key] = max(rows, self._dropped.get(key, 0))

    @property
    def places(self) -> dict[tuple[str, str], int]:
        """Rows that could not be used, by reason and place."""
        return dict(self._dropped)

    @property
    def dropped(self) -> dict[str, int]:
        """Rows that could not be used, by reason."""
        totals: dict[str, int] = {}
        for (reason, _), rows in self._dropped.items():
            totals[reason] = totals.get(reason, 0) + rows
        return totals
