"""The same operations on local paths and URIs, and what must be on disk when they return."""

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from torchtitan.tools import disk, filesystem

from tests.unit_tests.noting_disk import NotingDisk
from tests.unit_tests.small_disk import fill, small_disk


@pytest.fixture(params=["local", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An existing empty folder, local or remote."""
    folder = str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    filesystem.makedirs(folder)
    return folder


def write(path: str, data: bytes = b"data") -> None:
    if filesystem.is_remote(path):
        fs, inner = filesystem._resolve(path)
        fs.pipe_file(inner, data)
    else:
        Path(path).write_bytes(data)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that were synced, in order; they still are."""
    seen: list[str] = []
    real = filesystem.fsync_dir

    def record(path: str) -> None:
        seen.append(path)
        real(path)

    monkeypatch.setattr(filesystem, "fsync_dir", record)
    return seen


@pytest.mark.parametrize(
    ("path", "remote"), [("s3://bucket/x", True), ("/a/b", False), ("a:b", False), ("", False)]
)
def test_a_path_is_remote_if_it_names_a_protocol(path: str, remote: bool):
    assert filesystem.is_remote(path) is remote
    assert filesystem.is_remote(Path("/a/b")) is False


def test_join_works_on_each_kind_of_base():
    assert filesystem.join("/out", "checkpoint") == "/out/checkpoint"
    assert filesystem.join("out", "/absolute") == "/absolute"
    assert filesystem.join("s3://bucket/out/", "checkpoint") == "s3://bucket/out/checkpoint"
    assert filesystem.join("/out", "s3://bucket/x") == "s3://bucket/x"


def test_files_and_directories_are_told_apart(base: str):
    folder, file = filesystem.join(base, "folder"), filesystem.join(base, "file")
    filesystem.makedirs(folder)
    filesystem.makedirs(folder)
    write(file)
    for path, is_there, is_dir, is_file in (
        (folder, True, True, False),
        (file, True, False, True),
        (filesystem.join(base, "nothing"), False, False, False),
    ):
        assert filesystem.exists(path) is is_there
        assert filesystem.isdir(path) is is_dir
        assert filesystem.isfile(path) is is_file


def test_listdir_gives_the_names_of_the_children(base: str):
    filesystem.makedirs(filesystem.join(base, "step-1"))
    write(filesystem.join(base, "step-1/inner"))
    write(filesystem.join(base, "file"))
    assert sorted(filesystem.listdir(base)) == ["file", "step-1"]
    assert sorted(filesystem.listdir(base + "/")) == ["file", "step-1"]


def test_a_remote_listing_drops_the_folder_itself_and_keeps_a_child_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
):
    class Bucket:
        def ls(self, path: str, *, detail: bool) -> list[str]:
            assert detail is False
            return ["bucket/run", "bucket/run/", "bucket/run/run", "bucket/run/step-1/"]

    monkeypatch.setattr(filesystem, "_resolve", lambda path: (Bucket(), "bucket/run/"))
    assert filesystem.listdir("s3://bucket/run/") == ["run", "step-1"]


def test_rmtree_removes_everything_and_forgives_a_missing_folder(base: str):
    folder = filesystem.join(base, "folder")
    filesystem.makedirs(folder)
    write(filesystem.join(folder, "file"))
    filesystem.rmtree(folder)
    assert not filesystem.exists(folder)
    filesystem.rmtree(folder)


def test_only_an_empty_folder_is_taken_away_and_nothing_is_known_of_its_name_then(
    tmp_path: Path,
) -> None:
    base, noting = str(tmp_path / "run"), NotingDisk(tmp_path)
    filesystem.makedirs(base)
    write(filesystem.join(base, "file"))
    filesystem.remove_empty(base)
    assert os.listdir(base) == ["file"]
    os.unlink(filesystem.join(base, "file"))
    filesystem.remove_empty(base)
    filesystem.remove_empty(base)  # one that is not there is no error
    assert os.listdir(tmp_path) == []
    os.mkdir(base)  # by another process
    with disk.using(noting):
        filesystem.makedirs(filesystem.join(base, "step-1"))
    assert noting.noted[0] == "sync_directory ."


def test_a_remote_rmtree_raises_whatever_is_not_a_missing_folder(monkeypatch: pytest.MonkeyPatch):
    class Locked:
        def rm(self, path: str, recursive: bool) -> None:
            raise PermissionError(path)

    monkeypatch.setattr(filesystem, "_resolve", lambda path: (Locked(), "x"))
    with pytest.raises(PermissionError):
        filesystem.rmtree("s3://bucket/x")


def test_rename_moves_a_directory_with_what_is_in_it(base: str):
    src, dst = filesystem.join(base, "src"), filesystem.join(base, "dst")
    filesystem.makedirs(src)
    write(filesystem.join(src, "file"))
    filesystem.rename(src, dst)
    assert not filesystem.exists(src)
    assert filesystem.listdir(dst) == ["file"]


def test_a_local_rename_syncs_the_new_folder_before_the_old_one(tmp_path: Path, synced: list[str]):
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "old" / "file").write_bytes(b"x")
    filesystem.rename(str(tmp_path / "old" / "file"), str(tmp_path / "new" / "file"))
    assert synced == [str(tmp_path / "new"), str(tmp_path / "old")]
    synced.clear()
    filesystem.rename(str(tmp_path / "new" / "file"), str(tmp_path / "new" / "other"))
    assert synced == [str(tmp_path / "new")]


