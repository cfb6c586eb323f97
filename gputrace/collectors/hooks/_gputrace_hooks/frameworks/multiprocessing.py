"""Python's multiprocessing: its processes exit by ``os._exit``, so what they recorded is written
after their finalizers.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def finish_processes(util: "Any") -> None:
    """Write the events of each process that multiprocessing forks when it ends."""
    from .. import recorder

    def register(_: object) -> None:
        util.Finalize(None, recorder.finish, exitpriority=-100)
        for call in recorder.on_worker:
            call()

    # A child forgets finalizers and then calls this.
    util.register_after_fork(recorder.finish, register)


PATCHES = [("multiprocessing.util", finish_processes)]
