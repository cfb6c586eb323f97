"""Replaces what tells people, machines and programs in the texts of a trace.

A name gets the same stand-in everywhere (``host-1``, ``path-3``), so that what was equal stays
equal. Kernel names are kept by who calls this; so are times.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from typing import Final

from gputrace.traces.sqlite import Database, quoted

_USER: Final = re.compile(r"/(?:home|Users|u|users|scratch|export/home)/([^/\s:'\"]+)")
_PATH: Final = re.compile(
    r"(?:[A-Za-z]:)?[\w.~+@%=,-]*(?:[/\\][\w.~+@%=,#-]+)+[/\\]?"
    r"|[\w.+-]+\.(?:py|pyc|sh|so|ipynb|exe|dll|json|ya?ml|sqlite|nsys-rep|qdrep|h5|pth?)\b"
)
"""Anything with a slash in it that is no operator's, and names of files."""
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+")
_MAIL: Final = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IP: Final = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_UUID: Final = re.compile(
    r"\b(?:(?:GPU|MIG)-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.I
)
_PCI: Final = re.compile(r"\b(?:[0-9a-f]{4}|[0-9a-f]{8}):[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.I)
LONGEST: Final = 20_000
"""Letters of a text in which names are looked for; a longer one is replaced whole."""
_SHORTEST: Final = 2
"""Letters of a name that is looked for inside other texts."""

_TAKEN: Final = re.compile(
    r"CUPTI_ACTIVITY_KIND_\w+|CUDA_\w+_EVENTS|NVTX_\w+|OSRT_API|CUBLAS_EVENTS|CUDNN_EVENTS"
    r"|MPI_\w+|PROFILER_OVERHEAD|GPU_METRICS|ENUM_\w+|StringIds|StringTable|Version|PROCESSES|ThreadNames"
    r"|TARGET_INFO_(GPU|GPU_METRICS|CUDA_\w+|NVTX_\w+|SESSION_START_TIME)"
    r"|GPUTRACE_(META|PROCESS|STEP|HOST_RANGE|PYTHON_SAMPLE|CLOCK|(API_)?WINDOW|NOTE|LOSS|EXPORT|TOPOLOGY|NVML_\w+)"
)
"""Tables that may be shown with their texts replaced; others hold the environment and output."""
_META_KEPT: Final = ("format", "version", "start_realtime_ns", "backend", "driver", "world_size",
    "ranks", "nsys")  # fmt: skip
_PLAIN: Final = ("GPUTRACE_EXPORT",)
_NUMBERS_IN_BYTES: Final = ("objectId", "cacheConfig")
"""Columns of nvprof; what else is bytes could be anything, and becomes zeros."""


class Redaction:
    """Stand-ins for the names of one trace."""

    def __init__(self) -> None:
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._words: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self._cache: dict[str, str] = {}

    def learn(self, kind: str, names: Iterable[str]) -> None:
        """Names to look for in all texts, in any case of letters; a path by its last part."""
        for name in names:
            for word in {name, re.split(r"[/\\]", name)[-1], name.partition(".")[0]}:
                if len(word) >= _SHORTEST and not word.isdecimal():
                    self._words.setdefault(word.lower(), self.stand_in(kind, name))
        words = sorted(map(re.escape, self._words), key=len, reverse=True)
        joined = rf"(?<![A-Za-z0-9])(?:{'|'.join(words)})(?![A-Za-z0-9])"
        self._pattern = re.compile(joined, re.IGNORECASE) if words else None
        self._cache.clear()

    def learn_from(self, texts: Iterable[str]) -> None:
        """Users whose folders a text names."""
        self.learn("user", {user for text in texts for user in _USER.findall(text)})

    def learn_addresses(self, addresses: Iterable[str]) -> None:
        """PCI addresses, which are replaced in their order: it numbers the cards."""
        for address in sorted({address.lower() for address in addresses}):
            self._address(address)

    def stand_in(self, kind: str, name: str) -> str:
        """``host-1`` for the first host, and so on; nothing for nothing."""
        if not name:
            return ""
        known = self._stand_ins.get((kind, name.lower()))
        if known is None:
            count = sum(other == kind for other, _ in self._stand_ins)
            known = self._stand_ins[kind, name.lower()] = f"{kind}-{count + 1}"
        return known

    def text(self, text: str) -> str:
        """A text without what tells."""
        if len(text) > LONGEST:
            return self.stand_in("text", text)
        if text not in self._cache:
            self._cache[text] = self._replaced(text)
        return self._cache[text]

    def _replaced(self, text: str) -> str:
        text = _UUID.sub(lambda found: self._card(found[0]), text)
        text = _PCI.sub(lambda found: self._address(found[0]), text)
        for kind, pattern in (("url", _URL), ("mail", _MAIL), ("path", _PATH), ("address", _IP)):
            text = pattern.sub(lambda found, kind=kind: self.stand_in(kind, found[0]), text)  # type: ignore[misc]
        if self._pattern is not None:
            text = self._pattern.sub(lambda found: self._words[found[0].lower()], text)
        return text

    def _card(self, uuid: str) -> str:
        number = int(self.stand_in("card", uuid).rpartition("-")[2])
        prefix = uuid[:4] if uuid[:4].upper() in ("GPU-", "MIG-") else ""
        return f"{prefix}00000000-0000-0000-0000-{number:012d}"

    def _address(self, address: str) -> str:
        domain, _, _ = address.partition(":")
        number = int(self.stand_in("pci", address).rpartition("-")[2])
        return f"{'0' * len(domain)}:{number:02x}:00.0"

    # What `cut` asks:

    def takes(self, table: str) -> bool:
        return _TAKEN.fullmatch(table) is not None

    def prepare(self, database: sqlite3.Connection) -> None:
        database.create_function("redacted", 1, self._value, deterministic=True)
        database.create_function("stand_in", 2, self._stand_in_value, deterministic=True)

    def shown(self, table: str, column: str) -> str:
        name = quoted(column)
        if table.startswith("ENUM_") or table in _PLAIN:
            return name
        if (table, column) == ("GPUTRACE_META", "value"):
            kept = ", ".join(f"'{key}'" for key in _META_KEPT)
            return f"CASE WHEN name IN ({kept}) THEN {name} ELSE 'redacted' END"
        if (table, column) == ("PROCESSES", "name"):
            return f"stand_in('program', {name})"
        if (table, column) == ("GPUTRACE_PROCESS", "host"):
            return f"stand_in('host', {name})"
        if column in _NUMBERS_IN_BYTES:
            return name
        return (
            f"CASE typeof({name}) WHEN 'text' THEN redacted({name}) "
            f"WHEN 'blob' THEN zeroblob(length({name})) ELSE {name} END"
        )

    def shown_text(self) -> str:
        return "redacted(value)"

    def _value(self, value: object) -> str | None:
        return self.text(value) if isinstance(value, str) else None

    def _stand_in_value(self, kind: str, value: object) -> str | None:
        return self.stand_in(kind, value) if isinstance(value, str) else None


def redaction_of(database: Database) -> Redaction:
    """What an nsys export or a trace of ours tells of people, machines and programs."""
    redaction = Redaction()
    redaction.learn("host", _texts(database, "GPUTRACE_PROCESS", "host"))
    meta = _named(database, "GPUTRACE_META")
    redaction.learn("host", filter(None, [meta.get("hostname", "")]))
    system = _named(database, "TARGET_INFO_SYSTEM_ENV") | _named(database, "META_DATA_CAPTURE")
    told = {name.lower().replace("_", " "): value for name, value in system.items()}
    redaction.learn("host", [v for n, v in told.items() if n.endswith(("hostname", "host name"))])
    redaction.learn("user", [v for n, v in told.items() if n.endswith(("user", "user name"))])
    programs = _texts(database, "PROCESSES", "name")
    redaction.learn_from([*programs, *meta.values(), *system.values()])
    redaction.learn("program", [name for name in programs if name])
    command = re.findall(r"[\w./+@-]+\.(?:py|sh|ipynb)\b", meta.get("command", ""))
    redaction.learn("program", command)
    redaction.learn("job", filter(None, [meta.get("job", "")]))
    for table in ("TARGET_INFO_GPU", "GPUTRACE_NVML_DEVICE"):
        for column in database.tables.get(table, {}):
            found = (_PCI.findall(text) for text in _texts(database, table, column))
            redaction.learn_addresses(address for all in found for address in all)
    return redaction


def _texts(database: Database, table: str, column: str) -> list[str]:
    if not database.has(table, column):
        return []
    name = quoted(column)
    sql = f"SELECT DISTINCT {name} FROM {quoted(table)} WHERE typeof({name}) = 'text'"
    return [text for (text,) in database.query(sql)]


def _named(database: Database, table: str) -> dict[str, str]:
    if not database.has(table, "name", "value"):
        return {}
    sql = f"SELECT CAST(name AS TEXT), CAST(value AS TEXT) FROM {quoted(table)} WHERE name NOT NULL"
    return {name: value or "" for name, value in database.query(sql)}
