"""Files made to exhaust or mislead a reader are refused; what we write is its owner's alone."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import stat
import sys
import time
import zlib
from pathlib import Path
from typing import Final

import pyarrow
import pytest
from pyarrow import parquet

import gputrace
from gputrace.collectors import job_tasks
from gputrace.errors import InputError, UsageError
from gputrace.model import names
from gputrace.model.names import demangle_all, short
from gputrace.readers import compressed
from gputrace.readers import nsys_export as table_folder
from gputrace.store.cache import Kept, load, store
from tests.helpers import command
from tests.helpers.command import ROOT
from tests.helpers.exports import Export
from tests.helpers.xplane import message, number, varint

DEEP: Final = 100_000
PLANE: Final = message(2, "/device:GPU:0")


def refused(path: Path, *words: str) -> str:
    """Return the one line on a file that cannot be read."""
    with pytest.raises(InputError) as error, gputrace.open(path) as trace:
        trace.analyze()
    told = str(error.value)
    assert "\n" not in told
    assert all(word in told for word in words), told
    return told


@pytest.mark.parametrize(
    "head",
    [
        '{"schemaVersion": 1, "traceEvents": [{"args": ',
        '{"schemaVersion": 1, "deep": ',
        '{"traceEvents": [{"ph": "M", "args": {"name": "/device:GPU:0"}, "deep": ',
        '{"traceEvents": [{"ph": "M", "args": {"name": "gpu/0"}, "deep": ',
    ],
    ids=["kineto", "around", "viewer", "mxnet"],
)
@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_json_a_hundred_thousand_levels_deep(head: str, bracket: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(head + bracket * DEEP)
    refused(path)
    path.write_text(head + bracket * DEEP + "1" + ("]" if bracket == "[" else "}") * DEEP + "}]}")
    refused(path)


def bomb(content: bytes, size: int) -> bytes:
    """Gzip's data of the content and as many zeros or blanks as make up the size."""
    pack = zlib.compressobj(9, wbits=31)
    parts = [pack.compress(content)]
    parts += [pack.compress(b" " * (1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, pack.flush()])


@pytest.mark.parametrize(
    "head",
    [
        b'{"schemaVersion": 1, "traceEvents": [',
        b'{"traceEvents": [{"ph": "M", "args": {"name": "/device:GPU:0"}},',
        b'{"traceEvents": [{"ph": "M", "name": "gpu/0"},',
        message(1, PLANE),
    ],
    ids=["kineto", "viewer", "mxnet", "xplane"],
)
def test_a_gzip_bomb_is_not_unpacked(
    head: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "FREE_BYTES", 8 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(bomb(head, 24 << 20))
    assert path.stat().st_size < 100_000
    told = refused(path, "no trace compresses that well")
    assert int(re.findall(r"(\d+) MiB", told)[0]) <= 8 + 4  # a block over the limit at most


def test_a_bomb_within_a_bomb_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "FREE_BYTES", 8 << 20)
    path, text = tmp_path / "bomb.json.gz", b'{"schemaVersion": 1, "traceEvents": ['
    path.write_bytes(gzip.compress(bomb(text, 24 << 20)))
    refused(path, "no trace compresses that well")
    path.write_bytes(gzip.compress(gzip.compress(bomb(text, 24 << 20))))
    refused(path, "not a trace")


@pytest.mark.parametrize(
    "content",
    [
        message(1, PLANE)[:1] + varint((1 << 63) + 5) + PLANE,
        message(1, PLANE + varint(3 << 3 | 2) + varint(1 << 40)),
        message(1, PLANE + message(3, varint(4 << 3 | 2) + varint((1 << 64) - 1))),
        message(1, PLANE + message(3, message(4, varint(4 << 3 | 2) + varint(1 << 62)))),
        message(1, PLANE + message(4, number(1, 1) + varint(2 << 3 | 2) + varint(1 << 31))),
        message(1, PLANE + b"\x1a" + b"\xff" * 10),
        message(1, PLANE + b"\x0b"),
    ],
    ids=["plane", "line", "event", "stat", "metadata", "varint", "wire"],
)
def test_protobuf_whose_lengths_lie(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lies.xplane.pb"
    path.write_bytes(content)
    refused(path)


def test_a_table_that_comes_to_far_more_than_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "FREE_BYTES", 1 << 20)
    folder = tmp_path / "run_pqtdir"
    folder.mkdir()
    rows = pyarrow.table({"start": pyarrow.array([7] * 2_000_000, pyarrow.int64())})
    parquet.write_table(rows, folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet", compression="zstd")
    refused(folder, "no trace compresses that well")
    assert list((Path(os.environ["XDG_CACHE_HOME"]) / "gputrace" / "nsys").glob("*.tmp")) == []


def test_what_is_no_file_in_a_folder_of_tables_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "CUPTI_ACTIVITY_KIND_KERNEL.parquet")
    assert table_folder.is_table_folder(tmp_path) is False
    refused(tmp_path)


def test_a_name_with_more_digits_than_python_counts() -> None:
    assert short("_ZN" + "9" * 5_000 + "x")


def test_a_mangled_name_that_doubles_with_each_part_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "SECONDS", 2)
    usual = "_ZN2at6native6detail5ArrayIPcLi1EE3fooENS0_3BarIfEENS_3BazEiT0_T1_S2_"
    real = "_ZN2at6native10vectorizedILi4ENS0_11FillFunctorIfEENS_6detail5ArrayIPcLi1EEEEEviT0_T1_"
    parts = (f"S_IS{digit}_S{digit}_E" for digit in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    doubling = "_Z1fSt4pairIiiE" + "".join(parts)
    told = demangle_all([usual, doubling, real, "gemm"])
    assert (told[doubling], told["gemm"]) == (doubling, "gemm")
    assert told[real].startswith("void at::native::vectorized<4, at::native::FillFunctor<float>")


class TestWhatIsWritten:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        made = Export()
        for index in range(20):
            made.kernel(10 * index, 10 * index + 5)
        return made.write(tmp_path / "trace.sqlite")

    @pytest.fixture(params=[0o022, 0o077, 0o000])
    def umask(self, request: pytest.FixtureRequest) -> object:
        before = os.umask(request.param)
        yield request.param
        os.umask(before)

    def test_is_its_owner_s_alone_but_for_pages(
        self, umask: int, trace: Path, tmp_path: Path
    ) -> None:
        targets = {"trace": "part.sqlite", "perfetto": "p.json"}
        with gputrace.open(trace) as opened:
            for form, name in targets.items():
                opened.export(form, tmp_path / name, time="0s:1us" if form == "trace" else None)
            opened.export("csv", tmp_path / "csv")
            opened.report(tmp_path / "page.html")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        del modes[trace.name]
        assert modes.pop("csv") == 0o700
        assert modes.pop("page.html") == 0o666 & ~umask
        assert set(modes.values()) == {0o600}

    def test_is_not_written_through_a_link(self, trace: Path, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_text("mine")
        target = tmp_path / "out.json"
        target.symlink_to(victim)
        with gputrace.open(trace) as opened:
            with pytest.raises(UsageError, match="exists"):
                opened.export("perfetto", target)
            (tmp_path / f".out.json.{os.getpid()}.tmp").symlink_to(victim)
            opened.export("perfetto", target, force=True)
        assert victim.read_text() == "mine"
        assert not target.is_symlink()

    def test_a_dangling_link_makes_no_file_elsewhere(self, trace: Path, tmp_path: Path) -> None:
        target, elsewhere = tmp_path / "page.html", tmp_path / "elsewhere"
        target.symlink_to(elsewhere)
        with gputrace.open(trace) as opened:
            opened.report(target, force=True)
        assert not elsewhere.exists()

    def test_a_cache_s_entry_is_its_owner_s_and_no_other_s(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GPUTRACE_CACHE", str(tmp_path / "cache"))
        store("k" * 32, Kept(b"text", []))
        (entry,) = (tmp_path / "cache").iterdir()
        assert [stat.S_IMODE(p.stat().st_mode) for p in (entry, entry.parent)] == [0o600, 0o700]
        assert load("k" * 32) is not None
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert load("k" * 32) is None


class TestASpool:
    """Beside the trace, perhaps in a folder that everybody writes into."""

    def told(self, folder: Path, job: str, mode: int = 0o700) -> None:
        folder.mkdir(mode=0o700)
        about = {"job": job, "host": os.uname().nodename, "time": time.time()}
        (folder / "team.json").write_text(json.dumps(about))
        folder.chmod(mode)

    def test_is_for_its_owner(self, tmp_path: Path) -> None:
        look = "import os, stat; f = os.environ['GPUTRACE_DIR']; from pathlib import Path; "
        look += "print({oct(stat.S_IMODE(p.stat().st_mode)) for p in Path(f).iterdir()}, "
        look += "oct(stat.S_IMODE(os.stat(f).st_mode)))"
        words = ("--no-nvml", "--backend", "host", "--", "sh", "-c")
        program = f'umask 0; exec "{sys.executable}" -c "import gputrace; gputrace.step(); {look}"'
        ran = command.gputrace("record", "-o", tmp_path / "t.sqlite", *words, program)
        assert ran.out.endswith("0o700\n"), ran
        assert stat.S_IMODE((tmp_path / "t.sqlite").stat().st_mode) == 0o600

    def test_of_a_job_is_joined_where_we_made_it(self, tmp_path: Path) -> None:
        self.told(tmp_path / "t.spool", "77")
        joined = job_tasks.Team(tmp_path / "t.spool", "77")
        with joined.leave() as is_last:
            assert is_last

    @pytest.mark.parametrize("what", ["of another user", "open to others", "a link"])
    def test_of_others_is_not_joined(
        self, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "t.spool"
        if what == "a link":
            self.told(tmp_path / "elsewhere", "77")
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            self.told(folder, "77", 0o777 if what == "open to others" else 0o700)
        if what == "of another user":
            real = job_tasks._make
            monkeypatch.setattr(job_tasks, "_make", lambda *how: (False, real(*how)[1] + 1))
        with pytest.raises(UsageError):
            job_tasks.Team(folder, "77")

    def test_whose_name_is_taken_by_a_link_is_not_followed(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.mkdir()
        (tmp_path / "t.sqlite.spool").symlink_to(victim)
        words = ("--no-nvml", "--backend", "host", "--", "true")
        ran = command.gputrace("record", "-o", tmp_path / "t.sqlite", *words)
        assert ran.code == 125
        assert list(victim.iterdir()) == []


def test_nothing_planted_is_in_a_trace(tmp_path: Path) -> None:
    """Not of the environment, of options, of what the program reads and prints."""
    planted = [f"planted{n}" for n in range(8)]
    code = "import sys, time, gputrace\n"
    code += "print(sys.stdin.read(), 'planted5'); print('planted6', file=sys.stderr)\n"
    code += "for _ in range(4): time.sleep(0.001); gputrace.step()\n"
    script = tmp_path / "train.py"
    script.write_text(code + "# planted7\n")
    words = ["--api-key", planted[0], f"--token={planted[1]}"]
    words += [f"--url=https://u:{planted[2]}@h/"]
    ran = command.gputrace(
        *("record", "-o", tmp_path / "t.sqlite", "--no-nvml", "--python", "--backend", "host"),
        *("--", sys.executable, str(script), *words),
        env={"AWS_SECRET_ACCESS_KEY": planted[3], "NOBODY_KNOWS_THIS": planted[4]},
    )
    assert ran.code == 0, ran
    content = (tmp_path / "t.sqlite").read_bytes()
    assert [text for text in planted if text.encode() in content] == []


NEVER: Final = {"pickle", "cPickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "yaml"}
"""Modules that make objects, or run code, of what they read."""


def test_nothing_that_runs_what_it_reads_is_imported_or_called() -> None:
    found = []
    words = re.compile("|".join([*NEVER, "eval", "exec", "mktemp", "shell", "allow_pickle"]))
    for path in sorted((ROOT / "gputrace").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if words.search(text) else ():
            found += [f"{path}: {word}" for word in _suspicious(node)]
    # A notebook's cell is the user's own code, which the magic runs as IPython does; what a client
    # and its Dask workers send each other is pickled by Dask, too. A function to try is the
    # caller's, and goes to its process in a folder that nobody else can write to.
    # A script in which a statement is left out at times is the program that is tried; snapshots of
    # memory are only written as pickles.
    allowed = (
        *("notebook_magic.py: exec", "distributed/worker.py: pickle", "trials/runs.py: pickle"),
        *("cures/loop.py: exec", "frameworks/torch_memory.py: pickle"),
    )
    assert [one for one in found if not one.endswith(allowed)] == []


def _suspicious(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names if name.name.partition(".")[0] in NEVER]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if (node.module or "").partition(".")[0] in NEVER else []
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
        return [node.func.id]
    named = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    shell = [k.arg for k in node.keywords if k.arg in ("shell", "allow_pickle")]
    return [*(["mktemp"] if named == "mktemp" else []), *map(str, shell)]
