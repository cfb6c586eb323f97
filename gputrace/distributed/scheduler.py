"""Connection to a Dask scheduler: one that is running, or one started here or as jobs of Slurm."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from multiprocessing.resource_tracker import ensure_running
from typing import TYPE_CHECKING, Any, Final

from gputrace.errors import MissingError, UsageError
from gputrace.store.cache import cache_folder

if TYPE_CHECKING:
    from distributed import Client

_PATIENCE_S: Final = 30
"""Timeout for the scheduler and its first worker; a Slurm queue is waited for indefinitely."""
HINT: Final = 'pip install "gputrace[cluster]", on all its machines'


@contextmanager
def connected(where: str) -> Iterator[Client]:
    """Yield a client whose cluster has at least one worker."""
    kind, _, count = where.partition(":")
    try:
        from distributed import Client

        import_module("dask_jobqueue" if kind == "slurm" else "dask")
    except ImportError as error:
        raise MissingError(f"--scheduler needs Dask ({error}): {HINT}") from None
    for name in ("distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with ExitStack() as closing:
        target: Any = where
        if kind in _STARTED:
            if not count.isdecimal() or int(count) < 1:
                problem = "does not say how many workers; write local:8 or slurm:64"
                raise UsageError(f"{where!r} {problem}")
            start, patience_s = _STARTED[kind]
            target = start(where, int(count))
            closing.callback(_end, target, patience_s)
        elif "://" not in where and not where.rpartition(":")[2].isdecimal():
            problem = "give an address, as tcp://10.0.0.1:8786, local:N or slurm:N"
            raise UsageError(f"{where!r} is not a scheduler; {problem}")
        try:
            client = Client(target, timeout=_PATIENCE_S, set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise MissingError(f"no Dask scheduler answers at {where}") from error
        closing.callback(_end, client, 1)
        try:
            client.wait_for_workers(1, timeout=None if kind == "slurm" else _PATIENCE_S)
        except TimeoutError:
            raise MissingError(f"the scheduler at {where} has no workers; start some") from None
        yield client


def _credentials(where: str) -> Any:
    """Return the credentials of Dask's configuration if it requires encryption, else new ones.

    Without any, every user who can reach the scheduler or a worker runs code as this one.
    """
    from distributed import Security

    configured = Security()
    if configured.require_encryption:
        return configured
    try:
        return Security.temporary()
    except ImportError:
        raise MissingError(f"{where}: needs cryptography, to keep others out: {HINT}") from None


def _local(where: str, workers: int) -> Any:
    import dask
    from distributed import LocalCluster

    # Status pages would be open to all users of the machine.
    parts = ("scheduler", "worker", "nanny")
    nothing: dict[str, Any] = {f"distributed.{part}.http.routes": [] for part in parts}
    with _without_interrupts(), dask.config.set(nothing):
        try:
            return LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                # Any port: with none given, it warns where another cluster has its favourite.
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                silence_logs=logging.CRITICAL,
                security=_credentials(where),
            )
        except (OSError, RuntimeError) as error:
            raise MissingError(f"{where}: the workers did not start ({error!r})") from error


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


def _slurm(where: str, workers: int) -> Any:
    """Start workers as jobs, configured by `jobqueue.slurm` of Dask's configuration."""
    import dask
    from dask_jobqueue import SLURMCluster

    if shutil.which("sbatch") is None:
        raise MissingError(f"{where}: no sbatch on this machine; use it where jobs are submitted")
    known = dask.config.get("jobqueue.slurm", {})
    usual = {"cores": 1, "memory": "4GB", "processes": 1}
    lacking: dict[str, Any] = {name: value for name, value in usual.items() if not known.get(name)}
    try:
        if not known.get("shared-temp-directory"):
            # Jobs read their credentials there.
            folder = cache_folder() / "slurm"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lacking["shared_temp_directory"] = str(folder)
        cluster = SLURMCluster(security=_credentials(where), **lacking)
        cluster.scale(workers)
    except (OSError, ValueError, RuntimeError) as error:
        raise MissingError(f"{where}: {error}") from error
    return cluster


def _end(started: Any, patience_s: float) -> None:
    """Close a client or cluster; if it takes longer, it ends with this process."""
    with suppress(TimeoutError):
        started.close(timeout=patience_s)


_STARTED: Final = {"local": (_local, 2.0), "slurm": (_slurm, 5.0)}
"""Starter of the workers for each kind of cluster, and seconds for closing it."""
