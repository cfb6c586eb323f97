"""Process that gets the same signals as others, and says which: `python -I -S FILE NUMBERS WORDS`.

It has the signals NUMBERS (``signals:1,2,15``) blocked and ignores all others. For each byte that
it reads from stdin it writes a line to stdout: the signals since the last one, each as
``number:code:sender`` (si_code and si_pid). It ends when its stdin does.

WORDS are not used. `group_witness.py` says what they are there for.
"""

import os
import signal
import sys


def main(numbers: str) -> None:
    """Answer until nobody is there to ask."""
    watched = {int(number) for number in numbers.partition(":")[2].split(",")}
    # Hold nothing that others wait to see closed or want to unmount.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    for number in signal.valid_signals() - watched - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, watched)
    while os.read(0, 1):
        seen = []
        while pending := signal.sigpending() & watched:
            info = signal.sigwaitinfo(pending)
            seen.append(f"{info.si_signo}:{info.si_code}:{info.si_pid}")
        os.write(1, f"{' '.join(seen)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
