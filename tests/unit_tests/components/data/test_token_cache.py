import json
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from torchtitan.components.data.array_cache import cache_root, write_problem
from torchtitan.components.data.token_cache import Document, open_or_build, open_store, TokenStore

from tests.ranks.pool import PRELOADED

DTYPE = np.dtype(np.uint16)
DOCUMENTS = [[1, 5, 2], [1, 6, 7, 8, 2], [1, 2]]


def documents() -> Iterator[Document]:
    return ((np.array(document), None) for document in DOCUMENTS)


def never_called() -> Iterator[Document]:
    raise AssertionError("the cache was there already")


def assert_holds_documents(store: TokenStore) -> None:
    assert store.tokens.tolist() == [token for document in DOCUMENTS for token in document]
    assert store.starts.tolist() == [0, 2, 6, 7]
    assert (store.num_documents, store.num_inputs) == (3, 7)


def build_at_once(root: Path, parent: Connection) -> None:
    """Tell the parent whether this process was the one to build, once it lets go."""
    built = False

    def watched_documents() -> Iterator[Document]:
        nonlocal built
        built = True
        return documents()

    parent.send("ready")
    parent.recv()
    assert_holds_documents(open_or_build(root, "key", DTYPE, watched_documents))
    parent.send(built)


def build_halfway(root: Path, parent: Connection) -> None:
    """Write one document, say so, and wait for the end."""

    def endless_documents() -> Iterator[Document]:
        yield np.array(DOCUMENTS[0]), None
        parent.send("halfway")
        parent.recv()

    open_or_build(root, "key", DTYPE, endless_documents)


def start(target: Callable[..., None], root: Path) -> tuple[BaseProcess, Connection]:
    # The server imports what all processes need, once; it has no effect where one runs already.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "torchtitan.components.data"])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(root, theirs))
    process.start()
    return process, ours


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    started = [start(build_at_once, tmp_path) for _ in range(2)]
    assert [pipe.recv() for _, pipe in started] == ["ready", "ready"]
    for _, pipe in started:
        pipe.send("go")
    assert sorted(pipe.recv() for _, pipe in started) == [False, True]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path) -> None:
    process, pipe = start(build_halfway, tmp_path)
    assert pipe.recv() == "halfway"
    process.kill()
    process.join()
    assert list((tmp_path / "tokens").glob("key.building-*"))

    assert_holds_documents(open_or_build(tmp_path, "key", DTYPE, documents))
    assert not list((tmp_path / "tokens").glob("key.building-*"))


def test_a_cache_is_made_once_and_then_only_read(tmp_path: Path) -> None:
    assert_holds_documents(open_or_build(tmp_path, "key", DTYPE, documents))
    store = open_or_build(tmp_path, "key", DTYPE, never_called)
    assert_holds_documents(store)
    assert store.tokens.dtype == np.uint16
    assert not store.tokens.flags.writeable


def test_large_ids_are_kept(tmp_path: Path) -> None:
    store = open_or_build(
        tmp_path, "key", np.dtype(np.uint32), lambda: iter([(np.array([1, 128_255]), None)])
    )
    assert store.tokens.tolist() == [1, 128_255]


def _truncate(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(file.seek(0, 2) - 1)

    return damage


def _lengthen(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(bytes(2))

    return damage


def _change_header(**values: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        header = json.loads((folder / "header.json").read_text())
        (folder / "header.json").write_text(json.dumps(header | values))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _truncate("tokens.bin"),
        _truncate("starts.bin"),
        _truncate("header.json"),
        _lengthen("tokens.bin"),
        lambda folder: (folder / "header.json").unlink(),
        lambda folder: (folder / "tokens.bin").unlink(),
        lambda folder: (folder / "starts.bin").write_bytes(bytes(32)),
        _change_header(format="torchtitan-tokens-0"),
        _change_header(arrays={"tokens": {"dtype": "uint16", "length": "three"}}),
        _change_header(arrays={"tokens": {"dtype": "no type", "length": 10}}),
        _change_header(arrays={}),
        _change_header(notes={}),
    ],
    ids=[
        "short tokens",
        "short starts",
        "short header",
        "long tokens",
        "no header",
        "no tokens",
        "zeroed starts",
        "other format",
        "odd number",
        "odd type",
        "no arrays",
        "no notes",
    ],
)
def test_a_damaged_cache_is_said_and_made_anew(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    open_or_build(tmp_path, "key", DTYPE, documents)
    damage(tmp_path / "tokens/key")
    assert_holds_documents(open_or_build(tmp_path, "key", DTYPE, documents))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{tmp_path}/tokens/key is damaged" in line and "made anew" in line


def test_a_failure_while_building_leaves_no_cache(tmp_path: Path) -> None:
    def failing() -> Iterator[Document]:
        yield np.array(DOCUMENTS[0]), None
        raise ValueError("broken document")

    with pytest.raises(ValueError, match="broken document"):
        open_or_build(tmp_path, "key", DTYPE, failing)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] in ([], ["key.lock"])
    with pytest.raises(FileNotFoundError):
        open_store(tmp_path / "tokens/key")
    assert_holds_documents(open_or_build(tmp_path, "key", DTYPE, documents))


def test_a_folder_that_cannot_be_written_is_refused_before_any_document(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file/below"):
        assert "--dataloader.cache_dir" in (write_problem(root) or "")
        with pytest.raises(ValueError, match="--dataloader.cache_dir or TORCHTITAN_CACHE_DIR"):
            open_or_build(root, "key", DTYPE, never_called)
    assert write_problem(tmp_path / "new/deep") is None
    assert not (tmp_path / "new").exists()


def test_the_cache_lies_where_flag_and_environment_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("TORCHTITAN_CACHE_DIR", "~/own")
    assert cache_root("/flag") == Path("/flag")
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("TORCHTITAN_CACHE_DIR")
    assert cache_root() == Path("/xdg/torchtitan")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == tmp_path / ".cache/torchtitan"


def test_a_full_disk_is_named_with_the_folder(tmp_path: Path) -> None:
    def endless() -> Iterator[Document]:
        while True:
            yield np.ones(10_000, dtype=np.int64), None

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As near to a full disk as a test can come without one.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            ValueError, match=f"token cache in {tmp_path}: .*--dataloader.cache_dir"
        ):
            open_or_build(tmp_path, "key", DTYPE, endless)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] in ([], ["key.lock"])
