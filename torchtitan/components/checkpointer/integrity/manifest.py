"""The commit record of a checkpoint: ``manifest.json``, written last and removed first.

It says what the checkpoint is and what every file of it held. It holds a digest of itself, taken with
zeros in the place of that digest, so any changed bit of it is found. The first two fields keep their
place and meaning in every version of the format: a newer version is told from damage by them.

    Head + digests of all ranks -> Manifest -> render -> (the back end writes it)
    read -> parse -> verification.py
"""

import functools
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, cast, Literal, NoReturn

import torch
from xxhash import xxh3_64_hexdigest

from torchtitan import __version__
from torchtitan.components.checkpointer.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
)
from torchtitan.components.checkpointer.integrity.digests import FileDigest
from torchtitan.components.checkpointer.storage import MovingStorage

MANIFEST = "manifest.json"
"""Its name in the directory of a checkpoint."""

SCHEMA = 3
"""The version of the format that is written, and the newest one that can be read.

1: blocks have 4 MiB. 2: says in ``block_bytes`` how long those of all files are. 3: says so of each file.
"""

ManifestKind = Literal["full", "model_only", "hf"]

_BLOCK_BYTES_IN_SCHEMA_1 = 4 * 2**20
_KINDS = ("full", "model_only", "hf")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NO_DIGEST = "0" * 16
_DIGITS = re.compile("[0-9a-f]+")
_START = re.compile(rb'\A\{\n  "schema": ([0-9]{1,9}),\n  "xxh3_64": "([0-9a-f]{16})",\n')


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What a run is, as far as its checkpoints tell."""

    config: dict[str, Any] | None = None
    """The resolved settings, nested; what JSON has no form for is kept as text."""

    parallel: dict[str, int] | None = None
    """Degree of each kind of parallelism."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a checkpoint is, but for its files."""

    step: int
    kind: ManifestKind
    backend: str
    world_size: int
    """How many ranks wrote it."""

    parallel: dict[str, int]
    versions: dict[str, str]
    config: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that ``manifest.json`` says."""

    head: Head
    files: dict[str, FileDigest]
    """By name relative to the directory of the checkpoint, with "/" between parts."""

    def __post_init__(self) -> None:
        for name in self.files:
            # Not only on reading: a manifest that nobody can read must not be written.
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise ValueError(f"{name!r} is no file below the directory of a checkpoint")


def head_of(
    step: int,
    kind: ManifestKind,
    backend: str,
    world_size: int,
    run: RunDescription | None,
) -> Head:
    """The head of a checkpoint that this process writes."""
    run = run or RunDescription()
    return Head(
        step=step,
        kind=kind,
        backend=backend,
        world_size=world_size,
        parallel=dict(run.parallel or {}),
        versions=dict(_versions()),
        config=None if run.config is None else without_addresses(run.config),
    )


def render(manifest: Manifest) -> bytes:
    """The one text for ``manifest``: the same values give the same bytes.

    Raises:
        ValueError: a value is not of the type that it is declared with.
    """
    text = _text_of(manifest, SCHEMA)
    try:
        again = _text_of(_manifest_of(json.loads(text), SCHEMA), SCHEMA)
    except ValueError as error:
        again = repr(error).encode()
    if again != text:
        # Better no checkpoint than one that is found damaged when it is needed.
        raise ValueError(f"the manifest would not be read as it was written: {again!r}")
    return text


def _text_of(manifest: Manifest, schema: int, of_all: int | None = None) -> bytes:
    """``of_all`` is what schema 2 has for ``block_bytes``."""
    head = manifest.head
    fields = {
        "schema": schema,
        "xxh3_64": _NO_DIGEST,
        "step": head.step,
        "kind": head.kind,
        "backend": head.backend,
        "world_size": head.world_size,
        "parallel": head.parallel,
        "versions": head.versions,
        "config": _plain(head.config),
        **({"block_bytes": of_all} if schema == 2 else {}),
        "files": {
            name: {
                "size_bytes": digest.size_bytes,
                "xxh3_64": digest.xxh3_64,
                **({} if schema < 3 else {"block_bytes": digest.block_bytes}),
                "blocks": digest.blocks,
            }
            for name, digest in sorted(manifest.files.items())
        },
    }
    text = (json.dumps(fields, indent=2, allow_nan=False) + "\n").encode()
    place = _START.match(text)
    assert place is not None
    return _with_digest(text, place, xxh3_64_hexdigest(text))


def parse(content: bytes, path: str) -> Manifest:
    """The manifest that ``render`` gave ``content`` for; ``path`` is of its file, for messages.

    Raises:
        CheckpointDamagedError: it is not what was saved.
        CheckpointMismatchError: a newer version wrote it.
    """
    place = _START.match(content)
    if place is None:
        _damaged(path, "it does not begin like one")
    found = xxh3_64_hexdigest(_with_digest(content, place, _NO_DIGEST))
    expected = place[2].decode()
    if found != expected:
        _damaged(path, f"expected xxh3 {expected}, found {found}")
    schema = int(place[1])
    if schema > SCHEMA:
        raise CheckpointMismatchError(
            f"{path} has schema {schema}, and this version of torchtitan ({__version__}) reads up to "
            f"{SCHEMA}. A newer version wrote this checkpoint: resume with that one."
        )
    if schema < 1:
        _damaged(path, f"there has never been a schema {schema}")
    try:
        fields = json.loads(content)
        manifest = _manifest_of(fields, schema)
        is_canonical = _text_of(manifest, schema, fields.get("block_bytes")) == content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _damaged(path, f"its content makes no sense: {error!r}", error)
    if not is_canonical:
        _damaged(path, "its digest is right, but nothing writes such a text")
    return manifest


def read(storage: MovingStorage, path: str) -> Manifest | None:
    """The manifest of the checkpoint ``path``, or None when there is none.

    Raises:
        CheckpointDamagedError, CheckpointMismatchError: as ``parse``.
        OSError: the disk does not let it be read now, which says nothing about the checkpoint.
    """
    file = f"{path}/{MANIFEST}"
    try:
        content = storage.read_bytes(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as error:
        _damaged(file, "it is a directory", error)
    return parse(content, file)


def _manifest_of(fields: dict[str, Any], schema: int) -> Manifest:
    of_all = fields["block_bytes"] if schema == 2 else _BLOCK_BYTES_IN_SCHEMA_1
    if type(of_all) is not int or of_all < 1:
        raise ValueError(f"block_bytes {of_all!r}")
    step, world_size, kind = fields["step"], fields["world_size"], fields["kind"]
    if type(step) is not int or type(world_size) is not int or type(fields["backend"]) is not str:
        raise ValueError(f"step {step!r}, world_size {world_size!r}, backend {fields['backend']!r}")
    if kind not in _KINDS:
        raise ValueError(f"kind {kind!r}")
    if any(type(degree) is not int for degree in fields["parallel"].values()):
        raise ValueError(f"parallel {fields['parallel']!r}")
    if any(type(version) is not str for version in fields["versions"].values()):
        raise ValueError(f"versions {fields['versions']!r}")
    files = {}
    for name, entry in fields["files"].items():
        if type(entry["size_bytes"]) is not int:
            raise ValueError(f"the size of {name!r} is {entry['size_bytes']!r}")
        if not _DIGITS.fullmatch(entry["xxh3_64"] + entry["blocks"]):
            raise ValueError(f"the digests of {name!r} are none")
        block_bytes = of_all if schema < 3 else entry["block_bytes"]
        if type(block_bytes) is not int:
            raise ValueError(f"the blocks of {name!r} have {block_bytes!r} bytes")
        sizes_and_digests = entry["size_bytes"], entry["xxh3_64"], entry["blocks"]
        files[name] = FileDigest(*sizes_and_digests, block_bytes)
    head = Head(
        step=step,
        kind=cast(ManifestKind, kind),
        backend=fields["backend"],
        world_size=world_size,
        parallel=dict(fields["parallel"]),
        versions=dict(fields["versions"]),
        config=None if fields["config"] is None else dict(fields["config"]),
    )
    return Manifest(head=head, files=files)


def _with_digest(text: bytes, place: re.Match[bytes], digest: str) -> bytes:
    return text[: place.start(2)] + digest.encode() + text[place.end(2) :]


def without_addresses(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` as JSON keeps it; of functions not where they lie, which no two processes agree on."""
    return _parsed(_ADDRESS.sub("", json.dumps(config, default=str)))


def _plain(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    # What JSON makes of it (keys are text, tuples are lists), so that reading it back changes nothing.
    return None if config is None else _parsed(json.dumps(config, default=str))


def _parsed(text: str) -> dict[str, Any]:
    # JSON has no numbers that are not finite, and other programs would refuse the whole file.
    return json.loads(text, parse_constant=str)


@functools.cache  # looks through all installed packages
def _versions() -> dict[str, str]:
    versions = {
        "torchtitan": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    try:
        versions["torch_checkpointing"] = metadata.version("torch_checkpointing")
    except metadata.PackageNotFoundError:
        pass
    return versions


def _damaged(path: str, found: str, cause: Exception | None = None) -> NoReturn:
    raise CheckpointDamagedError(f"The manifest {path} is damaged: {found}.") from cause
