"""`python .ci/audit.py`: whether an advisory is known of what the locks name.

Ends with 1 where one is; says so in one line, and goes on, where nobody who knows can be asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

LOCKS: Final = ("locks/runtime.lock", "locks/dev.lock")
IGNORED: Final[dict[str, str]] = {}
"""Advisories that do not concern us, each with the reason."""
_PATIENCE_S: Final = "15"


def command() -> list[str]:
    """Return the command that audits: it installs nothing and takes the hashes of the locks."""
    asked = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--timeout"]
    asked += [_PATIENCE_S, "--progress-spinner", "off", "--format", "json"]
    return asked + [word for lock in LOCKS for word in ("--requirement", lock)]


def judge(answer: str, complaint: str, ignored: dict[str, str]) -> tuple[int, list[str]]:
    """The exit code and what to say, of what pip-audit says on stdout and on stderr."""
    try:
        told: list[dict[str, Any]] = json.loads(answer)["dependencies"]
    except (ValueError, LookupError, TypeError):
        return 0, [f"not audited: no advisories can be had ({_last(complaint)})"]
    known = [one for one in told if "skip_reason" not in one]
    if not known:
        return 0, ["not audited: the service of advisories knows none of the packages from here"]
    found = list(_found(known, ignored))
    seen = {id for one in known for own in one["vulns"] for id in _ids(own)}
    stale = [f"{id}: is ignored, and no longer there" for id in sorted(ignored.keys() - seen)]
    unknown = len(told) - len(known)
    more = f", {unknown} more are not known there" if unknown else ""
    summary = f"audited {len(known)} packages{more}: {len(found)} advisories"
    return int(bool(found or stale)), [*found, *stale, summary]


def _found(known: list[dict[str, Any]], ignored: dict[str, str]) -> Iterator[str]:
    for one in known:
        for own in one["vulns"]:
            if not _ids(own) & ignored.keys():
                mended = ", ".join(own["fix_versions"]) or "no release yet"
                yield f"{one['name']} {one['version']}: {own['id']}; mended in {mended}"


def _ids(vulnerability: dict[str, Any]) -> set[str]:
    return {vulnerability["id"], *vulnerability.get("aliases", ())}


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def main() -> int:
    ran = subprocess.run(command(), capture_output=True, text=True, check=False)
    if "No module named pip_audit" in ran.stderr:
        print("pip-audit is not installed: make lock, then make audit", file=sys.stderr)
        return 1
    code, lines = judge(ran.stdout, ran.stderr, IGNORED)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
