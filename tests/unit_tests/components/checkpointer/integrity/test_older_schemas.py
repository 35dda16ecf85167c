"""A manifest of an older schema, as it was written then, still says what its files have to hold."""

import re

import pytest
from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.manifest import parse, render
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify

from tests.unit_tests.components.checkpointer.fakes import MemoryStorage
from tests.unit_tests.components.checkpointer.integrity.test_manifest import signed

MIB = 2**20
# Nine different blocks of today; three of then.
CONTENT = b"".join(bytes([number]) * MIB for number in range(9))

FIRST = b"""{
  "schema": 1,
  "xxh3_64": "8aa63b21e750b049",
  "step": 30,
  "kind": "full",
  "backend": "dcp",
  "world_size": 1,
  "parallel": {
    "dp_shard": 1
  },
  "versions": {
    "torch": "2.13.0"
  },
  "config": {
    "lr": 0.1
  },
  "files": {
    ".metadata": {
      "size_bytes": 5,
      "xxh3_64": "b4b38c1f199f81e8",
      "blocks": ""
    },
    "__0_0.distcp": {
      "size_bytes": 9437184,
      "xxh3_64": "daee1d0cc6af4685",
      "blocks": "7bf72e5d861ef4c8792985fc7fa3d2d58b3f682cec3780da"
    }
  }
}
"""


SECOND = (
    FIRST.replace(b'"schema": 1', b'"schema": 2')
    .replace(b'"8aa63b21e750b049"', b'"10ab0023b52518c6"')
    .replace(b'  "files"', b'  "block_bytes": 1048576,\n  "files"')
    .replace(
        b"7bf72e5d861ef4c8792985fc7fa3d2d58b3f682cec3780da",
        b"918780b90550bf347c5fb4c84161a508f5cc24602049b29dbfadb23e736b5b8129d104473cc5fe08"
        b"5e51ea16cd1c1ed8ffd2740282defcab05ec48a3211148878b3f682cec3780da",
    )
)

BLOCK_BYTES = {FIRST: 4 * MIB, SECOND: MIB}
OLDER = pytest.mark.parametrize("written", [FIRST, SECOND], ids=["first", "second"])


def verification(written: bytes, content: bytes = CONTENT) -> Verification:
    storage = MemoryStorage()
    for name, each in {
        "manifest.json": written,
        ".metadata": b"index",
        "__0_0.distcp": content,
    }.items():
        storage.add(f"/run/step-30/{name}", each)
    return Verification.begin(storage, "/run/step-30", Verify.FULL, step=30)


@OLDER
def test_whole_files_and_parts_of_them_are_good(written: bytes) -> None:
    found = verification(written)
    assert found.check(".metadata", b"index") == b"index"
    assert found.check("__0_0.distcp", CONTENT) == CONTENT


@OLDER
@pytest.mark.parametrize("at", [0, 5 * MIB, 9 * MIB - 1])
def test_damage_is_told_of_the_blocks_of_then(written: bytes, at: int) -> None:
    changed = bytearray(CONTENT)
    changed[at] ^= 1
    start = at // BLOCK_BYTES[written] * BLOCK_BYTES[written]
    end = min(start + BLOCK_BYTES[written], len(CONTENT))
    told = re.escape(f"bytes {start}..{end - 1}")
    with pytest.raises(CheckpointDamagedError, match=told):
        verification(written, bytes(changed)).check("__0_0.distcp", bytes(changed))


@OLDER
def test_what_is_written_anew_of_it_is_of_today(written: bytes) -> None:
    manifest = parse(written, "m")
    assert parse(render(manifest), "m") == manifest
    assert b'"schema": 3' in render(manifest)
    assert render(manifest).count(f'"block_bytes": {BLOCK_BYTES[written]}'.encode()) == 2


@pytest.mark.parametrize("told", [b"0", b"-1", b"1048576.0", b'"1048576"', b"8388608"])
def test_a_length_of_blocks_that_nothing_wrote_is_damage(told: bytes) -> None:
    changed = SECOND.replace(b"1048576", told, 1)
    with pytest.raises(CheckpointDamagedError):
        parse(signed(changed), "m")
    if told != b"8388608":  # of which there may be no file
        with pytest.raises(CheckpointDamagedError):
            parse(signed(changed[: changed.index(b'"files"')] + b'"files": {}\n}\n'), "m")


@pytest.mark.parametrize("schema", [b"0", b"00"])
def test_a_schema_that_never_was_is_damage(schema: bytes) -> None:
    with pytest.raises(CheckpointDamagedError):
        parse(FIRST.replace(b'"schema": 1', b'"schema": ' + schema, 1), "m")
