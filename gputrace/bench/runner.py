"""Runs what is planned, one after another, and keeps what came of each."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from gputrace.bench.database import Database, Run
from gputrace.bench.environments import Environments, Unavailable
from gputrace.bench.folder import Folder
from gputrace.bench.nodes import Nodes
from gputrace.bench.outcome import Failed, read_result, why_failed
from gputrace.bench.plan import Planned, arguments_of, why_not
from gputrace.bench.processes import Program, run
from gputrace.bench.settings import MADE
from gputrace.bench.study import Study
from gputrace.units import format_ns

_IMAGES: Final = "images.py"
_SIDE: Final = 264
_SIDES: Final = {"inception3": 320}
"""Pixels of an image's side, which a random crop of the model's input is taken of."""


@dataclass(frozen=True, slots=True)
class Runner:
    """What all runs of a study have in common.

    Attributes:
        gpus: as CUDA_VISIBLE_DEVICES names them.
        backend: of `gputrace record`.
        nodes: the machines that it may use.
    """

    study: Study
    folder: Folder
    database: Database
    environments: Environments
    gpus: Sequence[str]
    backend: str
    nodes: Nodes = field(default_factory=Nodes)

    def run(self, planned: Planned) -> Run:
        """Makes one run and saves it; a KeyboardInterrupt leaves it as if it had never begun."""
        empty = Run(*planned.place, "done")
        if self.nodes.spreads(planned):
            reason = self.nodes.why_not(planned)
        else:
            reason = why_not(planned, len(self.gpus))
        if not reason:
            try:
                python = self.environments.find(planned.framework)
            except Unavailable as error:
                reason = str(error)
        if reason:
            return self.database.save(replace(empty, state="skipped", why=reason))
        self.folder.clean()
        ended = self._make(_Attempt(self, planned, python), empty)
        return self.database.save(ended)

    def _make(self, attempt: _Attempt, empty: Run) -> Run:
        started = time.time_ns()
        try:
            attempt.go()
            result, why = read_result(attempt.out, attempt.planned.configuration.settings), ""
        except Failed as error:
            result, why = None, str(error)
        trace, log = attempt.keep()
        if not why and attempt.planned.recorded and trace is None:
            result, why = None, "gputrace record left no trace"
        return replace(
            empty,
            state="failed" if why else "done",
            why=why,
            started_ns=started,
            ended_ns=time.time_ns(),
            exit_code=attempt.code,
            result=result,
            trace=trace,
            log=log,
        )


class _Attempt:
    """One run under way, and its files."""

    def __init__(self, runner: Runner, planned: Planned, python: Path) -> None:
        self._runner, self.planned, self._python = runner, planned, python
        self._folder = runner.folder
        self.code: int | None = None
        self._said = ""
        underway, name = self._folder.underway, planned.name
        self._trace, self._log = underway / f"{name}.sqlite", underway / f"{name}.log"
        self.out, self.err = underway / f"{name}.out", underway / f"{name}.err"

    def go(self) -> None:
        """Runs the script to its end; raises Failed where that is not a good one."""
        command = self._command(self._images())
        timeout = self._runner.study.timeout_ns
        self.code, in_time = self._run(command, None if timeout is None else timeout / 1e9)
        if not in_time and timeout is not None:
            raise Failed(f"ended after {format_ns(timeout)}, the study's timeout")
        if self.code:
            raise Failed(why_failed(self.code, self.out, self.err))

    def _run(self, command: list[str], timeout_s: float | None = None) -> tuple[int, bool]:
        variables = self._variables()
        words = [*(f"{name}={value}" for name, value in variables.items()), *command]
        self._said = f"$ {shlex.join(words)}\n"
        program = Program(command, variables, self._folder.path, self.out, self.err)
        try:
            return run(program, timeout_s)
        except OSError as error:
            raise Failed(f"{command[0]}: {error.strerror}") from None

    def _command(self, data: str | None) -> list[str]:
        planned, nodes = self.planned, self._runner.nodes
        several = nodes.spreads(planned)
        words = arguments_of(planned, data, nodes.gpus if several else None)
        script = [str(self._python), str(planned.framework.script), *words]
        record = self._record() if planned.recorded else []
        return nodes.command(planned, record, script) if several else [*record, *script]

    def _record(self) -> list[str]:
        record = [sys.executable, "-m", "gputrace", "record", "-o", str(self._trace), "--force"]
        return [*record, "--backend", self._runner.backend, "--"]

    def _variables(self) -> dict[str, str]:
        """Which GPUs it sees, where the study says that."""
        visible = self.planned.configuration.settings.get("visible")
        if not visible:
            return {}
        gpus = self._runner.gpus
        names = [gpus[index] if index < len(gpus) else str(index) for index in visible]
        order = {} if "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return order | {"CUDA_VISIBLE_DEVICES": ",".join(names)}

    def _images(self) -> str | None:
        """The folder of images that the run is to read, made now if need be."""
        settings = self.planned.configuration.settings
        form = settings.get("data")
        if form not in MADE:
            return None
        side, count = _SIDES.get(settings.get("model", ""), _SIDE), self._runner.study.images
        folder = self._folder.images / f"{form}-{side}-{count}"
        if not (folder / "done.json").exists():
            self._make_images(folder, ["--count", count, "--size", side, "--format", form])
        return str(folder)

    def _make_images(self, folder: Path, options: Sequence[object]) -> None:
        self._runner.environments.tell(f"making images in {folder}")
        script = self.planned.framework.script.with_name(_IMAGES)
        # With gputrace's own Python: not every framework's has what it needs.
        words = [sys.executable, script, folder, *options, "--seed", 0]
        self.code, _ = self._run([str(word) for word in words])
        if self.code:
            raise Failed(f"no images: {why_failed(self.code, self.out, self.err)}")

    def keep(self) -> tuple[str | None, str | None]:
        """Moves the trace and the log to where they stay; their places below the results."""
        with self._log.open("wb") as log:
            log.write(self._said.encode("utf-8", "surrogateescape"))
            for path in (self.out, self.err):
                if path.exists():
                    with path.open("rb") as file:
                        shutil.copyfileobj(file, log)
                    path.unlink()
        trace = self._move(self._trace, self._folder.traces) or self._move_parts()
        return trace, self._move(self._log, self._folder.logs)

    def _move_parts(self) -> str | None:
        """A folder of the traces that the nodes of a run left, one each."""
        stem = self._trace.stem
        parts = list(self._folder.underway.glob(f"{stem}.*{self._trace.suffix}"))
        if not parts:
            return None
        folder = self._folder.traces / stem
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for part in parts:
            part.replace(folder / part.name)
        return f"{folder.parent.name}/{stem}"

    def _move(self, path: Path, folder: Path) -> str | None:
        if not path.exists():
            return None
        path.replace(folder / path.name)
        return f"{folder.name}/{path.name}"
