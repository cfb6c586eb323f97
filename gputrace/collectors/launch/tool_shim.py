"""Shim between a recording tool (nsys, nvprof) and the program: `python -I -S FILE`.

Such a tool may change the streams and signals of its child, and end before it, as nsys does at the
end of the recorded window. The shim gives the program the streams and signals that it would have
without `gputrace record`, and writes its pid and its exit code, -N for signal N, to files of the
folder.

Arguments: the folder, the descriptors of the three streams (``200,201,-``; ``-`` for a closed one),
the signals that the program is to ignore (``17``; ``-`` for none), the program and its arguments.
"""

import os
import signal
import sys


def main(folder: str, streams: str, ignored: str, command: list[str]) -> int:
    """Run the program; return its exit code, 128 + N for signal N, as a shell does."""
    for target, source in enumerate(streams.split(",")):
        if source == "-":
            os.close(target)
        else:
            os.dup2(int(source), target)
            os.close(int(source))
    # Its end would be no news otherwise.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Signals from the terminal are for the program.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    program = os.fork()
    if not program:
        numbers = [] if ignored == "-" else [int(number) for number in ignored.split(",")]
        _become(folder, command, before, numbers)
    _, status = os.waitpid(program, 0)
    code = os.waitstatus_to_exitcode(status)
    if not os.path.exists(os.path.join(folder, "program.failed")):  # noqa: PTH110, PTH118
        _leave(folder, "program.code", str(code))
    return code if code >= 0 else 128 - code


def _become(
    folder: str, command: list[str], mask: set[int | signal.Signals], ignored: list[int]
) -> None:
    """Turn this process into the program, after writing its pid."""
    _leave(folder, "program.pid", str(os.getpid()))
    # Undo what Python ignores or handles.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.unlink(os.path.join(folder, "program.pid"))  # noqa: PTH108, PTH118
        _leave(folder, "program.failed", str(error.strerror))
    os._exit(126)


def _leave(folder: str, name: str, text: str) -> None:
    """Write a file atomically."""
    path = os.path.join(folder, name)  # noqa: PTH118
    with open(f"{path}.tmp", "w") as file:  # noqa: PTH123
        file.write(text)
    os.replace(f"{path}.tmp", path)  # noqa: PTH105


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
