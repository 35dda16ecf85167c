"""Every state in which a crash may leave a disk, after each operation of a history.

A state is named by how it came about, ``family`` or ``family: what in particular``. One that equals an
earlier one, with the same said about the history so far, is not given again.

    operations -> DiskModel -> crash_states -> crash_points -> lay_out -> checking.py
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tests.crash.inodes import Change, DirectoryInode, FileInode
from tests.crash.model import as_synced, as_written, Contents, DiskModel
from tests.crash.operations import Kind, MEET, Operation
from tests.crash.tree import Directory, EMPTY, File, Tree

KILLED = "killed"
TORN = "torn"
DATA_LOST = "data lost"
NAMES_LOST = "names lost"
REORDERED = "reordered"
FAMILIES = (KILLED, TORN, DATA_LOST, NAMES_LOST, REORDERED)


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """What a crash leaves after one operation."""

    number: int
    """So many operations of the history had happened, notes counted."""
    operation: Operation
    """The last of them."""
    variant: str
    tree: Tree
    notes: tuple[Operation, ...]
    """What had been said by then, in order; without that ranks met."""

    @property
    def family(self) -> str:
        return family_of(self.variant)

    def __str__(self) -> str:
        return f"after operation {self.number} ({self.operation}), {self.variant}"


def family_of(variant: str) -> str:
    return variant.partition(":")[0]


def crash_points(
    operations: Iterable[Operation],
    start: Tree = EMPTY,
    seen: set[object] | None = None,
    first: int = 1,
) -> Iterator[CrashPoint]:
    """The states that crashes leave of a history that begins with the disk as ``start``.

    Args:
        seen: what was given already, of another order of the same operations; added to.
        first: crashes right after this operation or later ones; the first of all is 1.
    """
    model = DiskModel(start)
    history = _History(set() if seen is None else seen)
    for number, operation in enumerate(operations, start=1):
        model.apply(operation)
        if history.tells_nothing(operation) or number < first:
            continue
        for variant, tree in crash_states(model, operation):
            if history.is_new(tree):
                yield CrashPoint(number, operation, variant, tree, history.notes)


def object_store_points(
    operations: Iterable[Operation], start: Tree = EMPTY, seen: set[object] | None = None
) -> Iterator[CrashPoint]:
    """The same for a store whose puts and deletes are durable at once and in order, and never torn."""
    objects = dict(_files(start, ""))
    history = _History(set() if seen is None else seen)
    for number, operation in enumerate(operations, start=1):
        match operation.kind:
            case Kind.PUT:
                objects[operation.path] = File(operation.content)
            case Kind.DELETE:
                objects.pop(operation.path, None)
            case Kind.NOTE:
                pass
            case _:
                raise ValueError(f"an object store has no such operation: {operation}")
        if not history.tells_nothing(operation) and history.is_new(tree := _tree_of(objects)):
            yield CrashPoint(number, operation, KILLED, tree, history.notes)


def crash_states(model: DiskModel, last: Operation | None = None) -> Iterator[tuple[str, Tree]]:
    """How a crash may leave ``model`` just after its ``last`` operation; some may be equal."""
    yield KILLED, model.tree()
    if last is not None and last.kind is Kind.WRITE:
        yield from _torn(model, last)
    # A file without a name is gone however much of it was synced.
    unsynced = {file: path for file, path in model.unsynced.items() if file.num_names}
    if unsynced:
        yield from _data_lost(model, unsynced)
    if model.pending:
        several_contents = [("", as_synced)]
        if model.unsynced:
            several_contents.append((", with all that was written", as_written))
        for words, contents in several_contents:
            yield f"{NAMES_LOST}: all{words}", model.tree(contents, ())
            for variant, changes in _parts(model):
                yield f"{variant}{words}", model.tree(contents, changes)


def _torn(model: DiskModel, last: Operation) -> Iterator[tuple[str, Tree]]:
    """The last write in part, all else as it was done: what a kill in the middle of it leaves."""
    file = model.file_of(last)
    before = len(file.written) - len(last.content)
    for words, size in (("half", before + len(last.content) // 2), ("nothing", before)):
        content = file.written[:size]
        yield f"{TORN}: {words}", model.tree(_for_one(file, content, as_written))


def _data_lost(model: DiskModel, unsynced: dict[FileInode, str]) -> Iterator[tuple[str, Tree]]:
    """All names as they are now, contents less."""
    for words, contents in (
        ("all", as_synced),
        ("zeros", _zeros),
        ("half", _half),
        ("emptied", lambda file: file.written if file.is_synced else file.kept),
    ):
        yield f"{DATA_LOST}: {words}", model.tree(contents)
    if len(unsynced) > 1:
        for file, path in unsynced.items():
            lost = _for_one(file, file.synced, as_written)
            yield f"{DATA_LOST}: of {path} alone", model.tree(lost)
            kept = _for_one(file, file.written, as_synced)
            yield f"{DATA_LOST}: all but that of {path}", model.tree(kept)


def _for_one(file: FileInode, content: bytes, others: Contents) -> Contents:
    return lambda each: content if each is file else others(each)


def _zeros(file: FileInode) -> bytes:
    if file.is_synced:
        return file.written
    return file.kept + bytes(len(file.written) - len(file.kept))


def _half(file: FileInode) -> bytes:
    if file.is_synced:
        return file.written
    return file.written[: (len(file.kept) + len(file.written)) // 2]


def _parts(model: DiskModel) -> Iterator[tuple[str, set[int]]]:
    """Parts of the pending changes of names that may be durable without the rest."""
    pending = model.pending
    leads_to = _Ways(model)
    numbers = list(pending)
    # As a journal has it: they become durable in order.
    for count in range(1, len(numbers)):
        first = model.closed(numbers[:count])
        yield f"{NAMES_LOST}: the last {len(numbers) - count} of {len(numbers)}", first
    for number, change in pending.items():
        yield f"{REORDERED}: only {change.words}", leads_to.with_ways(model.closed([number]))
        yield f"{REORDERED}: all but {change.words}", _without(pending, {number})
    in_directories: dict[DirectoryInode, set[int]] = {}
    for number, change in pending.items():
        in_directories.setdefault(change.directory, set()).add(number)
    if len(in_directories) > 1:
        for directory, own in in_directories.items():
            where = f"what is in {directory.path or 'the root'}"
            yield f"{REORDERED}: only {where}", leads_to.with_ways(model.closed(own))
            yield f"{REORDERED}: all but {where}", _without(pending, own)


def _without(pending: dict[int, Change], left_out: set[int]) -> set[int]:
    """All changes but these and those that need one of them."""
    return {
        number
        for number, change in pending.items()
        if number not in left_out and left_out.isdisjoint(change.needs)
    }


class _Ways:
    """Which changes a directory needs to be found at all."""

    def __init__(self, model: DiskModel) -> None:
        self._model = model
        self._durable = model.durable_directories()

    def with_ways(self, changes: set[int]) -> set[int]:
        """``changes``, and what leads to the directories that they are in.

        Without that they could not be told from nothing, as the directory is gone with all in it.
        """
        found = set(changes)
        looked_at: set[int] = set()
        while missing := found - looked_at:
            looked_at |= missing
            for number in missing:
                directory = self._model.pending[number].directory
                if directory not in self._durable:
                    found |= self._way_to(directory)
        return found

    def _way_to(self, directory: DirectoryInode) -> set[int]:
        pending = self._model.pending
        adding = (
            number
            for number in reversed(pending)
            if any(inode is directory for inode in pending[number].effect.values())
        )
        return self._model.closed(list(islice(adding, 1)))


@dataclass(slots=True)
class _History:
    """What has been said so far, and which states were given."""

    seen: set[object]
    notes: tuple[Operation, ...] = ()
    _said: str = field(default="", init=False)

    def tells_nothing(self, operation: Operation) -> bool:
        """Take a note in; whether nothing has changed by ``operation``, for whoever judges the disk."""
        if operation.kind is not Kind.NOTE:
            return False
        if operation.path == MEET:
            return True
        self.notes += (operation,)
        # Which of two ranks said something first means nothing. As text, of which a hash is kept.
        self._said = repr(sorted(self.notes, key=lambda each: each.rank))
        return False

    def is_new(self, tree: Tree) -> bool:
        key = (tree.digest, self._said)
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


def _files(directory: Directory, above: str) -> Iterator[tuple[str, File]]:
    for name, node in directory.entries.items():
        if isinstance(node, File):
            yield f"{above}{name}", node
        elif isinstance(node, Directory):
            yield from _files(node, f"{above}{name}/")


def _tree_of(objects: dict[str, File]) -> Tree:
    """Folders as a listing shows them: there is none without an object in it."""
    values: dict[str, Any] = {}
    for path, file in objects.items():
        *folders, name = path.split("/")
        inside = values
        for folder in folders:
            inside = inside.setdefault(folder, {})
        inside[name] = file
    return _directory_of(values)


def _directory_of(values: dict[str, Any]) -> Directory:
    return Directory(
        {
            name: _directory_of(value) if isinstance(value, dict) else value
            for name, value in values.items()
        }
    )
