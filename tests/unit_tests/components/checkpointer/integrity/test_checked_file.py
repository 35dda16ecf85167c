"""Nobody gets a byte that was not saved, and whoever reads a good file notices nothing."""

import errno
import io
import pickle
from pathlib import Path
from typing import Any, cast, IO

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.checked_file import CheckedFile
from torchtitan.components.checkpointer.integrity.digests import digest_of
from torchtitan.tools.errors import portable

from tests.unit_tests.components.checkpointer.integrity.small_blocks import BLOCK

pytestmark = pytest.mark.usefixtures("small_blocks")

SIZES = st.integers(0, 9 * BLOCK)
contents = st.integers(0, 8 * BLOCK).flatmap(lambda size: st.binary(min_size=size, max_size=size))
operations = st.lists(
    st.tuples(st.just("read"), st.just(-1) | SIZES)
    | st.tuples(st.just("readinto"), SIZES)
    | st.tuples(st.just("seek"), SIZES),
    max_size=20,
)


def apply(file: Any, operation: str, value: int) -> Any:
    if operation == "readinto":
        buffer = bytearray(value)
        return file.readinto(buffer), bytes(buffer)
    return getattr(file, operation)(value)


class Slow(io.BytesIO):
    """Gives a few bytes at once, as a network does."""

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(memoryview(buffer)[:5])


@settings(max_examples=300)
@given(content=contents, steps=operations, is_slow=st.booleans())
def test_a_good_file_reads_like_any_other(
    content: bytes, steps: list[tuple[str, int]], is_slow: bool
) -> None:
    raw = Slow(content) if is_slow else io.BytesIO(content)
    checked, plain = CheckedFile(raw, "f", digest_of(content)), io.BytesIO(content)
    for operation, value in steps:
        assert apply(checked, operation, value) == apply(plain, operation, value)
        assert checked.tell() == plain.tell()


@settings(max_examples=500)
@given(
    content=contents.filter(len),
    steps=operations,
    place=st.integers(0),
    change=st.integers(1, 255),
)
def test_no_byte_that_changed_is_handed_out(
    content: bytes, steps: list[tuple[str, int]], place: int, change: int
) -> None:
    damaged = bytearray(content)
    place %= len(content)
    damaged[place] ^= change
    checked = CheckedFile(io.BytesIO(damaged), "f", digest_of(content))
    plain = io.BytesIO(content)
    for operation, value in steps:
        expected, here = apply(plain, operation, value), checked.tell()
        touched = operation != "seek" and here <= place < plain.tell()
        try:
            assert apply(checked, operation, value) == expected
            assert not touched
        except CheckpointDamagedError:
            return
    checked.seek(0)
    with pytest.raises(CheckpointDamagedError, match=r"^f is damaged: bytes \d+\.\.\d+: expected"):
        checked.read()


@given(content=contents, size=SIZES)
def test_a_file_of_another_size_is_damage(content: bytes, size: int) -> None:
    raw = io.BytesIO((content + bytes(9 * BLOCK))[:size])
    if size == len(content):
        assert CheckedFile(raw, "f", digest_of(content)).read() == content
        return
    with pytest.raises(CheckpointDamagedError, match=f"f is .*{len(content)} bytes, found {size}"):
        CheckedFile(raw, "f", digest_of(content))
    assert raw.closed


@given(content=contents, sizes=st.lists(st.integers(1, 3 * BLOCK), min_size=1))
def test_reading_in_order_checks_each_block_once(content: bytes, sizes: list[int]) -> None:
    counts: list[int] = []
    checked = CheckedFile(io.BytesIO(content), "f", digest_of(content), counts.append)
    parts = []
    while checked.tell() < len(content):
        parts.append(checked.read(sizes[len(parts) % len(sizes)]))
    assert b"".join(parts) == content
    assert len(counts) == digest_of(content).num_blocks and sum(counts) == len(content)


def test_a_part_is_read_without_the_rest() -> None:
    content = bytes(range(256)) * 4
    counts: list[int] = []
    damaged = bytearray(content)
    damaged[0] ^= 1
    damaged[-1] ^= 1
    checked = CheckedFile(io.BytesIO(damaged), "f", digest_of(content), counts.append)
    checked.seek(BLOCK)
    assert checked.read(2 * BLOCK) == content[BLOCK : 3 * BLOCK]
    assert counts == [BLOCK, BLOCK]


def test_whole_blocks_are_read_where_they_are_wanted() -> None:
    content = bytes(range(256)) * 2
    targets: list[Any] = []

    class Seen(io.BytesIO):
        def readinto(self, buffer: Any, /) -> int:
            targets.append(memoryview(buffer).obj)
            return super().readinto(buffer)

    checked = CheckedFile(Seen(content), "f", digest_of(content))
    buffer = bytearray(len(content) - 1)
    checked.readinto(buffer)
    assert all(target is buffer for target in targets[:-3]) and targets[-1] is not buffer


def test_a_file_that_shrinks_while_it_is_read_is_damage(tmp_path: Path) -> None:
    content = bytes(range(256))
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file", "r+b", buffering=0) as raw:
        checked = CheckedFile(raw, "f", digest_of(content))
        raw.truncate(100)
        with pytest.raises(CheckpointDamagedError, match="expected 256 bytes, it ends after 100"):
            checked.read()


