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
    block_bytes = {name: digest.block_bytes for name, digest in found.files.items()}
    assert set(block_bytes.values()) <= {2**18, 2**19, BLOCK_BYTES}
    files = {
        name: digest_in((step / name).read_bytes(), block_bytes.get(name, BLOCK_BYTES))
        for name in (path.relative_to(step).as_posix() for path in step.rglob("*"))
        if (step / name).is_file() and name != MANIFEST
    }
    assert found.files == files
    return found


def digest_in(content: bytes, block_bytes: int = BLOCK_BYTES) -> FileDigest:
    """What the package that hashes has to say, block by block."""
    starts = range(0, len(content), block_bytes)
    each = [xxhash.xxh3_64_hexdigest(content[at : at + block_bytes]) for at in starts]
    blocks = "".join(each) if len(each) > 1 else ""
    return FileDigest(len(content), xxhash.xxh3_64_hexdigest(content), blocks, block_bytes)
