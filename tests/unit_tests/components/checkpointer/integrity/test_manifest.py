"""The commit record: one text for one checkpoint, and any other text is found."""

import itertools
import json
import pickle
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torchtitan.components.checkpointer.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.integrity import manifest as manifests
from torchtitan.components.checkpointer.integrity.digests import BLOCK_BYTES, digest_of, FileDigest
from torchtitan.components.checkpointer.integrity.manifest import (
    Head,
    head_of,
    Manifest,
    MANIFEST,
    parse,
    read,
    render,
    RunDescription,
    SCHEMA,
)
from torchtitan.components.checkpointer.storage import FilesystemStorage
from torchtitan.components.checkpointer.tc.storage import (
    BackendCheckpointStorage,
    DurableStorage,
    DurableStorageConfig,
)
from xxhash import xxh3_64_hexdigest

from tests.unit_tests.components.checkpointer.fakes import MemoryStorage

HEAD = Head(
    step=30,
    kind="full",
    backend="dcp",
    world_size=2,
    parallel={"dp_shard": 2},
    versions={"torch": "2.13.0"},
    config={"training": {"steps": 30, "lr": 1e-3, "name": None}},
)
FILES = {
    "__0_0.distcp": FileDigest(BLOCK_BYTES + 5, "0123456789abcdef", "0" * 16 + "f" * 16),
    ".metadata": digest_of(b"index", 2**18),
}
EXAMPLE = Manifest(HEAD, FILES)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def signed(content: bytes) -> bytes:
    """``content`` with the digest that belongs to it."""
    pattern = re.compile(rb'(?<="xxh3_64": ")[0-9a-f]{16}')
    zeros = pattern.sub(b"0" * 16, content, count=1)
    return pattern.sub(xxh3_64_hexdigest(zeros).encode(), zeros, count=1)


@given(
    config=st.none() | st.dictionaries(st.text(), json_values, max_size=4),
    names=st.sets(
        st.text(st.characters(exclude_characters="/"), min_size=1).filter(lambda n: n.strip("."))
    ),
    step=st.integers(0, 10**9),
    kind=st.sampled_from(["full", "model_only", "hf"]),
    block_bytes=st.lists(st.integers(1, BLOCK_BYTES), min_size=3, max_size=3),
)
def test_what_is_written_is_what_is_read(
    config: dict[str, Any] | None, names: set[str], step: int, kind: Any, block_bytes: list[int]
) -> None:
    run = RunDescription(config, {"dp_shard": 4})
    head = head_of(step, kind, "torch_checkpointing", 4, run)
    lengths = itertools.cycle(block_bytes)
    contents = {name: name.encode("utf-8", "replace") for name in names}
    files = {name: digest_of(content, next(lengths)) for name, content in contents.items()}
    manifest = Manifest(head, files)
    content = render(manifest)
    assert parse(content, "m") == manifest
    assert render(parse(content, "m")) == content == signed(content)


def test_people_can_read_it() -> None:
    content = render(EXAMPLE)
    fields = json.loads(content)
    assert list(fields)[:4] == ["schema", "xxh3_64", "step", "kind"] and list(fields)[-1] == "files"
    assert list(fields["files"]) == [".metadata", "__0_0.distcp"]
    assert content.endswith(b"}\n") and content.isascii() and content.count(b"\n") > 20


def test_every_bit_that_flips_is_found() -> None:
    content = render(EXAMPLE)
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            with pytest.raises(CheckpointDamagedError, match="/run/step-30/manifest.json"):
                parse(bytes(changed), "/run/step-30/manifest.json")


def test_every_other_length_is_found() -> None:
    content = render(EXAMPLE)
    for end in range(len(content)):
        with pytest.raises(CheckpointDamagedError):
            parse(content[:end], "m")
    for more in (b"\n", b" ", b"\0", content):
        with pytest.raises(CheckpointDamagedError):
            parse(content + more, "m")
    with pytest.raises(CheckpointDamagedError):
        parse(bytes(len(content)), "m")


