"""What is deleted with a directory, and what stays: nothing that lies elsewhere is ever touched."""

import os
from pathlib import Path

import pytest
from torchtitan.tools import disk, filesystem
from torchtitan.tools.disk import Disk


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "kept").touch()
    return folder


def test_a_link_is_deleted_and_what_it_leads_to_is_not(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "step-1/inside").mkdir(parents=True)
    (tmp_path / "step-1/inside/link").symlink_to(elsewhere)
    (tmp_path / "step-1/nowhere").symlink_to("nothing")
    filesystem.rmtree(str(tmp_path / "step-1"))
    assert os.listdir(tmp_path) == ["elsewhere"] and os.listdir(elsewhere) == ["kept"]


@pytest.mark.parametrize("last", ["", "kept"])
def test_a_link_is_no_directory_to_delete(tmp_path: Path, elsewhere: Path, last: str) -> None:
    (tmp_path / "step-1").symlink_to(elsewhere)
    filesystem.rmtree(str(tmp_path / "step-1"), last=last)
    assert (tmp_path / "step-1").is_symlink() and os.listdir(elsewhere) == ["kept"]
    with pytest.raises(OSError, match="step-1"):
        filesystem.rmtree(str(tmp_path / "step-1"), last=last, strict=True)


def test_a_link_that_comes_in_the_place_of_a_directory_leads_nowhere(
    tmp_path: Path, elsewhere: Path
) -> None:
    inside = tmp_path / "step-1/inside"
    inside.mkdir(parents=True)
    for name in ("kept", "other"):
        (inside / name).touch()

    class Attacked(Disk):
        def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
            if not inside.is_symlink():
                os.rename(inside, tmp_path / "moved")
                inside.symlink_to(elsewhere)
            super().unlink(path, dir_fd=dir_fd)

    with disk.using(Attacked()):
        filesystem.rmtree(str(tmp_path / "step-1"))
    assert os.listdir(tmp_path / "moved") == [], "it is what was being deleted"
    assert os.listdir(elsewhere) == ["kept"]


class Stubborn(Disk):
    """What is called ``protected`` cannot be deleted."""

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        if os.path.basename(path) == "protected":
            raise PermissionError(13, "protected", path)
        super().unlink(path, dir_fd=dir_fd)


def test_it_goes_on_past_what_cannot_be_deleted(tmp_path: Path) -> None:
    for folder in ("step-1", "step-1/a", "step-1/b"):
        (tmp_path / folder).mkdir()
        for name in ("other", "protected", "zero"):
            (tmp_path / folder / name).touch()
    with disk.using(Stubborn()):
        filesystem.rmtree(str(tmp_path / "step-1"))
        left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
        assert left == [
            "step-1",
            "step-1/a",
            "step-1/a/protected",
            "step-1/b",
            "step-1/b/protected",
            "step-1/protected",
        ]
        with pytest.raises(PermissionError, match="protected"):
            filesystem.rmtree(str(tmp_path / "step-1"), strict=True)
    filesystem.rmtree(str(tmp_path / "step-1"), strict=True)
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        filesystem.rmtree(str(tmp_path / "step-1"), strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_what_goes_last_stays_if_something_comes_meanwhile(tmp_path: Path, strict: bool) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name in ("a", "last"):
        (folder / name).touch()

    class Busy(Disk):
        def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
            super().unlink(path, dir_fd=dir_fd)
            (folder / "new").touch()

    with disk.using(Busy()):
        if strict:
            with pytest.raises(OSError, match="not empty"):
                filesystem.rmtree(str(folder), last="last", strict=True)
        else:
            filesystem.rmtree(str(folder), last="last")
    assert sorted(os.listdir(folder)) == ["last", "new"]


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for folder in ("a/b/c", "d"):
        (tmp_path / "step-1" / folder).mkdir(parents=True)
        (tmp_path / "step-1" / folder / "protected").touch()
    with disk.using(Stubborn()):
        filesystem.rmtree(str(tmp_path / "step-1"))
        with pytest.raises(PermissionError):
            filesystem.rmtree(str(tmp_path / "step-1"), strict=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_may_not_be_looked_into_and_is_empty_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **more: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "closed").mkdir()
    # Whoever runs the tests may be allowed everything.
    monkeypatch.setattr(os, "open", refuse)
    filesystem.rmtree(str(tmp_path / "closed"), strict=True)
    assert os.listdir(tmp_path) == []