def test_a_local_rename_replaces_a_file_but_no_directory_that_holds_something(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        (tmp_path / f"{name}_folder").mkdir()
        (tmp_path / f"{name}_folder" / "file").touch()
    filesystem.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "a"
    with pytest.raises(OSError):
        filesystem.rename(str(tmp_path / "a_folder"), str(tmp_path / "b_folder"))


def test_a_rename_between_local_and_remote_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="one is local and the other remote"):
        filesystem.rename(str(tmp_path), "memory://x")


def test_makedirs_syncs_every_folder_that_got_a_new_name(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(filesystem, "_durable", {str(tmp_path)})
    filesystem.makedirs(str(tmp_path / "a" / "b"))
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    synced.clear()
    filesystem.makedirs(str(tmp_path / "a" / "b"))
    assert synced == []
    monkeypatch.chdir(tmp_path)
    filesystem.makedirs("relative")
    assert [os.path.abspath(path) for path in synced] == [str(tmp_path)]


def test_what_lies_above_a_new_folder_is_synced_once_whoever_has_made_it(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(filesystem, "_durable", {str(tmp_path)})
    folder = tmp_path / "made/by/others"
    folder.mkdir(parents=True)
    for name, seen in [("new", [folder, folder.parent, folder.parent.parent]), ("newer", [folder])]:
        synced.clear()
        filesystem.makedirs(str(folder / name))
        assert sorted(synced) == sorted([*map(str, seen), *([str(tmp_path)] * (name == "new"))])


def test_a_sync_that_failed_is_made_up_for_before_anything_new_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(filesystem, "_durable", {str(tmp_path)})
    real = filesystem.fsync_dir

    def fail(path: str) -> None:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(filesystem, "fsync_dir", fail)
    for name in ("a", "a/b"):
        with pytest.raises(OSError, match="Input/output error"):
            filesystem.makedirs(str(tmp_path / name))
    assert os.listdir(tmp_path / "a") == []
    monkeypatch.setattr(filesystem, "fsync_dir", real)
    filesystem.makedirs(str(tmp_path / "a/b"))


def test_above_what_this_user_may_not_look_into_nothing_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(filesystem, "_durable", set())
    asked: list[str] = []

    def refuse(path: str) -> None:
        asked.append(path)
        if path != str(tmp_path):
            raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(filesystem, "fsync_dir", refuse)
    filesystem.makedirs(str(tmp_path / "new"))
    assert asked == [str(tmp_path.parent), str(tmp_path)]


def test_makedirs_does_not_take_a_file_for_a_folder(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        filesystem.makedirs(str(tmp_path / "file"))


def test_fsync_dir_leaves_no_open_file_even_when_the_sync_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(descriptor: int) -> None:
        raise OSError("disk")

    before = len(os.listdir("/proc/self/fd"))
    filesystem.fsync_dir(str(tmp_path))
    filesystem.fsync_dir("memory://x")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        filesystem.fsync_dir(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_tree_size_counts_the_bytes_of_all_files(base: str):
    filesystem.makedirs(filesystem.join(base, "inner"))
    write(filesystem.join(base, "file"), b"12345")
    write(filesystem.join(base, "inner/file"), b"123")
    assert filesystem.tree_size_bytes(base) == 8
    assert filesystem.tree_size_bytes(filesystem.join(base, "file")) == 5
    with pytest.raises(FileNotFoundError):
        filesystem.tree_size_bytes(filesystem.join(base, "nothing"))


def test_tree_size_stands_files_that_vanish_and_links_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "kept").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    link_bytes = (tmp_path / "link").lstat().st_size
    real_walk = os.walk

    def walk(path: Any) -> Any:
        for folder, folders, names in real_walk(path):
            yield folder, folders, [*names, "deleted-meanwhile"]

    monkeypatch.setattr(os, "walk", walk)
    assert filesystem.tree_size_bytes(str(tmp_path)) == 4 + link_bytes


def test_fsspec_is_imported_for_remote_paths_only():
    code = (
        "import sys; from torchtitan.tools import filesystem as f; f.exists('/'); f.listdir('/'); "
        "assert 'fsspec' not in sys.modules; f.exists('memory://x'); assert 'fsspec' in sys.modules"
    )
    repository = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=repository, check=True, timeout=60)


def test_a_remote_path_without_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        ImportError, match="'s3://b/x' is a remote path and needs the package fsspec"
    ):
        filesystem.exists("s3://b/x")


def test_sizes_of_files_come_with_the_names_that_are_there(base: str):
    folder = filesystem.join(base, "step-10")
    filesystem.makedirs(filesystem.join(folder, "below"))
    write(filesystem.join(folder, "a"), b"12345")
    write(filesystem.join(folder, "below/b"), b"")
    names = ["a", "below/b", "below", "missing", "a/under", "no/such"]
    assert filesystem.file_sizes(folder, names) == {"a": 5, "below/b": 0}
    assert filesystem.file_sizes(filesystem.join(base, "nothing"), names) == {}


def test_sizes_of_many_files_take_one_listing_and_several_questions_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}.data" for number in range(100)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(number))
    pair = threading.Barrier(2)
    stat, scandir, listed, asked = os.stat, os.scandir, list[str](), list[str]()

    def stat_with_another(path: Any, **keywords: Any) -> os.stat_result:
        if str(path).endswith(".data"):
            pair.wait(timeout=30)
            asked.append(os.path.basename(path))
        return stat(path, **keywords)

    def scandir_told(path: str) -> Any:
        listed.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "stat", stat_with_another)
    monkeypatch.setattr(os, "scandir", scandir_told)
    missing = [f"missing-{number}.data" for number in range(3)]
    found = filesystem.file_sizes(str(tmp_path), [*names, *missing])
    assert found == {name: number for number, name in enumerate(names)}
    assert len(listed) == 1 and sorted(asked) == sorted(names)