@settings(max_examples=200)
@given(
    start=st.integers(0, 2000),
    removed=st.integers(0, 50),
    put=st.binary(max_size=50),
)
def test_any_other_text_is_found(start: int, removed: int, put: bytes) -> None:
    content = render(EXAMPLE)
    other = content[:start] + put + content[start + removed :]
    if other == content:
        return
    with pytest.raises(CheckpointDamagedError):
        parse(other, "m")


def test_a_newer_version_is_told_from_damage() -> None:
    newer = signed(render(EXAMPLE).replace(b'"schema": 3,', b'"schema": 4,\n  "new": [],', 1))
    # The two first fields stay where they are; all else may be anything.
    newer = signed(newer.replace(b',\n  "new": []', b"", 1).replace(b'"files"', b'"parts"'))
    with pytest.raises(CheckpointMismatchError, match="schema 4.*reads up to 3.*newer") as caught:
        parse(newer, "m")
    assert not isinstance(caught.value, CheckpointReadError)
    assert SCHEMA == 3
    with pytest.raises(CheckpointDamagedError):
        parse(newer.replace(b'"step": 30', b'"step": 31'), "m")


def edited(change: Callable[[dict[str, Any]], Any]) -> bytes:
    fields = json.loads(render(EXAMPLE))
    change(fields)
    return signed((json.dumps(fields, indent=2) + "\n").encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("step"),
        lambda fields: fields.update(more=1),
        lambda fields: fields.update(step="30"),
        lambda fields: fields.update(step=True),
        lambda fields: fields.update(world_size=2.0),
        lambda fields: fields.update(kind="other"),
        lambda fields: fields.update(kind=[]),
        lambda fields: fields.update(config=[1]),
        lambda fields: fields.update(parallel=None),
        lambda fields: fields.update(parallel={"dp": True}),
        lambda fields: fields.update(versions={"torch": 2}),
        lambda fields: fields.update(files=[]),
        lambda fields: fields.update(block_bytes=BLOCK_BYTES),
        lambda fields: fields.update(files={"a": None}),
        lambda fields: fields["files"].update({"../step-20/a": fields["files"][".metadata"]}),
        lambda fields: fields["files"].update({"/etc/passwd": fields["files"][".metadata"]}),
        lambda fields: fields["files"][".metadata"].pop("block_bytes"),
        lambda fields: fields["files"][".metadata"].update(block_bytes=0),
        lambda fields: fields["files"][".metadata"].update(block_bytes=float(BLOCK_BYTES)),
        lambda fields: fields["files"]["__0_0.distcp"].update(block_bytes=4 * BLOCK_BYTES),
        lambda fields: fields["files"][".metadata"].update(size_bytes="5"),
        lambda fields: fields["files"][".metadata"].update(size_bytes=-1),
        lambda fields: fields["files"][".metadata"].update(size_bytes=5.0),
        lambda fields: fields["files"][".metadata"].update(size_bytes=True),
        lambda fields: fields["files"][".metadata"].update(size_bytes=BLOCK_BYTES + 1),
        lambda fields: fields["files"][".metadata"].update(xxh3_64=None),
        lambda fields: fields["files"][".metadata"].update(blocks=[]),
        lambda fields: fields["files"][".metadata"].update(xxh3_64="0123456789ABCDEF"),
    ],
)
def test_a_text_that_nothing_writes_is_refused_though_its_digest_is_right(
    change: Callable[[dict[str, Any]], Any],
) -> None:
    assert parse(edited(lambda fields: None), "m") == EXAMPLE
    with pytest.raises(CheckpointDamagedError, match="The manifest m is damaged"):
        parse(edited(change), "m")


def test_no_text_makes_it_fail_in_another_way() -> None:
    content = render(EXAMPLE)
    deep = content.replace(b'"config": {', b'"config": ' + b'{"a": ' * 100_000 + b"{", 1)
    twice = content.replace(b'  "step": 30,\n', b'  "step": 30,\n  "step": 30,\n', 1)
    long = content.replace(b'"step": 30', b'"step": ' + b"9" * 10_000, 1)
    for text in (deep, twice, long, content.replace(b"dcp", b"\xff\xfe\xff", 1)):
        with pytest.raises(CheckpointDamagedError, match="The manifest m is damaged"):
            parse(signed(text), "m")


