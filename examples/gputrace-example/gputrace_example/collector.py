"""Records the host's signals of a program that runs with little priority."""

from dataclasses import replace
from shutil import which

from gputrace.extend import HOST, Backend


def obstacle(_environment):
    return None if which("nice") else "there is no program `nice` here; install coreutils"


def launch(plan, folder, command, environment):
    started = HOST.launch(plan, folder, command, environment)
    return replace(started, command=("nice", "-n", "10", *started.command))


NICED = Backend("niced", obstacle, launch, HOST.merge)
