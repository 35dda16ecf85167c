"""How far a checkpoint is checked while it is read, and the checks themselves.

Rank 0 begins a verification, and every rank gets a copy to read its files through. In ``full`` every
byte that is read is compared with its digest before it is used; in ``size`` the files of the manifest
have to be there with their sizes. A checkpoint without a manifest is foreign: another program
or an older version wrote it, and nothing is known to compare it with.

    base (rank 0: begin -> broadcast) -> back end -> checked, check -> its reader
"""

import io
import threading
import time
from enum import Enum
from typing import Any

import torch.distributed as dist

from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.integrity import manifest as manifests
from torchtitan.components.checkpointer.integrity.checked_file import CheckedFile
from torchtitan.components.checkpointer.integrity.digests import digest_of, FileDigest
from torchtitan.components.checkpointer.integrity.manifest import Manifest, MANIFEST
from torchtitan.components.checkpointer.storage import MovingStorage
from torchtitan.tools.logging import logger

_SECONDS_BETWEEN_LINES = 10.0


class Verify(str, Enum):
    """What is checked while a checkpoint is loaded."""

    FULL = "full"
    """Every byte that is read."""

    SIZE = "size"
    """The files and their sizes."""

    OFF = "off"
    """Nothing. What another version has written is refused all the same."""


class Verification:
    """The check of one checkpoint; a copy that was pickled counts its own progress."""

    def __init__(self, path: str, manifest: Manifest | None, mode: Verify | str) -> None:
        self.path = path
        self.manifest = manifest
        """None: nothing is known about the files."""
        self.mode = Verify(mode)
        self.checked_bytes = 0
        """How much this process has found good."""
        self._told_at = time.monotonic()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Verification, (self.path, self.manifest, self.mode)

    @classmethod
    def begin(
        cls, storage: MovingStorage, path: str, mode: Verify | str, *, step: int | None = None
    ) -> "Verification":
        """Read the manifest of the checkpoint ``path`` and look whether its files are there.

        With ``off`` the manifest only tells what the checkpoint is, if it can be read.

        Args:
            step: the step that the checkpoint has to be of; None for one from elsewhere.

        Raises:
            CheckpointDamagedError: the manifest is damaged or of another step, or files are missing
                or have other sizes; names them all.
            CheckpointMismatchError: a newer version wrote it.
            CheckpointReadError: the disk does not let it be read now.
        """
        if Verify(mode) is Verify.OFF:
            return cls(path, _description(storage, path, step), mode)
        try:
            manifest = manifests.read(storage, path)
            if manifest is not None:
                _require_step(path, manifest, step)
                _require_sizes(storage, path, manifest)
        except OSError as error:
            raise CheckpointReadError(
                f"Could not look at the checkpoint {path}: {error}. That says nothing about the "
                "checkpoint; see to the disk and start again."
            ) from error
        return cls(path, manifest, mode)

    def tell_if_foreign(self) -> None:
        """Warn if the checkpoint, which is about to be loaded, should be checked and cannot be."""
        if self.manifest is None and self.mode is not Verify.OFF:
            logger.warning(
                f"{self.path} has no {MANIFEST}: its save was killed in the last instant, or another "
                "program or an older version wrote it. It is loaded unverified."
            )

    @property
    def is_full(self) -> bool:
        """Whether what is read is compared with digests."""
        return self.mode is Verify.FULL and self.manifest is not None

    def checked(self, name: str, raw: Any) -> io.RawIOBase:
        """``raw``, the open file ``name`` (relative to the checkpoint), checked as it is read.

        Raises:
            CheckpointDamagedError: it has another size or is in no manifest; ``raw`` is closed then.
        """
        if not self.is_full:
            return raw
        try:
            digest = self._digest(name)
        except CheckpointDamagedError:
            raw.close()
            raise
        return CheckedFile(raw, f"{self.path}/{name}", digest, self._count)

    def check(self, name: str, content: bytes) -> bytes:
        """``content``, all of the small file ``name``, once it is known to be what was saved.

        Raises:
            CheckpointDamagedError: it is not, or is in no manifest.
        """
        if not self.is_full:
            return content
        expected = self._digest(name)
        found = digest_of(content, expected.block_bytes)
        if found != expected:
            raise CheckpointDamagedError(
                f"{self.path}/{name} is damaged: {difference(expected, found)}."
            )
        self._count(len(content))
        return content

    def _digest(self, name: str) -> FileDigest:
        assert self.manifest is not None
        digest = self.manifest.files.get(name)
        if digest is None:
            raise CheckpointDamagedError(
                f"{self.path}/{name} is in no manifest: expected one of the "
                f"{len(self.manifest.files)} files that {MANIFEST} lists."
            )
        return digest

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self.checked_bytes += size_bytes
            now = time.monotonic()
            if now - self._told_at < _SECONDS_BETWEEN_LINES:
                return
            self._told_at = now
            checked = self.checked_bytes
        if dist.is_initialized() and dist.get_rank() != 0:
            return  # thousands of ranks would say the same
        assert self.manifest is not None
        total = sum(digest.size_bytes for digest in self.manifest.files.values())
        logger.info(
            f"Checked {checked / 2**30:.1f} GiB as they were read here; {self.path} has "
            f"{total / 2**30:.1f} GiB for all ranks."
        )


def difference(expected: FileDigest, found: FileDigest) -> str:
    """What tells the two apart, in words; of the content the first block that differs."""
    if expected.size_bytes != found.size_bytes:
        return f"expected {expected.size_bytes} bytes, found {found.size_bytes}"
    for index in range(expected.num_blocks):
        wanted, got = expected.block_digest(index), found.block_digest(index)
        if wanted != got:
            start, end = expected.block_range(index)
            return f"bytes {start}..{end - 1}: expected xxh3 {wanted}, found {got}"
    return f"expected xxh3 {expected.xxh3_64}, found {found.xxh3_64}"


def _description(storage: MovingStorage, path: str, step: int | None) -> Manifest | None:
    """The head of the manifest, or None if it is of no use, which is no reason not to load the rest."""
    try:
        manifest = manifests.read(storage, path)
        if manifest is None:
            return None
        _require_step(path, manifest, step)
    except (CheckpointDamagedError, OSError) as error:
        logger.warning(f"{error} It is ignored, because nothing is to be verified.")
        return None
    return Manifest(manifest.head, {})


def _require_step(path: str, manifest: Manifest, step: int | None) -> None:
    if step is not None and manifest.head.step != step:
        raise CheckpointDamagedError(
            f"{path}/{MANIFEST} is damaged: expected that of step {step}, found that of step "
            f"{manifest.head.step}."
        )


def _require_sizes(storage: MovingStorage, path: str, manifest: Manifest) -> None:
    found = storage.file_sizes(path, manifest.files)
    offenders = [
        f"{name}: expected {digest.size_bytes} bytes, " + f"found {found.get(name, 'none')}"
        for name, digest in sorted(manifest.files.items())
        if found.get(name) != digest.size_bytes
    ]
    if offenders:
        raise CheckpointDamagedError(f"{path} is damaged: {'; '.join(offenders)}.")