class Mode(Enum):
    FAST = "fast"


def test_settings_that_json_does_not_know_are_kept_as_text() -> None:
    config: dict[Any, Any] = {
        "path": Path("/data"),
        "mode": Mode.FAST,
        "pair": (1, 2),
        3: {"dtype": torch.float32},
    }
    head = head_of(1, "model_only", "dcp", 1, RunDescription(config, {}))
    assert head.config == {
        "path": "/data",
        "mode": "Mode.FAST",
        "pair": [1, 2],
        "3": {"dtype": "torch.float32"},
    }
    manifest = Manifest(head, {})
    assert parse(render(manifest), "m") == manifest
    # One that was put together by hand is written in the same way.
    by_hand = Manifest(Head(1, "model_only", "dcp", 1, {}, head.versions, config), {})
    assert render(by_hand) == render(manifest)


def test_numbers_that_are_not_finite_are_kept_as_text_which_every_program_can_read() -> None:
    config = {"clip": float("inf"), "floor": [-float("inf")], "threshold": float("nan"), "lr": 0.1}
    text = {"clip": "Infinity", "floor": ["-Infinity"], "threshold": "NaN", "lr": 0.1}
    head = head_of(1, "full", "dcp", 1, RunDescription(config, {}))
    by_hand = Head(1, "full", "dcp", 1, {}, head.versions, config)
    for each in (head, by_hand):
        content = render(Manifest(each, {}))
        assert parse(content, "m").head.config == text
        assert json.loads(content, parse_constant=pytest.fail)["config"] == text


def test_installed_packages_are_looked_through_once_and_not_at_each_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = head_of(5, "full", "dcp", 2, None)
    monkeypatch.setattr(manifests.metadata, "version", pytest.fail)
    first.versions["torch"] = "changed"
    assert head_of(6, "full", "dcp", 2, None).versions["torch"] == torch.__version__


def test_the_head_says_which_programs_wrote_it() -> None:
    head = head_of(5, "full", "dcp", 2, None)
    assert set(head.versions) == {"torchtitan", "torch", "python", "torch_checkpointing"}
    assert head.versions["torch"] == torch.__version__
    assert head.config is None and head.parallel == {}


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a"])
def test_a_manifest_that_could_not_be_read_is_not_written(name: str) -> None:
    with pytest.raises(ValueError, match="no file below"):
        Manifest(HEAD, {name: FILES[".metadata"]})


def test_values_that_would_be_read_as_others_are_not_written() -> None:
    for parallel in ({"dp_shard": True}, {"dp_shard": "2"}):
        odd: Any = Head(1, "full", "dcp", 1, cast(dict[str, int], parallel), {}, None)
        with pytest.raises(ValueError, match="would not be read as it was written"):
            render(Manifest(odd, {}))


def test_it_travels_between_processes() -> None:
    run = RunDescription({"a": 1}, {"dp_shard": 2})
    for value in (EXAMPLE, HEAD, run):
        assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("kind", ["local", "library"])
def test_it_is_read_where_the_checkpoint_lies(tmp_path: Path, kind: str) -> None:
    library = BackendCheckpointStorage(DurableStorage(DurableStorageConfig()))
    storage = FilesystemStorage() if kind == "local" else library
    path = tmp_path / "step-30"
    assert read(storage, str(path)) is None
    path.mkdir()
    assert read(storage, str(path)) is None
    (path / MANIFEST).write_bytes(render(EXAMPLE))
    assert read(storage, str(path)) == EXAMPLE
    (path / MANIFEST).write_bytes(b"")
    with pytest.raises(CheckpointDamagedError, match=re.escape(str(path / MANIFEST))):
        read(storage, str(path))
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()
    with pytest.raises(CheckpointDamagedError, match="it is a directory"):
        read(storage, str(path))


def test_a_disk_that_does_not_answer_is_no_damage() -> None:
    class Silent(MemoryStorage):
        def read_bytes(self, path: str) -> bytes:
            raise PermissionError(path)

    with pytest.raises(PermissionError):
        read(Silent(), "/run/step-30")
