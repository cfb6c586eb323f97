"""The states of the C collector, and the transitions between them."""

from __future__ import annotations

import re
from pathlib import Path

from gputrace.collectors.spool.activity import read_spool
from tests.native.build import COLLECTOR, Machine


def test_the_transitions_in_the_header_are_those_of_the_code() -> None:
    header, code = ((COLLECTOR / f"capture.{end}").read_text() for end in ("h", "c"))
    states = re.findall(r"\w+", header.partition("enum capture_state {")[2].partition("}")[0])
    rows = re.findall(
        rf"^ \* +({'|'.join(states)}) +({'|'.join(states)}) +\S", header, re.MULTILINE
    )
    table = code.partition("allowed[] = {")[2].partition("};")[0]
    lines = re.findall(r"\[(\w+)\] = (.*),", table)
    assert [state for state, _ in lines] == states
    pairs = {(state, to) for state, many in lines for to in re.findall(r"1 << (\w+)", many)}
    assert pairs == {*rows}


def test_only_one_function_changes_the_state_of_a_running_collector() -> None:
    code = (COLLECTOR / "capture.c").read_text()
    writes = re.findall(r"capture\.state = (?!=)(\w+)", code)
    assert writes == ["next", "OFF"], "move_to, and the forked child"


def test_every_transition_records_its_windows_and_a_fork_in_any_state_disturbs_none(
    machine: Machine, tmp_path: Path
) -> None:
    """The tests' collector ends the program at a transition that is not in the table."""
    window = "capture 1 sleep 5 plain"
    steps = [
        "inject nvtx fork exit",  # armed
        f"{window} fork exit",  # recording
        f"capture 0 sleep 1500 fork exit {window}",  # leaving, and armed for a window
        "capture 0 sleep 1500 pause 1 fork exit pause 0",  # leaving, and armed for a profiler
        f"{window} capture 0 released 1 0 fork exit sleep 1500",  # left, and armed
        f"{window} rest 1 sleep 1500 fork exit",  # idle in a stretch
        f"finalized {window} capture 0",
    ]
    held = ["inject nvtx", window, "capture 0 fork exit", window, "finalized"]
    new, old = "libcupti.so.13", "old_cupti.so"
    # The old one leaves at a call of the program's alone.
    runs = ((old, steps, 0, 5, 1), (new, steps, 0, 5, 3), (new, held, 10**12, 2, 0))
    for number, (library, script, hold, windows, left) in enumerate(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        env = {"GPUTRACE_CAPTURE": "manual", "GPUTRACE_HOLD_NS": str(hold)}
        env["GPUTRACE_CUPTI"] = str(machine.folder / library)
        done = machine.run(folder, " ".join(script), env)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{left}\n", "")
        (path,) = folder.glob("*.spool")
        spool = read_spool(path)
        assert len(spool.records[b"KERN"]) == windows
        assert len(spool.switches["captures"]) == 2 * windows
        assert spool.whole
