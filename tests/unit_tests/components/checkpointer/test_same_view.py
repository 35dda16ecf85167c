"""What a rank does not see of a checkpoint is named, whatever kind of checkpoint it is."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from torchtitan.components.checkpointer.integrity.digests import digest_of
from torchtitan.components.checkpointer.integrity.manifest import head_of, Manifest
from torchtitan.components.checkpointer.same_view import unseen
from torchtitan.components.checkpointer.storage import FilesystemStorage


def manifest_of(sizes: dict[str, int]) -> Manifest:
    files = {name: digest_of(b"1" * size) for name, size in sizes.items()}
    return Manifest(head_of(1, "full", "dcp", 2, None), files)


def write(folder: Path, sizes: Iterable[tuple[str, int]]) -> str:
    for name, size in sizes:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"1" * size)
    return str(folder)


SIZES = {"a": 5, "b/c": 6, "d": 7}


@pytest.mark.parametrize(
    "there,expected",
    [
        ({**SIZES, "manifest.json": 2}, ""),
        (SIZES, "manifest.json is missing"),
        ({"manifest.json": 2, "a": 5, "b/c": 6}, "d: 7 bytes expected, nothing found"),
        ({**SIZES, "manifest.json": 2, "b/c": 0}, "b/c: 6 bytes expected, 0 found"),
        (
            {"e": 1},
            "manifest.json is missing; a: 5 bytes expected, nothing found; "
            "b/c: 6 bytes expected, nothing found; and 1 more",
        ),
    ],
)
def test_files_that_are_missing_or_short_are_named(
    tmp_path: Path, there: dict[str, int], expected: str
) -> None:
    path = write(tmp_path / "step-1", there.items())
    found = unseen(FilesystemStorage(), path, manifest_of(SIZES), lambda _: True)
    assert found == (expected and f"{path}: {expected}")


@pytest.mark.parametrize("manifest", [None, manifest_of({})], ids=["foreign", "not verified"])
def test_of_files_that_nothing_is_known_of_only_the_index_has_to_be_seen(
    tmp_path: Path, manifest: Manifest | None
) -> None:
    path = str(tmp_path)
    for is_there in (True, False):
        found = unseen(
            FilesystemStorage(),
            path,
            manifest,
            lambda asked, is_there=is_there: is_there and asked == path,
        )
        assert found == ("" if is_there else f"{path}: no index")
