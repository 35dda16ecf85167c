"""What a load finds before and while it reads, in each of the modes."""

import io
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.checkpointer.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.integrity import manifest, verification
from torchtitan.components.checkpointer.integrity.checked_file import CheckedFile
from torchtitan.components.checkpointer.integrity.digests import BLOCK_BYTES, digest_of
from torchtitan.components.checkpointer.integrity.manifest import (
    head_of,
    Manifest,
    MANIFEST,
    render,
)
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify
from torchtitan.components.checkpointer.storage import FilesystemStorage, MovingStorage
from torchtitan.components.checkpointer.tc.storage import (
    BackendCheckpointStorage,
    DurableStorage,
    DurableStorageConfig,
)

from tests.unit_tests.components.checkpointer.fakes import MemoryStorage

PATH = "/run/step-30"
CONTENTS = {
    "index": b"what lies where",
    "data": bytes(BLOCK_BYTES) + b"the rest",
    "below/part": b"",
}
STORAGES: dict[str, Callable[[], MovingStorage]] = {
    "local": FilesystemStorage,
    "library": lambda: BackendCheckpointStorage(DurableStorage(DurableStorageConfig())),
}


def saved() -> dict[str, bytes]:
    """All files of a checkpoint of step 30."""
    head = head_of(30, "full", "dcp", 1, None)
    files = {name: digest_of(content) for name, content in CONTENTS.items()}
    return {**CONTENTS, MANIFEST: render(Manifest(head, files))}


def in_memory(changes: dict[str, bytes | None] | None = None) -> MemoryStorage:
    storage = MemoryStorage("/run", PATH)
    for name, content in {**saved(), **(changes or {})}.items():
        if content is not None:
            storage.add(f"{PATH}/{name}", content)
    return storage


@pytest.mark.parametrize("mode", Verify)
@pytest.mark.parametrize("kind", STORAGES)
def test_a_good_checkpoint_raises_no_alarm(
    tmp_path: Path, kind: str, mode: Verify, caplog: pytest.LogCaptureFixture
) -> None:
    for name, content in saved().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = Verification.begin(STORAGES[kind](), str(tmp_path), mode, step=30)
    for name, content in CONTENTS.items():
        assert found.check(name, content) == content
        with found.checked(name, open(tmp_path / name, "rb")) as file:
            assert isinstance(file, CheckedFile) == (mode is Verify.FULL)
            assert file.read() == content
    total = sum(map(len, CONTENTS.values()))
    assert found.checked_bytes == (2 * total if mode is Verify.FULL else 0)
    assert not caplog.records


@pytest.mark.parametrize("mode", [Verify.FULL, Verify.SIZE])
@pytest.mark.parametrize("kind", STORAGES)
def test_all_files_that_are_missing_or_have_another_size_are_named(
    tmp_path: Path, kind: str, mode: Verify
) -> None:
    for name, content in saved().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "index").unlink()
    (tmp_path / "below/part").write_bytes(b"more")
    with pytest.raises(CheckpointDamagedError) as caught:
        Verification.begin(STORAGES[kind](), str(tmp_path), mode)
    assert str(caught.value) == (
        f"{tmp_path} is damaged: below/part: expected 0 bytes, found 4; index: expected 15 bytes, "
        "found none."
    )
    Verification.begin(STORAGES[kind](), str(tmp_path), Verify.OFF)


@pytest.mark.parametrize("mode", [Verify.FULL, Verify.SIZE])
def test_a_manifest_of_another_step_is_damage(mode: Verify) -> None:
    with pytest.raises(
        CheckpointDamagedError, match="expected that of step 20, found that of .* 30"
    ):
        Verification.begin(in_memory(), PATH, mode, step=20)
    Verification.begin(in_memory(), PATH, mode, step=30)
    # A run may begin from a folder of any name.
    Verification.begin(in_memory(), PATH, mode)


@pytest.mark.parametrize("mode", Verify)
def test_a_checkpoint_without_a_manifest_is_loaded_with_a_warning(
    mode: Verify, caplog: pytest.LogCaptureFixture
) -> None:
    found = Verification.begin(in_memory({MANIFEST: None, "index": None}), PATH, mode)
    assert found.manifest is None and not found.is_full
    assert not caplog.records, "it may only be looked at"
    found.tell_if_foreign()
    raw = io.BytesIO(b"anything")
    assert found.checked("data", raw) is raw and found.check("other", b"x") == b"x"
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == (mode is not Verify.OFF)
    cause = (
        f"{PATH} has no manifest.json: its save was killed in the last instant, or another program"
    )
    assert all(cause in line and "unverified" in line for line in warned)


