"""Connection to a Dask cluster: a running one, a local one, or one started through Slurm."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.resource_tracker import ensure_running
from typing import TYPE_CHECKING, Any, Final

from gputrace.errors import MissingError, UsageError

if TYPE_CHECKING:
    from distributed import Client

_PATIENCE_S: Final = 30
"""Timeout for the scheduler and its first worker; a Slurm queue is waited for indefinitely."""
HINT: Final = 'pip install "gputrace[cluster]", on all its machines'


@contextmanager
def connected(where: str) -> Iterator[Client]:
    """Yield a client whose cluster has at least one worker."""
    kind, _, count = where.partition(":")
    _check_extra(kind)
    for name in ("distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with _STARTED.get(kind, _running)(where, count) as target:
        client = _client(target, where)
        try:
            _wait_for_workers(client, where, forever=kind == "slurm")
            yield client
        finally:
            _end(client, 1)


def _check_extra(kind: str) -> None:
    try:
        import_module("distributed")
        import_module("dask_jobqueue" if kind == "slurm" else "dask")
    except ImportError as error:
        raise MissingError(f"--scheduler needs Dask ({error}): {HINT}") from None


def _client(target: Any, where: str) -> Client:
    from distributed import Client

    try:
        return Client(target, timeout=_PATIENCE_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise MissingError(f"no Dask scheduler answers at {where}") from error


def _wait_for_workers(client: Client, where: str, *, forever: bool) -> None:
    try:
        client.wait_for_workers(1, timeout=None if forever else _PATIENCE_S)
    except TimeoutError:
        raise MissingError(f"the scheduler at {where} has no workers; start some") from None


@contextmanager
def _running(where: str, _: str) -> Iterator[str]:
    if "://" not in where and not where.rpartition(":")[2].isdecimal():
        problem = "give an address, as tcp://10.0.0.1:8786, local:N or slurm:N"
        raise UsageError(f"{where!r} is no scheduler; {problem}")
    yield where


@contextmanager
def _local(where: str, count: str) -> Iterator[Any]:
    from distributed import LocalCluster

    workers = _number(where, count)
    with _without_interrupts():
        try:
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                dashboard_address=None,
                silence_logs=logging.CRITICAL,
            )
        except (OSError, RuntimeError) as error:
            raise MissingError(f"{where}: the workers did not start ({error!r})") from error
    try:
        yield cluster
    finally:
        _end(cluster, 2)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block Ctrl-C, which reaches all processes of a terminal, until this is done.

    Processes started meanwhile inherit the mask and never get it: this process ends them.
    """
    ensure_running()  # It would unblock interrupts if started later.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _slurm(where: str, count: str) -> Iterator[Any]:
    """Start workers as jobs, configured by `jobqueue.slurm` of Dask's configuration."""
    import dask
    from dask_jobqueue import SLURMCluster

    workers = _number(where, count)
    if shutil.which("sbatch") is None:
        raise MissingError(f"{where}: no sbatch on this machine; use it where jobs are submitted")
    known = dask.config.get("jobqueue.slurm", {})
    usual = {"cores": 1, "memory": "4GB", "processes": 1}
    lacking = {name: value for name, value in usual.items() if not known.get(name)}
    try:
        cluster = SLURMCluster(**lacking)
        cluster.scale(workers)
    except (OSError, ValueError, RuntimeError) as error:
        raise MissingError(f"{where}: {error}") from error
    try:
        yield cluster
    finally:
        _end(cluster, 5)


def _end(what: Any, patience_s: float) -> None:
    """Close a client or cluster; if it takes longer, it ends with this process."""
    with suppress(TimeoutError):
        what.close(timeout=patience_s)


def _number(where: str, count: str) -> int:
    if not count.isdecimal() or int(count) < 1:
        raise UsageError(f"{where!r} does not say how many workers; write local:8 or slurm:64")
    return int(count)


_STARTED: Final = {"local": _local, "slurm": _slurm}
