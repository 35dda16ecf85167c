"""The model beside a real folder, with operations chosen at random, and trees laid out on it."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings, strategies as st

from tests.crash.model import as_synced, DiskModel
from tests.crash.operations import Kind, Operation
from tests.crash.points import crash_states
from tests.crash.tree import from_values, lay_out, Link, read_tree, to_values, Tree

# Few of them, so that operations meet.
names = st.sampled_from("abc")
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
kinds = st.sampled_from([kind for kind in Kind if kind not in (Kind.PUT, Kind.DELETE, Kind.NOTE)])
operations = st.builds(
    Operation, st.just(0), kinds, paths, paths, st.binary(min_size=1, max_size=3)
)
contents = st.binary(max_size=5)
trees = st.recursive(
    st.dictionaries(names, contents | st.just(Link("nowhere")), max_size=3),
    lambda inside: st.dictionaries(names, inside | contents, max_size=3),
    max_leaves=8,
).map(from_values)


class RealFolder:
    """Does what an operation says, as far as the system lets it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._open: dict[str, BinaryIO] = {}

    def does(self, operation: Operation) -> bool:
        """Do it; whether it could be done."""
        path = self.folder / operation.path
        act: dict[Kind, Callable[[], object]] = {
            Kind.CREATE: lambda: self._create(operation.path),
            Kind.WRITE: lambda: self._open[operation.path].write(operation.content),
            Kind.SYNC: lambda: self._open[operation.path],
            Kind.SYNC_DIRECTORY: lambda: os.listdir(path),
            Kind.MKDIR: path.mkdir,
            Kind.RENAME: lambda: path.rename(self.folder / operation.target),
            Kind.LINK: lambda: os.link(path, self.folder / operation.target),
            Kind.SYMLINK: lambda: path.symlink_to(operation.target),
            Kind.UNLINK: path.unlink,
            Kind.RMDIR: path.rmdir,
        }
        try:
            act[operation.kind]()
        except (OSError, KeyError):
            return False
        return True

    def _create(self, path: str) -> None:
        # Not buffered: what is written is seen at once.
        file = self._stack.enter_context(open(self.folder / path, "wb", buffering=0))
        self._open[path] = file

    def leads_through_a_link(self, operation: Operation) -> bool:
        """The disk would follow it, and nothing that is recorded does so."""
        follows = [str(Path(operation.path).parent), str(Path(operation.target).parent)]
        if operation.kind in (Kind.CREATE, Kind.LINK, Kind.SYNC_DIRECTORY):
            follows.append(operation.path)
        steps = (path.split("/") for path in follows)
        return any(
            (self.folder / "/".join(each[:count])).is_symlink()
            for each in steps
            for count in range(1, len(each) + 1)
        )


def model_accepts(model: DiskModel, operation: Operation) -> bool:
    try:
        model.apply(operation)
    except ValueError:
        return False
    return True


def sync_all(model: DiskModel) -> None:
    """As if every file and then every directory had been synced."""
    for file in list(model.unsynced):
        file.synced, file.is_emptied = file.written, False
    model.unsynced.clear()
    while model.pending:
        model.make_durable(next(iter(model.pending.values())).directory)


@settings(max_examples=120)
@given(trees, st.lists(operations, max_size=40))
def test_the_model_does_what_a_disk_does_and_refuses_what_it_refuses(
    tmp_path_factory: pytest.TempPathFactory, start: Tree, history: list[Operation]
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    lay_out(start, folder)
    model = DiskModel(start)
    with ExitStack() as stack:
        real = RealFolder(folder, stack)
        for operation in history:
            if real.leads_through_a_link(operation):
                continue
            done = real.does(operation)
            # A disk may write to and sync files that were open before; here there are none.
            if operation.kind in (Kind.WRITE, Kind.SYNC) and not done:
                continue
            assert model_accepts(model, operation) == done, operation
        killed = dict(crash_states(model))["killed"]
        assert to_values(killed) == to_values(read_tree(folder))
        assert killed.digest == read_tree(folder).digest


@settings(max_examples=80)
@given(trees, st.lists(operations, max_size=40))
def test_what_was_synced_is_all_that_can_be_there(start: Tree, history: list[Operation]) -> None:
    model = DiskModel(start)
    for operation in history:
        model_accepts(model, operation)
    now = model.tree()
    sync_all(model)
    assert to_values(model.tree(as_synced, ())) == to_values(now)
    assert [to_values(tree) for _, tree in crash_states(model)] == [to_values(now)]


@settings(max_examples=60)
@given(trees, st.lists(operations, max_size=25))
def test_a_state_is_laid_out_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, start: Tree, history: list[Operation]
) -> None:
    model = DiskModel(start)
    done = [operation for operation in history if model_accepts(model, operation)]
    states = {tree.digest: tree for _, tree in crash_states(model, done[-1] if done else None)}
    folder = tmp_path_factory.mktemp("states")
    for number, tree in enumerate(states.values()):
        lay_out(tree, folder / str(number))
        assert read_tree(folder / str(number)).digest == tree.digest
        # Nodes are shared with other states, and no digest may be one of another content.
        assert from_values(links_kept(tree)).digest == tree.digest


def links_kept(tree: Tree) -> dict[str, object]:
    """As plain values, of which a tree can be made again."""
    return {
        name: (
            node
            if isinstance(node, Link)
            else links_kept(node) if isinstance(node, Tree) else node.content
        )
        for name, node in tree.entries.items()
    }


def test_names_of_one_file_are_laid_out_as_names_of_one_file(tmp_path: Path) -> None:
    model = DiskModel(from_values({"a": b"x", "d": {}, "other": b"x"}))
    model.apply(Operation(0, Kind.LINK, "a", "d/b"))
    lay_out(model.tree(), tmp_path / "one")
    assert os.path.samefile(tmp_path / "one" / "a", tmp_path / "one" / "d" / "b")
    assert not os.path.samefile(tmp_path / "one" / "a", tmp_path / "one" / "other")
    # And they are read back as that, and begin so in a model.
    again = DiskModel(read_tree(tmp_path / "one"))
    again.apply(Operation(0, Kind.CREATE, "a"))
    assert to_values(again.tree()) == {"a": b"", "d": {"b": b""}, "other": b"x"}


def test_a_tree_is_shown_a_line_for_each_entry() -> None:
    tree = from_values({"s": {"f": b"abc", "z": bytes(8)}, "l": Link("s/f"), "e": {}})
    lines = str(tree).splitlines()
    assert [line.split()[0] for line in lines] == ["e/", "l", "s/", "s/f", "s/z"]
    assert lines[1] == "l -> s/f"
    assert lines[3].startswith("s/f  3 bytes, ")
    assert lines[4].startswith("s/z  8 bytes, all zeros, ")
    assert str(from_values({})) == "(nothing)"


@pytest.mark.parametrize(
    "other",
    [{"a": b"y"}, {"b": b"x"}, {}, {"a": {}}, {"a": Link("x")}, {"a": b"x", "b": b""}],
)
def test_another_tree_has_another_digest(other: dict[str, object]) -> None:
    assert from_values({"a": b"x"}).digest != from_values(other).digest
