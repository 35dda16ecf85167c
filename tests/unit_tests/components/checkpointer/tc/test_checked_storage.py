"""Whatever storage a run was given: what is written through ours is known, what is read is checked."""

import io
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, IO

import pytest
import torch
from torch_checkpointing.storage.base_storage import ReadArgs, Storage
from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.digests import BLOCK_BYTES, FileDigest
from torchtitan.components.checkpointer.integrity.manifest import head_of, Manifest
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify
from torchtitan.components.checkpointer.tc.checked_storage import CheckedStorage
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig

from tests.unit_tests.components.checkpointer.recomputed import digest_in
from tests.unit_tests.components.checkpointer.tc.memory_storage import InMemory, MemoryStorage, ROOT

STEP = ROOT / "step-7"
IN_PARTS = ReadArgs(pre_read_full_file=False)
LONG = bytes(range(256)) * (BLOCK_BYTES // 256) + b"and a second block"


@pytest.fixture
def memory() -> InMemory:
    return InMemory()


def checked(memory: InMemory, mode: Verify = Verify.FULL, **more: bytes) -> CheckedStorage:
    """A storage that checks what is in memory now, and ``more`` of which nothing is known."""
    files = {path.relative_to(STEP).as_posix(): digest_in(it) for path, it in memory.files.items()}
    memory.files |= {STEP / name: content for name, content in more.items()}
    manifest = Manifest(head_of(7, "full", "torch_checkpointing", 1, None), files)
    return CheckedStorage(memory.create_storage(), Verification(str(STEP), manifest, mode))


def read_in_parts(storage: Storage, path: Path) -> bytes:
    with storage.stream_read(path, IN_PARTS) as stream:
        return b"".join(iter(lambda: stream.read(1_000_000), b""))


@pytest.mark.parametrize("on_disk", [False, True])
def test_every_way_to_write_a_file_leaves_its_digest(tmp_path: Path, on_disk: bool) -> None:
    config = DurableStorageConfig() if on_disk else InMemory()
    folder = tmp_path if on_disk else STEP
    storage = CheckedStorage(config.create_storage())
    storage.mkdir(folder / "inside")
    with storage.stream_write(folder / "a") as stream:
        for start in range(0, len(LONG), 999_999):
            stream.write(LONG[start : start + 999_999])
    item = {"w": torch.arange(100_000)}
    with storage.get_write_stream(folder / "inside/b", item) as stream:
        torch.save(item, cast(IO[bytes], stream))
    storage.write(folder / "c", memoryview(LONG))
    closed = storage.stream_write(folder / "d").__enter__()
    closed.write(b"abc")
    closed.close()
    found = storage.written_below(folder)
    assert found.keys() == {"a", "inside/b", "c", "d"}
    for name, digest in found.items():
        content = storage.read(folder / name)
        assert digest == digest_in(content, digest.block_bytes), name
    assert storage.written_below(folder / "inside").keys() == {"b"}


MIB = 2**20


@pytest.mark.parametrize(
    ("size_bytes", "num_ranks", "block_bytes"),
    [
        (0, 1, MIB // 4),
        (512 * MIB - 1, 1, MIB // 4),
        (512 * MIB, 1, MIB // 2),
        (256 * MIB, 2, MIB // 2),
        (1024 * MIB - 1, 1, MIB // 2),
        (1024 * MIB, 1, MIB),
        (MIB, 1024, MIB),
        (2**40, 1, MIB),
    ],
)
def test_a_small_item_has_short_blocks_and_a_large_one_of_all_ranks_not_too_many(
    memory: InMemory, size_bytes: int, num_ranks: int, block_bytes: int
) -> None:
    storage = CheckedStorage(memory.create_storage(), num_ranks=num_ranks)
    half = torch.empty(size_bytes // 2, dtype=torch.uint8, device="meta")
    rest = torch.empty(size_bytes - size_bytes // 2, dtype=torch.uint8, device="meta")
    with storage.get_write_stream(STEP / "a", {"one": half, "more": [rest, 7]}) as stream:
        cast(IO[bytes], stream).write(b"abc")
    assert storage.written_below(STEP)["a"].block_bytes == block_bytes


def test_what_is_written_at_once_has_short_blocks_as_well(memory: InMemory) -> None:
    storage = CheckedStorage(memory.create_storage())
    storage.write(STEP / "a", bytes(MIB))
    assert storage.written_below(STEP)["a"] == digest_in(bytes(MIB), MIB // 4)


def test_a_file_that_was_not_finished_is_no_part_of_what_was_written(memory: InMemory) -> None:
    storage = CheckedStorage(memory.create_storage())

    def fail() -> None:
        with storage.stream_write(STEP / "a") as stream:
            stream.write(b"half of it")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert storage.written_below(STEP) == {}


def test_what_is_only_a_stream_once_it_is_entered_is_left_as_it_was_entered(
    memory: InMemory,
) -> None:
    order: list[str] = []

    class Managed(MemoryStorage):
        def stream_write(self, path: Path) -> io.IOBase:
            return cast(io.IOBase, self._managed(path, super().stream_write(path)))

        @contextmanager
        def _managed(self, path: Path, stream: io.IOBase) -> Generator[io.IOBase]:
            with stream:
                yield stream
            order.append(f"left, {self.files[path]!r}")

    storage = CheckedStorage(Managed(memory))
    with storage.stream_write(STEP / "a") as stream:
        stream.write(b"abc")
    assert order == ["left, b'abc'"] and storage.written_below(STEP) == {"a": digest_in(b"abc")}


def test_what_a_callback_deletes_or_renames_is_known_as_it_then_is(memory: InMemory) -> None:
    storage = CheckedStorage(memory.create_storage())
    for name in ("a", "b", "part/c", "part/d", "gone/e"):
        storage.write(STEP / name, name.encode())
    storage.delete(STEP / "a")
    storage.rename(STEP / "b", STEP / "whole")
    storage.rename(STEP / "part", STEP / "parts", is_directory=True)
    storage.rmdir(STEP / "gone")
    found = storage.written_below(STEP)
    assert found == {
        "whole": digest_in(b"b", MIB // 4),
        "parts/c": digest_in(b"part/c", MIB // 4),
        "parts/d": digest_in(b"part/d", MIB // 4),
    }
    assert {STEP / name for name in found} == set(memory.files)
    storage.forget_written()
    assert storage.written_below(STEP) == {}


@pytest.mark.parametrize("is_seekable", [True, False])
def test_every_byte_that_is_read_is_checked_first(is_seekable: bool) -> None:
    memory = InMemory(is_seekable=is_seekable)
    memory.files = {STEP / "long": LONG, STEP / "short": b"short", STEP / "empty": b""}
    storage = checked(memory)
    for path, content in memory.files.items():
        assert storage.read(path) == read_in_parts(storage, path) == content
    verification = storage.verification
    assert verification is not None and verification.checked_bytes >= len(LONG)
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(LONG) - 1):
        damaged = bytearray(LONG)
        damaged[place] ^= 1
        memory.files[STEP / "long"] = bytes(damaged)
        for read in (Storage.read, CheckedStorage.read, read_in_parts):
            with pytest.raises(CheckpointDamagedError, match=f"{STEP}/long is damaged.*xxh3"):
                read(storage, STEP / "long")


@pytest.mark.parametrize("content", [LONG[:-1], LONG + b"x", b""])
def test_another_size_is_told_before_anything_is_read(memory: InMemory, content: bytes) -> None:
    memory.files[STEP / "long"] = LONG
    storage = checked(memory)
    memory.files[STEP / "long"] = content
    said = f"expected {len(LONG)} bytes, found {len(content)}"
    with pytest.raises(CheckpointDamagedError, match=said):
        storage.stream_read(STEP / "long", IN_PARTS)
    with pytest.raises(CheckpointDamagedError, match=said):
        storage.read(STEP / "long")


def test_a_file_that_nobody_has_written_is_not_read(memory: InMemory) -> None:
    storage = checked(memory, other=b"x")
    for read in (CheckedStorage.read, read_in_parts):
        with pytest.raises(CheckpointDamagedError, match=f"{STEP}/other"):
            read(storage, STEP / "other")


@pytest.mark.parametrize("mode", [Verify.FULL, Verify.OFF])
@pytest.mark.parametrize(
    "path",
    [ROOT / "step-6/a", STEP / "../step-6/a", Path("/etc/passwd"), STEP / "b/../../step-6/a"],
)
def test_nothing_outside_of_the_checkpoint_is_read_for_it(
    memory: InMemory, mode: Verify, path: Path
) -> None:
    storage = checked(memory, mode)
    memory.files |= {path: b"of another one"}
    for read in (CheckedStorage.read, read_in_parts):
        with pytest.raises(CheckpointDamagedError, match="which is outside of it"):
            read(storage, path)


@pytest.mark.parametrize("mode", [Verify.SIZE, Verify.OFF])
def test_less_is_checked_on_demand(memory: InMemory, mode: Verify) -> None:
    memory.files[STEP / "a"] = b"saved"
    storage = checked(memory, mode, other=b"x")
    memory.files[STEP / "a"] = b"other"
    assert storage.read(STEP / "a") == read_in_parts(storage, STEP / "a") == b"other"
    assert read_in_parts(storage, STEP / "other") == b"x"
    unchecked = CheckedStorage(memory.create_storage())
    assert unchecked.read(STEP / "a") == read_in_parts(unchecked, STEP / "a") == b"other"


def test_everything_else_is_up_to_the_storage(memory: InMemory) -> None:
    class Own(MemoryStorage):
        mmap_fill_workers = 3
        mmap_fill_chunk_bytes = 4

        def of_this_kind_alone(self, number: int) -> int:
            return number + 1

        def glob(self, pattern: str) -> list[str]:
            return [pattern]

    inner: Any = Own(memory)
    storage: Any = CheckedStorage(inner)
    storage.mkdir(STEP)
    storage.write(STEP / "a", b"abc")
    assert (storage.mmap_fill_workers, storage.mmap_fill_chunk_bytes) == (3, 4)
    assert storage.of_this_kind_alone(1) == 2 and storage.glob("*") == ["*"]
    assert storage.exists(STEP / "a") and storage.isdir(STEP) and not storage.isdir(STEP / "a")
    assert storage.ls(STEP) == ["a"] and storage.getsize(STEP / "a") == 3
    assert storage.remap_path(STEP) == f"memory:{STEP}"
    with pytest.raises(AttributeError, match="of_no_kind"):
        storage.of_no_kind
    # A method that the library's interface gets is not passed by.
    assert set(dir(Storage)) <= set(dir(CheckedStorage))
    ours = {name for name in vars(Storage) if not name.startswith("_")}
    assert ours <= set(vars(CheckedStorage))


def test_what_is_written_is_neither_copied_nor_read_again(memory: InMemory) -> None:
    seen: list[Any] = []

    class Noted(io.BytesIO):
        def write(self, buffer: Any, /) -> int:
            seen.append(memoryview(buffer).obj)
            return super().write(buffer)

    class Noting(MemoryStorage):
        def stream_write(self, path: Path) -> io.IOBase:
            return Noted()

        def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
            raise AssertionError("it was written, and is not to be read")

    storage = CheckedStorage(Noting(memory))
    with storage.stream_write(STEP / "a") as stream:
        stream.write(LONG)
    assert seen and all(each is LONG for each in seen)
    assert storage.written_below(STEP) == {"a": digest_in(LONG)}
    assert isinstance(storage.written_below(STEP)["a"], FileDigest)
