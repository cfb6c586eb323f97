"""Command ``k8s``: has the containers of a Kubernetes manifest record, or be ready to."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import click

from gputrace.cli import options
from gputrace.errors import ExitCode, InputError, MissingError, UsageError
from gputrace.version import __version__

_KINDS: Final = ("Pod", "Job", "CronJob", "JobSet", "PyTorchJob", "TrainJob")
_TOOL: Final = "gputrace"
"""Name of the init container, of its volume, and of the manager of a TrainJob's patch."""
_RESULTS: Final = "gputrace-results"
_PYTHON: Final = "python3"
_START: Final = "_gputrace_start.py"
_SPACE: Final = "/tmp/gputrace"
"""Folder for gputrace in a TrainJob, which can be given no init container."""
_NODE: Final = "node"
"""Replicated job that trains in the runtimes of Kubeflow, and its container."""


@click.command("k8s")
@click.argument("action", type=click.Choice(("patch",)))
@click.argument("manifest", type=options.UNCHECKED)
@click.option(
    "--with",
    "words",
    default="arm",
    metavar="WORDS",
    show_default=True,
    help="How programs start: arm, or record with its options, e.g. 'record --steps 50:70'.",
)
@click.option(
    "--claim",
    metavar="NAME",
    help=f"PersistentVolumeClaim for traces, mounted at /{_RESULTS}; record needs one.",
)
@click.option(
    "--container", metavar="NAME", help="Container that trains; by default the first of each pod."
)
@click.option(
    "--image", help="Image that installs gputrace, with pip; by default that of the container."
)
@click.option(
    "--package",
    default=f"gputrace=={__version__}",
    metavar="SPEC",
    show_default=True,
    help="What pip installs.",
)
@options.output("Manifest to write; by default it is printed.")
@options.force
def command(
    action: str,
    manifest: Path,
    words: str,
    claim: str | None,
    container: str | None,
    image: str | None,
    package: str,
    output: Path | None,
    force: bool,
) -> int:
    """Change a MANIFEST of Kubernetes so that its programs are armed, or recorded.

    Nothing need be in their images but Python 3.11: an init container installs gputrace into a
    volume of the pod, by pip, and the container's command runs under `gputrace arm` or `record`. A
    TrainJob, which takes no init container, installs it when it starts. A manifest that this
    command has written is changed to what is asked for now. - reads the standard input.
    """
    try:
        tool = shlex.split(words)
    except ValueError as error:
        raise UsageError(f"--with {words!r}: {error}") from None
    if tool[:1] not in (["arm"], ["record"]) or {"-o", "--output", "--"} & set(tool):
        raise UsageError(f"--with {words!r}: give arm, or record with options other than -o")
    if tool[0] == "record":
        if claim is None:
            raise UsageError("record needs --claim: a pod's own files are gone with it")
        tool += ["--force", "-o", f"/{_RESULTS}/%h.sqlite"]
    if output is not None and output.exists() and not (force and output.is_file()):
        raise UsageError(f"{output}: exists; name another with -o, or give --force")
    patch = _Patch([*tool, "--"], claim, container, image, package)
    try:
        text = sys.stdin.read() if str(manifest) == "-" else manifest.read_text(encoding="utf-8")
        changed = _rewrite(text, patch)
    except OSError as error:
        raise InputError(manifest, f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(manifest, " ".join(str(error).split())) from None
    except RecursionError:
        raise InputError(manifest, "nested too deeply") from None
    if output is None:
        click.echo(changed, nl=False)
    else:
        output.write_text(changed, encoding="utf-8")
    return ExitCode.DONE


def _rewrite(text: str, patch: _Patch) -> str:
    """Return YAML with patched documents, comments kept; raises ValueError for what it is not."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError:
        hint = 'pip install "gputrace[kubernetes]"'
        raise MissingError(f"k8s needs ruamel.yaml: {hint}") from None
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 1 << 16
    if not re.search(r"^( *)[\w\"'./-]+:[^\S\n]*(#.*)?\n\1- ", text, re.MULTILINE):
        yaml.indent(sequence=4, offset=2)
    try:
        documents = list(yaml.load_all(text))
    except YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None
    kinds = [str(each.get("kind")) for each in documents if isinstance(each, dict)]
    if not set(_KINDS) & set(kinds):
        found = f"{', '.join(kinds)} is none" if any(kinds) else "there is none"
        raise ValueError(f"{found} of the kinds that can be patched: {', '.join(_KINDS)}")
    for document in documents:
        if not isinstance(document, dict) or document.get("kind") not in _KINDS:
            continue
        try:
            if document["kind"] == "TrainJob":
                patch.train_job(document["spec"])
            else:
                for spec in _pod_specs(document["spec"], set()):
                    patch.pod(spec)
        except (LookupError, TypeError, AttributeError):
            problem = f"not a {document['kind']}: a field is missing, or of another kind"
            raise ValueError(problem) from None
    written = io.StringIO()
    yaml.dump_all(documents, written)
    return written.getvalue()


def _pod_specs(node: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the specs of pods in a mapping or list, which have containers; an alias of one that was
    ``seen`` is the same.
    """
    if not isinstance(node, (dict, list)) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, dict) and isinstance(node.get("containers"), list):
        yield node
    else:
        for value in node.values() if isinstance(node, dict) else node:
            yield from _pod_specs(value, seen)


