"""Redaction of the texts of a trace that identify people, machines and programs.

A name gets the same pseudonym everywhere (``host-1``, ``path-3``), so that equal names stay equal.
Kernel names and times are kept, which is up to the callers of `Redaction`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from msgspec.structs import replace

from gputrace.model.events import AT, Column, Events, Kind
from gputrace.model.nvml import Nvml
from gputrace.model.options import Window
from gputrace.model.trace import Coverage, Device, NoGpu, Selection, Session, Trace
from gputrace.store.sqlite_page_scan import quote_identifier
from gputrace.store.sqlite_reader import Database, SqliteTrace

REDACTED: Final = "redacted: names of hosts, users, paths and programs are replaced"
_NAME: Final = Path("redacted")


class RedactedTrace(Trace):
    """View of another trace with redacted names; does not close that trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(_NAME)
        self._trace = trace
        self.source, self.origin = trace.source, trace.origin
        self._redaction = (
            redaction_for(trace.tables.database) if isinstance(trace, SqliteTrace) else Redaction()
        )
        self._learn()
        if not isinstance(trace, SqliteTrace) and Kind.MODULE in trace.kinds:
            ids = np.unique(trace.events([Kind.MODULE], ["name"]).name)
            self._redaction.learn_modules(trace.names(ids).values())
        if trace.no_gpu is not None:
            self.no_gpu = NoGpu(*map(self._redaction.text, trace.no_gpu))
        self.quality.notes.append(REDACTED)
        self._copied = 0, 0

    def _learn(self) -> None:
        hosts = {process.host_name for process in self._trace.processes}
        programs = {process.name for process in self._trace.processes}
        self._redaction.learn("host", filter(None, hosts | self._trace.session.hosts))
        self._redaction.learn("program", filter(None, programs))
        self._redaction.learn_from(map(str, self._trace.paths))

    @property
    def session(self) -> Session:
        session = self._trace.session
        hosts = frozenset(self._redaction.stand_in("host", host) for host in session.hosts)
        return replace(session, hosts=hosts, job="")

    @property
    def kinds(self) -> frozenset[Kind]:
        return self._trace.kinds

    @cached_property
    def _kernels(self) -> frozenset[int]:
        """Ids of kernel names, which are not redacted."""
        names = self._trace.events([Kind.KERNEL], ["name"]).name
        return frozenset(np.unique(names).tolist())

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        return self._shown(self._trace.names(ids))

    def search(self, ids: Collection[int] | Column, pattern: str) -> dict[int, str]:
        return self._shown(self._trace.search(ids, pattern))

    def _shown(self, texts: dict[int, str]) -> dict[int, str]:
        kept, redacted = self._kernels, self._redaction.text
        return {id: text if id in kept else redacted(text) for id, text in texts.items()}

    def device(self, process: int, device: int) -> Device:
        known = self._trace.device(process, device)
        return replace(known, uuid=self._redaction.text(known.uuid))

    def coverage(self, process: int) -> Coverage:
        return self._trace.coverage(process)

    def node_stretches(self) -> Sequence[Window]:
        return self._trace.node_stretches()

    def read_nvml(self) -> Nvml:
        nvml, redacted = self._trace.nvml, self._redaction.text
        cards = (
            replace(card, uuid=redacted(card.uuid), pci=redacted(card.pci)) for card in nvml.cards
        )
        shown = self._redaction.stand_in
        uses = (replace(use, name=shown("program", use.name)) for use in nvml.processes)
        return replace(nvml, cards=tuple(cards), processes=tuple(uses))

    def read(self, wanted: Selection) -> Events:
        events = self._trace.read(wanted)
        # Copy processes and quality problems known so far, redacted.
        theirs, ours = self._trace.quality, self.quality
        if len(self._trace.processes) > len(self.processes):
            self._learn()
        for process in self._trace.processes[len(self.processes) :]:
            program = self._redaction.stand_in("program", process.name)
            host = self._redaction.stand_in("host", process.host_name)
            self.processes.append(replace(process, name=program, host_name=host))
        warnings, notes = self._copied
        self._copied = len(theirs.warnings), len(theirs.notes)
        ours.warnings += map(self._redaction.text, theirs.warnings[warnings:])
        ours.notes += map(self._redaction.text, theirs.notes[notes:])
        for reason, rows in theirs.dropped.items():
            ours.drop(reason, rows)
        return events

    def close(self) -> None:
        pass