def test_a_file_is_read_as_it_is_now(base: str):
    path = filesystem.join(base, "file")
    with pytest.raises(FileNotFoundError):
        filesystem.read_bytes(path)
    for content in (b"first", b"", b"\x00\xff"):
        write(path, content)
        assert filesystem.read_bytes(path) == content


def test_a_small_file_is_written_whole_over_an_older_one(base: str) -> None:
    path = filesystem.join(base, "file")
    for content in (b"an older and longer one", b"new"):
        filesystem.write_bytes(path, content)
        assert filesystem.read_bytes(path) == content
    assert filesystem.listdir(base) == ["file"]


def test_a_write_that_is_cut_short_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    path = str(tmp_path / "file")
    filesystem.write_bytes(path, b"older")
    assert synced == [str(tmp_path)]

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        filesystem.write_bytes(path, b"new")
    assert Path(path).read_bytes() == b"older"


def test_a_write_for_which_a_disk_has_no_room_leaves_nothing_new(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        path = str(disk / "file")
        filesystem.write_bytes(path, b"older")
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            filesystem.write_bytes(path, b"new")
        assert Path(path).read_bytes() == b"older"
        assert sorted(filesystem.listdir(str(disk))) == ["ballast", "file"]


def test_no_path_is_no_folder_to_make():
    with pytest.raises(FileNotFoundError):
        filesystem.makedirs("")
