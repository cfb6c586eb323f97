"""The files of a recorded process: what is kept of one cut short, and what is refused."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.collectors.spool import ChunkFile, Format, read_chunk_file
from gputrace.errors import InputError

KNOWN = Format(b"GPUTRTST", 1, "a test file", "a test file of gputrace")


def header(magic: bytes = KNOWN.magic, version: int = 1) -> bytes:
    return struct.pack("<8sIIQQ", magic, version, 77, 123, 456)


def test_the_header_says_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.host.77.spool"
    path.write_bytes(header())
    file = read_chunk_file(path, KNOWN)
    assert (file.pid, file.host, file.started) == (77, "a.host", 123)
    assert list(file.chunks()) == []


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "empty: its process was ended at once, or the disk was full"),
        (header()[:-1], "not a test file of gputrace"),
        (header(magic=b"SQLite f"), "not a test file of gputrace"),
        (header(version=2), "a test file of version 2; this gputrace reads 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, raw: bytes, problem: str) -> None:
    path = tmp_path / "host.77.spool"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=problem):
        read_chunk_file(path, KNOWN)


@given(bodies=st.lists(st.binary(max_size=20), max_size=5), data=st.data())
def test_all_whole_chunks_before_a_cut_are_kept(bodies: list[bytes], data: st.DataObject) -> None:
    chunks = [struct.pack("<4sI", b"TEST", len(body)) + body for body in bodies]
    raw = header() + b"".join(chunks)
    end = data.draw(st.integers(len(header()), len(raw)))
    ends = [len(header()) + len(b"".join(chunks[: i + 1])) for i in range(len(chunks))]
    read = list(ChunkFile(77, "host", 123, raw[:end]).chunks())
    whole = [bytes(body) for _, body, is_whole in read if is_whole]
    assert whole == bodies[: sum(e <= end for e in ends)]
    assert all(is_whole for _, _, is_whole in read[:-1])
    assert (not read or read[-1][2]) == (end in [len(header()), *ends])
