"""The states of the C collector: its header lists the transitions that its code allows."""

from __future__ import annotations

import re

from tests.native.build import COLLECTOR


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