class _Patch:
    """Change of manifests, in place of an earlier one."""

    def __init__(
        self,
        tool: Sequence[str],
        claim: str | None,
        container: str | None,
        image: str | None,
        package: str,
    ) -> None:
        self._tool, self._claim, self._container = tool, claim, container
        self._image, self._package = image, package

    def pod(self, spec: dict[str, Any]) -> None:
        """Change the spec of a pod; raises ValueError where it lacks what is needed."""
        names = [str(each.get("name")) for each in spec["containers"]]
        if self._container not in (None, *names):
            raise ValueError(f"no container {self._container}; there is {', '.join(names)}")
        at = names.index(self._container) if self._container else 0
        container = spec["containers"][at]
        if not container.get("command"):
            what = f"container {names[at]} has no command, and that of its image is not known"
            raise ValueError(f"{what}: write its command and args into the manifest")
        _start_by(container["command"], _PYTHON, f"/{_TOOL}/{_START}", *self._tool)
        mounts = [(_TOOL, f"/{_TOOL}"), *self._results()]
        _put(container, "volumeMounts", [{"name": n, "mountPath": path} for n, path in mounts])
        init = {
            "name": _TOOL,
            "image": self._image or container["image"],
            "command": [_PYTHON, *self._install(f"/{_TOOL}")],
            "volumeMounts": [{"name": _TOOL, "mountPath": f"/{_TOOL}"}],
        }
        # Proxies and indexes of pip, and what the namespace demands of every container.
        for name in ("env", "envFrom", "securityContext", "imagePullPolicy"):
            if name in container:
                init[name] = deepcopy(container[name])
        _put(spec, "initContainers", [init])
        _put(spec, "volumes", [{"name": _TOOL, "emptyDir": {}}, *self._volumes()])

    def train_job(self, spec: dict[str, Any]) -> None:
        """Change the spec of a TrainJob, whose containers its runtime has."""
        trainer = spec.get("trainer") or {}
        if not trainer.get("command"):
            what = "spec.trainer.command is not given, and that of the runtime is not known"
            raise ValueError(f"{what}: write it into the manifest, with its args")
        install = shlex.join([_PYTHON, *self._install(_SPACE)])
        start = shlex.join([_PYTHON, f"{_SPACE}/{_START}", *self._tool])
        script = f'{install} && exec {start} "$@"'
        _start_by(trainer["command"], "sh", "-c", script, _TOOL)
        mounts = [{"name": name, "mountPath": path} for name, path in self._results()]
        pod = {
            "volumes": self._volumes(),
            "containers": [{"name": self._container or _NODE, "volumeMounts": mounts}],
        }
        jobs = [{"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}]
        runtime = {"template": {"spec": {"replicatedJobs": jobs}}}
        patches = [{"manager": _TOOL, "trainingRuntimeSpec": runtime}] if mounts else []
        _put(spec, "runtimePatches", patches, "manager")

    def _install(self, folder: str) -> list[str]:
        # Without a cache, and quiet: in a pod nobody asks for either again.
        flags = ("--quiet", "--no-cache-dir", "--upgrade", "--target", folder)
        return ["-m", "pip", "install", *flags, self._package]

    def _results(self) -> list[tuple[str, str]]:
        return [(_RESULTS, f"/{_RESULTS}")] if self._claim else []

    def _volumes(self) -> list[dict[str, Any]]:
        claim = {"claimName": self._claim}
        return [{"name": name, "persistentVolumeClaim": claim} for name, _ in self._results()]


def _put(
    within: dict[str, Any], name: str, entries: Sequence[Mapping[str, Any]], key: str = "name"
) -> None:
    """Put entries at the end of a list in place of ours; no list stays empty that was not there."""
    kept, new = within.get(name) or [], list(entries)
    for at in reversed(range(len(kept))):
        # What is as it should be keeps the comments that stand behind it.
        if kept[at] in new:
            new.remove(kept[at])
        elif kept[at].get(key) in (_TOOL, _RESULTS):
            del kept[at]
    kept.extend(new)
    if kept:
        within[name] = kept
    else:
        within.pop(name, None)


def _start_by(command: list[str], *before: str) -> None:
    """Put words before a command, in place of those that an earlier patch put there."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    own = 0
    if "--" in command and command[1].endswith(f"/{_START}"):
        own = command.index("--") + 1
    elif command[:2] == ["sh", "-c"] and command[3:4] == [_TOOL]:
        own = 4
    # In place: it keeps how it was written.
    for _ in range(own):
        del command[0]
    for word in reversed(before):
        # Others read YAML 1.1, for which 5:9 is a number.
        command.insert(0, DoubleQuotedScalarString(word) if ":" in word else word)
