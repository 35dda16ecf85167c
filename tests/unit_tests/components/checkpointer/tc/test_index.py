"""What counts as a checkpoint of torch_checkpointing, found by names alone."""

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.components.checkpointer.storage import FilesystemStorage, MovingStorage
from torchtitan.components.checkpointer.tc.index import (
    is_complete,
    kind_of,
    MARKER,
    parse_entry,
    step_dir_pattern,
    TEMP_DIR_PREFIX,
)
from torchtitan.components.checkpointer.tc.storage import (
    BackendCheckpointStorage,
    DurableStorageConfig,
)

from tests.unit_tests.components.checkpointer.fakes import MemoryStorage

PATTERN = step_dir_pattern(TEMP_DIR_PREFIX)
OTHERS = {"optimizer", "lr_scheduler", "train_state"}


@pytest.mark.parametrize(
    "name,parsed",
    [
        ("step-7", (7, False)),
        ("step-0", (0, False)),
        ("tmp_step-7", (7, True)),
        ("tmp_step-0", (0, True)),
        ("step-4-notes", None),
        ("notes-step-5", None),
        ("step-07", None),
        ("tmp_step-07", None),
        ("step-4.partial", None),
        ("tmp_tmp_step-4", None),
        ("tmpstep-4", None),
        ("Xtmp_step-4", None),
        ("step-", None),
        ("step-+4", None),
        ("step-4 ", None),
        ("step-4\n", None),
        ("step-\u0667", None),
        ("", None),
    ],
)
def test_a_name_is_ours_as_a_whole_or_not_at_all(
    name: str, parsed: tuple[int, bool] | None
) -> None:
    assert parse_entry(name, PATTERN) == parsed


@given(st.integers(0, 10**18), st.sampled_from(["tmp_", "partial.", "a+b", ".", ""]))
def test_a_name_and_its_step_stand_for_each_other_with_any_prefix(step: int, prefix: str) -> None:
    pattern = step_dir_pattern(prefix)
    assert parse_entry(f"step-{step}", pattern) == (step, False)
    assert parse_entry(f"{prefix}step-{step}", pattern) == (step, bool(prefix))
    match = pattern.fullmatch(f"{prefix}step-{step}")
    assert match is not None and match["step"] == str(step) and (match["tmp"] or "") == prefix
    # Dots and the like in the prefix stand for themselves, and a search finds no more than a match.
    assert parse_entry(f"Xstep-{step}", pattern) is None
    assert pattern.search(f"a step-{step}") is None and pattern.search(f"step-{step}\n") is None


@given(st.text() | st.from_regex(r"(tmp_)?[sS]tep-[0-9+ .a]*", fullmatch=True))
def test_a_name_that_parses_is_exactly_the_one_that_is_written(name: str) -> None:
    parsed = parse_entry(name, PATTERN)
    assert parsed is None or name == f"{'tmp_' * parsed[1]}step-{parsed[0]}"


def checkpoint(*names: str, **contents: bytes) -> MemoryStorage:
    storage = MemoryStorage("/run/step-1")
    for name in names:
        storage.add(f"/run/step-1/{name}", contents.get(name.partition(".")[0], b"bytes"))
    return storage


@pytest.mark.parametrize(
    "names,complete",
    [
        ((MARKER,), True),
        (("model.safetensors.index.json",), True),
        (("model_0.pt", "optimizer_0.pt"), False),
        (("metadata.pkl.tmp", ".metadata"), False),
        ((f"{MARKER}/inside",), False),
        ((), False),
    ],
)
def test_the_metadata_or_the_index_of_an_export_makes_it_complete(
    names: tuple[str, ...], complete: bool
) -> None:
    assert is_complete(checkpoint(*names), "/run/step-1") is complete


@pytest.mark.parametrize(
    "names,kind",
    [
        (("model_0.pt", "optimizer_0.pt"), Kind.FULL),
        (("model_0.pt", "lr_scheduler_12.pt"), Kind.FULL),
        (("model_0.pt", "model_1.pt"), Kind.MODEL_ONLY),
        # None of these is an item of a state key that this run has.
        (("model_0.pt", "notes_0.pt", "optimizer.pt", "optimizer_0.pt.bak"), Kind.MODEL_ONLY),
        (("model_0.pt", "optimizer_x.pt", "xoptimizer_0.pt", "optimizer_0_pt"), Kind.MODEL_ONLY),
        ((), Kind.MODEL_ONLY),
    ],
)
def test_any_item_beside_the_model_makes_it_full(names: tuple[str, ...], kind: Kind) -> None:
    storage = checkpoint(MARKER, *names)
    assert kind_of(storage, "/run/step-1", OTHERS) is kind
    # A run of a model alone has nothing beside it to miss.
    assert kind_of(storage, "/run/step-1", frozenset()) is Kind.FULL


def test_an_export_in_hugging_face_format_holds_weights() -> None:
    storage = checkpoint("model.safetensors.index.json", "optimizer_0.pt")
    assert kind_of(storage, "/run/step-1", OTHERS) is Kind.MODEL_ONLY


def test_empty_metadata_cannot_be_read_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = checkpoint(MARKER, "optimizer_0.pt", metadata=b"")
    with caplog.at_level(logging.WARNING):
        assert kind_of(storage, "/run/step-1", OTHERS) is Kind.UNREADABLE
        assert kind_of(storage, "/run/step-1", frozenset()) is Kind.UNREADABLE
    texts = {each.getMessage() for each in caplog.records}
    assert texts == {
        "The index /run/step-1/metadata.pkl cannot be read: it is empty. It is left in place."
    }


@pytest.mark.parametrize(
    "storage",
    [FilesystemStorage(), BackendCheckpointStorage(DurableStorageConfig().create_storage())],
)
def test_empty_metadata_on_a_disk_is_found_as_well(storage: MovingStorage, tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    (tmp_path / "optimizer_0.pt").touch()
    assert kind_of(storage, str(tmp_path), OTHERS) is Kind.UNREADABLE
    (tmp_path / MARKER).write_bytes(b"x")
    assert kind_of(storage, str(tmp_path), OTHERS) is Kind.FULL


class FourQuestions:
    """A storage that answers what discovery must know, and cannot measure a file."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.isdir, self.isfile, self.listdir = storage.isdir, storage.isfile, storage.listdir
        self.remove = storage.remove


class MeasuresDirectories(FourQuestions):
    def size_bytes(self, path: str) -> int:
        raise NotADirectoryError(path)


@pytest.mark.parametrize("kind_of_storage", [FourQuestions, MeasuresDirectories])
def test_a_storage_that_cannot_tell_a_size_is_not_asked_for_one(kind_of_storage: Any) -> None:
    storage = kind_of_storage(checkpoint(MARKER, "optimizer_0.pt", metadata=b""))
    assert kind_of(storage, "/run/step-1", OTHERS) is Kind.FULL


def test_the_contents_are_never_read(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_bytes(b"not a pickle")
    (tmp_path / "optimizer_0.pt").touch()
    assert kind_of(FilesystemStorage(), str(tmp_path), OTHERS) is Kind.FULL
