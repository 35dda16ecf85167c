"""What goes through the stream arrives unchanged, and the digest is that of the file."""

import gc
import io
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, IO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from torch.distributed.checkpoint.filesystem import FileSystem
from torchtitan.components.checkpointer.integrity.digests import (
    BLOCK_BYTES,
    digest_of,
    HashingStream,
)
from torchtitan.components.checkpointer.tc.storage import DurableStorage, DurableStorageConfig


@given(parts=st.lists(st.binary(max_size=100)))
def test_what_is_written_arrives_and_is_known(parts: list[bytes]) -> None:
    target = io.BytesIO()
    stream = HashingStream(target)
    for part in parts:
        assert stream.write(part) == len(part)
    written = b"".join(parts)
    assert target.getvalue() == written and stream.tell() == len(written)
    assert stream.digest() == digest_of(written)


def test_torch_saves_through_it(tmp_path: Path) -> None:
    state = {"weight": torch.rand(2**20 + 3), "small": torch.arange(5), "step": 7}
    with HashingStream(open(tmp_path / "file", "wb")) as stream:
        torch.save(state, cast(IO[bytes], stream))
    content = (tmp_path / "file").read_bytes()
    assert len(content) > BLOCK_BYTES and stream.digest() == digest_of(content)
    loaded = torch.load(tmp_path / "file", weights_only=True)
    assert torch.equal(loaded["weight"], state["weight"]) and loaded["step"] == 7


class HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.streams: dict[str, HashingStream] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            self.streams[Path(path).name] = HashingStream(stream)
            yield self.streams[Path(path).name]


def test_dcp_writes_through_it(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path)
    writer.fs = HashingFileSystem()
    state = {"weight": torch.rand(2**20), "other": torch.arange(5), "step": 7}
    dcp.save(state, storage_writer=writer, no_dist=True)
    # The index was renamed afterwards.
    found = {name.removesuffix(".tmp"): each for name, each in writer.fs.streams.items()}
    assert set(found) == {path.name for path in tmp_path.iterdir()} and len(found) >= 2
    for name, stream in found.items():
        assert stream.digest() == digest_of((tmp_path / name).read_bytes())
    loaded = {"weight": torch.zeros(2**20), "other": torch.zeros(5, dtype=torch.int64), "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"]) and loaded["step"] == 7


def test_torch_checkpointing_writes_through_it(tmp_path: Path) -> None:
    storage = DurableStorage(DurableStorageConfig())
    # Such a stream opens its file when it is entered, and syncs it when it is left.
    with HashingStream(storage.stream_write(tmp_path / "item_0.pt")) as stream:
        torch.save({"weight": torch.rand(1000)}, cast(IO[bytes], stream))
    assert stream.digest() == digest_of((tmp_path / "item_0.pt").read_bytes())


class Sparing(io.BytesIO):
    """Takes at most ``most`` bytes at once; ``answer`` is what it says it took, if that is another."""

    def __init__(self, most: int, answer: Any = "what it took") -> None:
        super().__init__()
        self.most, self.answer = most, answer

    def write(self, data: Any, /) -> Any:
        count = super().write(data[: self.most])
        return count if self.answer == "what it took" else self.answer


def test_a_stream_that_takes_a_part_gets_the_rest_later() -> None:
    target = Sparing(7)
    stream = HashingStream(target)
    assert stream.write(b"0123456789" * 3) == 30
    assert target.getvalue() == b"0123456789" * 3
    assert stream.digest() == digest_of(target.getvalue())


def test_a_stream_that_does_not_tell_took_it_all() -> None:
    target = Sparing(2**30, None)
    assert HashingStream(target).write(bytes(2 * BLOCK_BYTES + 1)) == 2 * BLOCK_BYTES + 1
    assert len(target.getvalue()) == 2 * BLOCK_BYTES + 1


@pytest.mark.parametrize("answer", [0, -1, 31])
def test_a_stream_that_takes_nothing_is_an_error_of_the_disk(answer: int) -> None:
    with pytest.raises(OSError, match="a write of 30 bytes took"):
        HashingStream(Sparing(0, answer)).write(bytes(30))


def test_what_was_hashed_is_not_written_over() -> None:
    stream = HashingStream(io.BytesIO())
    stream.write(b"abc")
    assert stream.seek(3) == stream.seek(0, io.SEEK_CUR) == stream.seek(0, io.SEEK_END) == 3
    for offset, whence in ((0, io.SEEK_SET), (-1, io.SEEK_CUR), (1, io.SEEK_END)):
        with pytest.raises(io.UnsupportedOperation):
            stream.seek(offset, whence)
    with pytest.raises(io.UnsupportedOperation):
        stream.truncate(0)


def test_leaving_it_leaves_the_stream_with_the_same_error() -> None:
    left: list[Any] = []

    class Inner:
        def __enter__(self) -> "Inner":
            return self

        def __exit__(self, *error: Any) -> None:
            left.append(error[0])

    with pytest.raises(KeyError), HashingStream(Inner()):
        raise KeyError
    with HashingStream(Inner()):
        pass
    assert left == [KeyError, None]


def test_a_stream_may_hand_out_another_object_when_it_is_entered() -> None:
    target = io.BytesIO()

    @contextmanager
    def opened() -> Generator[io.BytesIO]:
        yield target

    with HashingStream(opened()) as stream:
        stream.write(b"abc")
    assert target.getvalue() == b"abc" and stream.digest() == digest_of(b"abc")


def test_the_stream_outlives_a_wrapper_that_is_forgotten(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        stream = HashingStream(file)
        stream.write(b"abc")
        assert stream.writable() and stream.fileno() == file.fileno()
        del stream
        gc.collect()
        file.write(b"def")
    stream = HashingStream(open(tmp_path / "file", "wb"))
    stream.close()
    assert stream.closed and stream.digest() == digest_of(b"")
