"""What is in the files of a checkpoint, computed anew and compared with what its manifest says."""

from pathlib import Path

import xxhash
from torchtitan.components.checkpointer.integrity import manifest as manifests
from torchtitan.components.checkpointer.integrity.digests import BLOCK_BYTES, FileDigest
from torchtitan.components.checkpointer.integrity.manifest import Manifest, MANIFEST


def manifest_in(step: Path) -> Manifest:
    """The manifest of a checkpoint that has one."""
    return manifests.parse((step / MANIFEST).read_bytes(), str(step / MANIFEST))


def require_true(step: Path) -> Manifest:
    """The manifest, once it is known to list every file but itself, as each of them is."""
    found = manifest_in(step)
    files = {
        path.relative_to(step).as_posix(): digest_in(path.read_bytes())
        for path in step.rglob("*")
        if path.is_file() and path != step / MANIFEST
    }
    assert found.files == files
    return found


def digest_in(content: bytes) -> FileDigest:
    """What the package that hashes has to say, block by block."""
    starts = range(0, len(content), BLOCK_BYTES)
    each = [xxhash.xxh3_64_hexdigest(content[at : at + BLOCK_BYTES]) for at in starts]
    blocks = "".join(each) if len(each) > 1 else ""
    return FileDigest(len(content), xxhash.xxh3_64_hexdigest(content), blocks)
