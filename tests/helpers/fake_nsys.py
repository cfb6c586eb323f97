"""An nsys that records nothing: it runs the program as nsys does, and exports what a test wants.

FAKE_MODE says what goes wrong, FAKE_LOG gets the command lines, FAKE_OPTIONS is the name of one of
the lists of options below.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.exports import Export, global_id

MODE = os.environ.get("FAKE_MODE", "")
MACHINE = 0x0102
"""The upper 16 bits of global ids in the export."""
SECRETS = ("planted-env", "planted-argument", "planted-output", "planted-file", "planted-user")
OLDEST = {
    "-t, --trace": "Possible values are 'cuda', 'nvtx', 'osrt' or 'none'.",
    "-o, --output": "Output report filename.",
    "-f, --force-overwrite": "Possible values are 'true' or 'false'.",
}
OPTIONS = {
    "old": OLDEST,
    "2022.4": OLDEST
    | {
        "-s, --sample": "Possible values are 'process-tree', 'system-wide' or 'none'.",
        "--cpuctxsw": "Possible values are 'process-tree', 'system-wide', or 'none'.",
        "--cuda-graph-trace": "Possible values are 'graph' or 'node'.",
        "--wait": "Possible values are 'primary' or 'all'.",
        "--kill": "Possible values are 'none', 'sigkill', 'sigterm', or signal number.",
        "-x, --stop-on-exit": "Possible values are 'true' or 'false'.",
        "--export": "Possible formats are: none arrow sqlite hdf text json",
        "-c, --capture-range": "Possible values are none, cudaProfilerApi, nvtx, hotkey.",
        "--capture-range-end": "Possible values are 'none', 'stop', 'stop-shutdown'.",
        "--session-new": "Start the collection in a new named session.",
        "-y, --delay": "Collection start delay in seconds.",
        "-d, --duration": "Collection duration in seconds.",
    },
}
OPTIONS["graphs by node"] = OPTIONS["2022.4"] | {"--cuda-graph-trace": "Possible values are 'node'"}


def main(words: list[str]) -> int:
    if words == ["--version"]:
        _say("NVIDIA Nsight Systems version 2022.4.2.1-df9881f")
        return 0
    if words == ["profile", "--help"]:
        _say("\nusage: nsys profile [<args>] [application] [<application args>]\n")
        for name, text in OPTIONS[os.environ.get("FAKE_OPTIONS", "2022.4")].items():
            _say(f"\t{name}=\n\n\t   {text}\n\t   For example, --sample=none.\n")
        return 0
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps(words) + "\n")
    return {"profile": _profile, "export": _export}.get(words[0], _nothing)(words[1:])


def _nothing(_words: list[str]) -> int:
    return 0


def _profile(words: list[str]) -> int:
    end = next(i for i, word in enumerate(words) if not word.startswith("--"))
    options = dict(word.split("=", 1) for word in words[:end])
    if MODE == "refuses":
        _say("unrecognised option '--trace'")
        return 1
    _say("Collecting data...")
    # As nsys does: a session of its own, and pipes of nsys's for its output.
    code = subprocess.run(
        words[end:], start_new_session=True, capture_output=True, close_fds=False, check=False
    ).returncode
    time.sleep(float(os.environ.get("FAKE_FINISH_S", "0")))
    _say("Generated:")
    if MODE != "no report":
        suffix = "qdstrm" if MODE == "raw" else "nsys-rep"
        report = Path(options["--output"].replace("%%", "%") + f".{suffix}")
        report.write_text("report")
        _say(f"    {report}")
    return code


def _export(words: list[str]) -> int:
    target = Path(words[words.index("-o") + 1])
    report = Path(words[-1])
    if MODE == "locked" and target.parent == report.parent:
        _say("ERROR: Database Error: database is locked")
        return 1
    if MODE == "too new":
        _say("Error: the report is of a newer version")
        return 1
    folder = report.parent
    _small(int((folder / "program.pid").read_text()), report.stat().st_mtime_ns).write(target)
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _small(pid: int, ended_ns: int) -> Export:
    """Five kernels of the program, from 60 s before its end, and what must not go further."""
    export = Export()
    process = global_id(pid, host=MACHINE)
    for i in range(5):
        export.kernel(i * 1000, i * 1000 + 400, pid=pid, globalPid=process)
    export.give("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=ended_ns - 60 * 10**9)
    export.give("PROCESSES", "globalPid", "pid", "name")
    export.add("PROCESSES", globalPid=process, pid=pid, name="python")
    export.add("PROCESSES", globalPid=global_id(1, host=MACHINE), pid=1, name="init")
    export.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.7.2")
    export.add("META_DATA_EXPORT", name="EXPORT_USER", value=SECRETS[4])
    value = f'KEY="{SECRETS[0]}"'
    export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=value)
    export.give("TARGET_INFO_SYSTEM_ENV", "name", "value")
    export.add("TARGET_INFO_SYSTEM_ENV", name="CommandLine", value=SECRETS[1])
    export.give("ProcessStreams", "globalPid", "contentId")
    export.add("ProcessStreams", globalPid=process, contentId=export.string(SECRETS[2]))
    export.give("ANALYSIS_FILE", "id", "contentId")
    export.add("ANALYSIS_FILE", id=1, contentId=export.string(SECRETS[3]))
    export.give("DIAGNOSTIC_EVENT", "severity", "text")
    export.add("DIAGNOSTIC_EVENT", severity=3, text="This driver is not supported")
    export.add("DIAGNOSTIC_EVENT", severity=2, text="No NVTX events collected")
    return export


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