def test_an_error_of_the_disk_is_no_damage() -> None:
    class Failing(io.BytesIO):
        def readinto(self, buffer: Any, /) -> int:
            raise OSError(errno.EIO, "Input/output error")

    checked = CheckedFile(Failing(b"abc"), "f", digest_of(b"abc"))
    with pytest.raises(OSError, match="Input/output error"):
        checked.read()


def load(path: Path, saved: bytes) -> Any:
    with CheckedFile(open(path, "rb"), "f", digest_of(saved)) as file:
        return torch.load(cast(IO[bytes], file), weights_only=True)


@pytest.mark.parametrize("is_zip", [True, False])
def test_torch_loads_through_it_and_not_past_it(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "state.pt"
    state = {"weight": torch.rand(1000), "other": torch.arange(7), "step": 7}
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)
    content = path.read_bytes()
    loaded = load(path, content)
    assert torch.equal(loaded["weight"], state["weight"]) and loaded["step"] == 7
    damaged = bytearray(content)
    damaged[content.index(state["weight"].numpy().tobytes()) + 100] ^= 1
    path.write_bytes(damaged)
    # In its old format torch hides what a file raised.
    with pytest.raises(CheckpointDamagedError if is_zip else SystemError):
        load(path, content)


def test_it_closes_the_file_and_is_closed_itself() -> None:
    raw = io.BytesIO(b"abc")
    checked = CheckedFile(raw, "f", digest_of(b"abc"))
    assert checked.readable() and checked.seekable() and not checked.writable()
    assert checked.seek(-1, io.SEEK_END) == 2 and checked.read() == b"c"
    assert checked.seek(-2, io.SEEK_CUR) == 1 and checked.readall() == b"bc"
    for offset, whence in ((-1, io.SEEK_SET), (-4, io.SEEK_END), (0, 7)):
        with pytest.raises(ValueError, match="cannot seek"):
            checked.seek(offset, whence)
    with pytest.raises(io.UnsupportedOperation):
        checked.fileno()
    checked.close()
    assert raw.closed and checked.closed
    for use in (checked.read, checked.tell, lambda: checked.seek(0)):
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_the_error_reaches_other_processes_as_it_is() -> None:
    error = CheckpointDamagedError("f is damaged")
    assert portable(error) is error
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CheckpointDamagedError and str(copy) == "f is damaged"


parts_of_a_file = st.lists(st.tuples(SIZES, st.integers(0, 3 * BLOCK)), max_size=8)


def buffers_for(content: bytes, wanted: list[tuple[int, int]]) -> list[tuple[int, bytearray]]:
    return [
        (at, bytearray(min(size, len(content) - at))) for at, size in wanted if at < len(content)
    ]


def fill(file: CheckedFile, buffers: list[tuple[int, bytearray]]) -> None:
    file.fill((at, memoryview(buffer)) for at, buffer in buffers)


@settings(max_examples=300)
@given(content=contents, wanted=parts_of_a_file, is_sorted=st.booleans(), is_slow=st.booleans())
def test_parts_are_filled_with_what_is_in_their_places(
    content: bytes, wanted: list[tuple[int, int]], is_sorted: bool, is_slow: bool
) -> None:
    raw = Slow(content) if is_slow else io.BytesIO(content)
    buffers = buffers_for(content, sorted(wanted) if is_sorted else wanted)
    file = CheckedFile(raw, "f", digest_of(content))
    file.read(3)
    fill(file, buffers)
    assert all(buffer == content[at : at + len(buffer)] for at, buffer in buffers)


@settings(max_examples=300)
@given(content=contents.filter(len), wanted=parts_of_a_file, data=st.data())
def test_parts_of_a_damaged_block_are_not_given_out(
    content: bytes, wanted: list[tuple[int, int]], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    buffers = buffers_for(content, sorted(wanted))
    touched = {
        block
        for start, buffer in buffers
        if buffer
        for block in range(start // BLOCK, (start + len(buffer) - 1) // BLOCK + 1)
    }
    file = CheckedFile(io.BytesIO(bytes(damaged)), "f", digest_of(content))
    if at // BLOCK in touched:
        with pytest.raises(CheckpointDamagedError, match="^f is damaged: bytes "):
            fill(file, buffers)
    else:
        fill(file, buffers)


def test_filling_in_order_reads_and_checks_each_block_once() -> None:
    content = bytes(range(256)) * (5 * BLOCK // 256 + 1)
    checked: list[int] = []
    file = CheckedFile(io.BytesIO(content), "f", digest_of(content), checked.append)
    third = len(content) // 3
    fill(
        file, [(0, bytearray(third - 1)), (third, bytearray(third)), (2 * third, bytearray(third))]
    )
    assert sum(checked) == len(content)


def test_parts_outside_of_the_file_are_refused() -> None:
    file = CheckedFile(io.BytesIO(b"abc"), "f", digest_of(b"abc"))
    for at, size in ((2, 2), (-1, 1)):
        with pytest.raises(ValueError, match="^f has no bytes"):
            fill(file, [(at, bytearray(size))])