def test_when_it_is_off_nothing_is_checked_and_the_manifest_only_says_what_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = Verification.begin(in_memory({"data": b"short", "index": None}), PATH, "off", step=30)
    raw = io.BytesIO()
    assert found.mode is Verify.OFF and not found.is_full and found.checked("data", raw) is raw
    assert found.manifest is not None and found.manifest.head.step == 30
    assert Verification.begin(MemoryStorage(), "/nowhere", "off").manifest is None
    assert not caplog.records


@pytest.mark.parametrize("content", [b"junk", None])
def test_when_it_is_off_a_manifest_that_is_of_no_use_is_ignored_with_a_warning(
    content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    storage = in_memory() if content is None else in_memory({MANIFEST: content})
    found = Verification.begin(storage, PATH, "off", step=7 if content is None else 30)
    assert found.manifest is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"{PATH}/{MANIFEST} is damaged" in line and line.endswith("nothing is to be verified.")


@pytest.mark.parametrize("mode", Verify)
def test_what_a_newer_version_wrote_is_refused_whatever_is_to_be_checked(
    mode: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = in_memory()
    monkeypatch.setattr(manifest, "SCHEMA", 0)
    with pytest.raises(CheckpointMismatchError, match="has schema 3"):
        Verification.begin(storage, PATH, mode)


@pytest.mark.parametrize("question", ["read_bytes", "file_sizes"])
def test_a_disk_that_does_not_answer_is_no_damage(question: str) -> None:
    storage = in_memory()

    def silent(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    setattr(storage, question, silent)
    with pytest.raises(CheckpointReadError, match=f"{PATH}: .*Input/output error") as caught:
        Verification.begin(storage, PATH, "full")
    assert not isinstance(caught.value, CheckpointDamagedError)


def test_a_change_of_the_same_size_is_found_where_it_is_read() -> None:
    changed = bytearray(CONTENTS["data"])
    changed[BLOCK_BYTES] ^= 1
    for mode in Verify:
        found = Verification.begin(in_memory({"data": bytes(changed)}), PATH, mode)
        file = found.checked("data", io.BytesIO(changed))
        if mode is not Verify.FULL:
            assert found.check("data", bytes(changed)) == file.read() == bytes(changed)
            continue
        expected = re.escape(f"{PATH}/data is damaged: bytes {BLOCK_BYTES}..{BLOCK_BYTES + 7}: ")
        with pytest.raises(CheckpointDamagedError, match=expected + "expected xxh3 .*, found"):
            file.read()
        with pytest.raises(CheckpointDamagedError, match=expected + "expected xxh3 .*, found"):
            found.check("data", bytes(changed))
        with pytest.raises(CheckpointDamagedError, match="expected 15 bytes, found 4"):
            found.check("index", b"what")


def test_a_file_that_nobody_saved_is_damage() -> None:
    found = Verification.begin(in_memory({"other": b"x"}), PATH, "full")
    raw = io.BytesIO(b"x")
    for read in (lambda: found.checked("other", raw), lambda: found.check("other", b"x")):
        with pytest.raises(CheckpointDamagedError, match=f"{PATH}/other is in no manifest"):
            read()
    assert raw.closed
    assert Verification.begin(in_memory({"other": b"x"}), PATH, "size").check("other", b"x") == b"x"


def test_every_rank_checks_with_its_copy() -> None:
    found = Verification.begin(in_memory(), PATH, "full")
    found.check("index", CONTENTS["index"])
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.path, copy.manifest, copy.mode) == (PATH, found.manifest, Verify.FULL)
    assert copy.checked_bytes == 0
    with pytest.raises(CheckpointDamagedError):
        copy.check("index", b"what lies there")


def test_a_long_check_is_told_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = Verification.begin(in_memory(), PATH, "full")
    found.check("data", CONTENTS["data"])
    assert not caplog.records
    now = verification.time.monotonic()
    monkeypatch.setattr(verification.time, "monotonic", lambda: now + 11)
    for _ in range(5):
        found.check("data", CONTENTS["data"])
    (line,) = (record.getMessage() for record in caplog.records)
    assert "Checked" in line and PATH in line and "for all ranks" in line
    monkeypatch.setattr(verification.time, "monotonic", lambda: now + 22)
    monkeypatch.setattr(verification.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(verification.dist, "get_rank", lambda: 1)
    found.check("data", CONTENTS["data"])
    assert len(caplog.records) == 1, "one rank speaks for all"