_USER: Final = re.compile(r"/(?:home|Users|u|users|scratch|export/home)/([^/\s:'\"]+)")
_PATH: Final = re.compile(
    r"(?:[A-Za-z]:)?[\w.~+@%=,-]*(?:[/\\][\w.~+@%=,#-]+)+[/\\]?"
    r"|[\w.+-]+\.(?:py|pyc|sh|so|ipynb|exe|dll|json|ya?ml|sqlite|nsys-rep|qdrep|h5|pth?)\b"
)
"""Text with slashes that is not an operator name, and file names."""
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+")
_MAIL: Final = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IP: Final = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_PATTERNS: Final = {"url": _URL, "mail": _MAIL, "path": _PATH, "address": _IP}
"""Patterns of what gets a pseudonym of its kind, in the order of the search."""
_UUID: Final = re.compile(
    r"\b(?:(?:GPU|MIG)-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.I
)
_PCI: Final = re.compile(r"\b(?:[0-9a-f]{4}|[0-9a-f]{8}):[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.I)
_MODULES: Final = (
    "SELECT CAST(value AS TEXT) FROM StringIds "
    "WHERE id IN (SELECT nameId FROM GPUTRACE_HOST_RANGE WHERE kind = 7)"
)
"""Paths of modules, which are names of classes, numbered and parted by slashes."""
_NUMBERED: Final = re.compile(r"(.*?)(_\d+)?")
_PUBLIC: Final = re.compile(
    r"(Lazy)?(Linear|Bilinear|Conv(Transpose)?[123]d|(Sync)?BatchNorm([123]d)?|InstanceNorm[123]d)"
    r"|(Layer|Group|RMS|LocalResponse)Norm|Embedding(Bag)?|Identity|Flatten|Unflatten|Fold|Unfold"
    r"|Sequential|Module(List|Dict)|Parameter(List|Dict)|MultiheadAttention"
    r"|Transformer((En|De)coder(Layer)?)?|(RNN|LSTM|GRU)(Cell)?|(Alpha)?Dropout([123]d)?"
    r"|(Adaptive)?(Avg|Max)Pool[123]d|(Constant|Reflection|Replication|Zero)Pad[123]d"
    r"|(Leaky|P|R)?ReLU6?|C?ELU|SELU|GELU|SiLU|Mish|GLU|Hard(sigmoid|swish|tanh)|Sigmoid|Tanh"
    r"|(Log)?Softmax(2d)?|Softplus|Upsample|Pixel(Uns|S)huffle"
    r"|(CrossEntropy|MSE|(Smooth)?L1|NLL|BCE(WithLogits)?|KLDiv|Huber|CTC)Loss"
    r"|DataParallel|DistributedDataParallel|FullyShardedDataParallel|OptimizedModule"
)
"""Classes of torch.nn and its wrappers, whose names are kept; others are of programs and models."""
LONGEST: Final = 20_000
"""Maximum characters of a text to search; a longer one is replaced as a whole."""
_SHORTEST: Final = 2
"""Minimum characters of a name to search for inside other texts."""

_TAKEN: Final = re.compile(
    r"CUPTI_ACTIVITY_KIND_\w+|CUDA_\w+_EVENTS|NVTX_\w+|OSRT_API|CUBLAS_EVENTS|CUDNN_EVENTS"
    r"|MPI_\w+|PROFILER_OVERHEAD|GPU_METRICS|ENUM_\w+|StringIds|StringTable|Version|PROCESSES|ThreadNames"
    r"|TARGET_INFO_(GPU|GPU_METRICS|CUDA_\w+|NVTX_\w+|SESSION_START_TIME)"
    r"|GPUTRACE_(META|PROCESS(_USE)?|LIFE|STEP|HOST_RANGE|MESSAGE|PYTHON_SAMPLE|CLOCK|(API_)?WINDOW|NOTE|LOSS|EXPORT|TOPOLOGY|NVML_\w+)"
)
"""Tables exported with redacted texts; others hold the environment and program output."""
_META_KEPT: Final = ("format", "version", "start_realtime_ns", "backend", "driver", "world_size",
    "ranks", "nsys")  # fmt: skip
_NUMBERS_IN_BYTES: Final = ("objectId", "cacheConfig")
"""Numeric BLOB columns of nvprof; all other BLOBs are zeroed, since they may hold anything."""


class Redaction:
    """Pseudonyms for the names in one trace."""

    def __init__(self) -> None:
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._words: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self._cache: dict[str, str] = {}
        self._modules: set[str] = set()

    def learn(self, kind: str, names: Iterable[str]) -> None:
        """Add names to search for in all texts, ignoring case; a path by its last component."""
        for name in names:
            for word in {name, re.split(r"[/\\]", name)[-1], name.partition(".")[0]}:
                if len(word) >= _SHORTEST and not word.isdecimal():
                    self._words.setdefault(word.lower(), self.stand_in(kind, name))
        words = sorted(map(re.escape, self._words), key=len, reverse=True)
        joined = rf"(?<![A-Za-z0-9])(?:{'|'.join(words)})(?![A-Za-z0-9])"
        self._pattern = re.compile(joined, re.IGNORECASE) if words else None
        self._cache.clear()

    def learn_from(self, texts: Iterable[str]) -> None:
        """Add the users whose home folders appear in texts."""
        self.learn("user", {user for text in texts for user in _USER.findall(text)})

    def learn_addresses(self, addresses: Iterable[str]) -> None:
        """Add PCI addresses, which are numbered in sorted order, like the cards."""
        for address in sorted({address.lower() for address in addresses}):
            self._address(address)

    def learn_modules(self, paths: Iterable[str]) -> None:
        """Add paths of modules, of which only the classes are replaced that are not torch's."""
        self._modules.update(paths)
        self._cache.clear()

    def stand_in(self, kind: str, name: str) -> str:
        """Return the pseudonym of a name, such as ``host-1`` for the first host; empty if empty."""
        if not name:
            return ""
        known = self._stand_ins.get((kind, name.lower()))
        if known is None:
            count = sum(other == kind for other, _ in self._stand_ins)
            known = self._stand_ins[kind, name.lower()] = f"{kind}-{count + 1}"
        return known

    def text(self, text: str) -> str:
        """Return the redacted text."""
        if len(text) > LONGEST:
            return self.stand_in("text", text)
        if text in self._cache:
            return self._cache[text]
        what, at, line = text.partition(AT)
        if text in self._modules:
            shown = "/".join(map(self._module, text.split("/")))
        elif at and what in self._modules:
            shown = f"{self.text(what)}{AT}{self.text(line)}"
        else:
            shown = _UUID.sub(lambda match: self._card(match[0]), text)
            shown = _PCI.sub(lambda match: self._address(match[0]), shown)
            for kind, pattern in _PATTERNS.items():
                shown = pattern.sub(lambda match, kind=kind: self.stand_in(kind, match[0]), shown)  # type: ignore[misc]
            if self._pattern is not None:
                shown = self._pattern.sub(lambda match: self._words[match[0].lower()], shown)
        self._cache[text] = shown
        return shown

    def _module(self, name: str) -> str:
        matched = _NUMBERED.fullmatch(name)
        kind, number = (matched[1], matched[2] or "") if matched else (name, "")
        return (kind if _PUBLIC.fullmatch(kind) else self.stand_in("module", kind)) + number

    def _card(self, uuid: str) -> str:
        number = int(self.stand_in("card", uuid).rpartition("-")[2])
        prefix = uuid[:4] if uuid[:4].upper() in ("GPU-", "MIG-") else ""
        return f"{prefix}00000000-0000-0000-0000-{number:012d}"

    def _address(self, address: str) -> str:
        domain, _, _ = address.partition(":")
        number = int(self.stand_in("pci", address).rpartition("-")[2])
        return f"{'0' * len(domain)}:{number:02x}:00.0"

    def takes(self, table: str) -> bool:
        """Return True if a table is exported at all."""
        return _TAKEN.fullmatch(table) is not None

    def prepare(self, database: sqlite3.Connection) -> None:
        """Register the SQL functions used by `shown`, redacted(text) and stand_in(kind, name)."""

        def redacted(value: object) -> str | None:
            return self.text(value) if isinstance(value, str) else None

        def stand_in(kind: str, value: object) -> str | None:
            return self.stand_in(kind, value) if isinstance(value, str) else None

        database.create_function("redacted", 1, redacted, deterministic=True)
        database.create_function("stand_in", 2, stand_in, deterministic=True)

    def shown(self, table: str, column: str) -> str:
        """Return the SQL expression for the exported value of a column."""
        name = quote_identifier(column)
        if table.startswith("ENUM_") or table == "GPUTRACE_EXPORT":
            return name
        if (table, column) == ("GPUTRACE_META", "value"):
            kept = ", ".join(f"'{key}'" for key in _META_KEPT)
            return f"CASE WHEN name IN ({kept}) THEN {name} ELSE 'redacted' END"
        if (table, column) in (("PROCESSES", "name"), ("GPUTRACE_PROCESS_USE", "name")):
            return f"stand_in('program', {name})"
        if (table, column) == ("GPUTRACE_PROCESS", "host"):
            return f"stand_in('host', {name})"
        if column in _NUMBERS_IN_BYTES:
            return name
        return (
            f"CASE typeof({name}) WHEN 'text' THEN redacted({name}) "
            f"WHEN 'blob' THEN zeroblob(length({name})) ELSE {name} END"
        )


def redaction_for(database: Database) -> Redaction:
    """Return a redaction for the identifying names in an nsys export or a gputrace trace."""
    redaction = Redaction()
    redaction.learn("host", _texts(database, "GPUTRACE_PROCESS", "host"))
    meta = _named(database, "GPUTRACE_META")
    redaction.learn("host", filter(None, [meta.get("hostname", "")]))
    system = _named(database, "TARGET_INFO_SYSTEM_ENV") | _named(database, "META_DATA_CAPTURE")
    labeled = {name.lower().replace("_", " "): value for name, value in system.items()}
    redaction.learn(
        "host", [v for n, v in labeled.items() if n.endswith(("hostname", "host name"))]
    )
    redaction.learn("user", [v for n, v in labeled.items() if n.endswith(("user", "user name"))])
    programs = _texts(database, "PROCESSES", "name")
    redaction.learn_from([*programs, *meta.values(), *system.values()])
    redaction.learn("program", [name for name in programs if name])
    command = re.findall(r"[\w./+@-]+\.(?:py|sh|ipynb)\b", meta.get("command", ""))
    redaction.learn("program", command)
    if database.has("GPUTRACE_HOST_RANGE", "kind", "nameId") and database.has("StringIds", "id"):
        redaction.learn_modules(path for (path,) in database.query(_MODULES) if path)
    redaction.learn("job", filter(None, [meta.get("job", "")]))
    for table in ("TARGET_INFO_GPU", "GPUTRACE_NVML_DEVICE"):
        for column in database.tables.get(table, {}):
            texts = _texts(database, table, column)
            redaction.learn_addresses(address for text in texts for address in _PCI.findall(text))
    return redaction


def _texts(database: Database, table: str, column: str) -> list[str]:
    texts = (text for (text,) in database.select(table, column) if isinstance(text, str))
    return list(dict.fromkeys(texts))


def _named(database: Database, table: str) -> dict[str, str]:
    if not database.has(table, "name", "value"):
        return {}
    columns = "CAST(name AS TEXT), CAST(value AS TEXT)"
    sql = f"SELECT {columns} FROM {quote_identifier(table)} WHERE name NOT NULL"
    return {name: value or "" for name, value in database.query(sql)}
