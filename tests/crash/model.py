"""A disk, and what of it would be there again after the power was cut.

What a kill leaves is all that was done: memory of the system outlives a process. What a power cut
leaves is less, and which part is up to the disk. So each directory has names that are durable and
changes of them that are pending, each file has a content and what is durable of it, and any part of
the pending changes may be there afterwards that is closed in itself.

    operations -> DiskModel.apply -> DiskModel.tree -> points.py

Assumed of the disk:

1.  What an operation has done is seen by all processes at once, and no kill undoes it. A kill in the
    middle of a write leaves its beginning; any other operation is done or not.
2.  A file's content is durable once the file was synced, as far as it had been written by then. That
    makes none of its names durable, nor a directory above it. (For a new file ext4, xfs and btrfs do
    more than that; POSIX does not promise it.)
3.  What was written and not synced may be lost, be there in part from its beginning, or be there as
    zeros of the full length. What was emptied to be written anew may also hold what it held before.
    What was synced is not harmed by what is appended. Zeros stand for anything else of that length
    that a disk may show instead, such as old blocks with ext4's data=writeback.
4.  The names in a directory are durable once the directory was synced. That makes no name of the
    directory itself durable, nor a name inside of a directory below it, nor the content of a file.
5.  A change of names that was not synced is durable or not as a whole. A rename inside of one
    directory is one change: there is the old name or the new one, and what the new one stood for
    before is there until then. Nobody ever sees neither. (Journals keep this; FAT and ext2 do not.)
6.  A rename from one directory to another is two changes. The new name may be durable while the old
    one still is too; the loss of the old one is not durable without the new one, also if only the
    directory of the old one was synced. (With a journal it is one change; this is less.)
7.  Changes that were not synced become durable in any order, except two of the same name in one
    directory, and except the two halves of a rename. (With a journal they do so in their order, and a
    sync of anything takes all earlier ones along. Nothing here may rely on it.)
8.  A name that is durable leads to something that is there, be it empty. What is in a directory to
    which no durable name leads is gone, synced or not, and so is what was moved into it.
9.  A sync that returned has done what it says: neither the system nor the cache of the disk lies. One
    that failed has done nothing. Linux may take a later sync of the same file for done after that, so
    nobody may try a second time; who does is not found out here.
10. What was synced stays: no block decays. Damaged contents are a matter of the digests.
11. All that was not synced is lost at once, for all ranks. Where they are on several machines with one
    disk, a cut that takes one of them takes less. What another machine has cached of a network file
    system (close-to-open) is not in here: after a sync it is taken for a disk like this.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from tests.crash.inodes import Change, DirectoryInode, FileInode, Inode, LinkInode
from tests.crash.operations import Kind, Operation
from tests.crash.tree import Directory, EMPTY, File, Link, Node, Tree

Contents = Callable[[FileInode], bytes]


def as_written(file: FileInode) -> bytes:
    return file.written


def as_synced(file: FileInode) -> bytes:
    return file.synced


class DiskModel:
    """A disk that begins as ``start``, all of it durable, and on which operations happen."""

    def __init__(self, start: Tree = EMPTY) -> None:
        self._nodes: dict[object, Node] = {}
        self._numbers = 0
        self._handles: dict[tuple[int, str], FileInode] = {}
        self.pending: dict[int, Change] = {}
        """In the order in which they happened."""
        self.unsynced: dict[FileInode, str] = {}
        """Files with a content that is not durable, and the name that they were created with."""
        self.root = self._begin(start, "", {})

    def apply(self, operation: Operation) -> None:
        """Let ``operation`` happen; raises ValueError if it cannot."""
        match operation.kind:
            case Kind.CREATE:
                self._create(operation)
            case Kind.WRITE | Kind.SYNC:
                self._write_or_sync(operation)
            case Kind.SYNC_DIRECTORY:
                self.make_durable(self._directory(operation.path, operation))
            case Kind.MKDIR:
                self._add(operation, DirectoryInode(operation.path))
            case Kind.SYMLINK:
                self._add(operation, LinkInode(operation.target))
            case Kind.LINK:
                self._link(operation)
            case Kind.RENAME:
                self._rename(operation)
            case Kind.UNLINK | Kind.RMDIR:
                self._delete(operation)
            case Kind.NOTE:
                pass
            case _:
                _impossible(operation, "a disk has no such operation")

    def tree(self, contents: Contents = as_written, changes: Collection[int] | None = None) -> Tree:
        """The disk with each file as ``contents`` has it.

        Args:
            changes: which pending changes of names there are; None for all names as they are now.
        """
        if changes is None:
            return self._tree(self.root, contents, lambda directory: directory.names, {})
        # By their numbers, which is the order in which they happened.
        names: dict[DirectoryInode, dict[str, Inode]] = {}
        for number in sorted(changes):
            change = self.pending[number]
            if change.directory not in names:
                names[change.directory] = dict(change.directory.durable)
            _apply_to(names[change.directory], change)
        return self._tree(
            self.root,
            contents,
            lambda directory: names.get(directory, directory.durable),
            {},
        )

    def closed(self, changes: Collection[int]) -> set[int]:
        """Pending ``changes`` with all that they need."""
        needed = set(changes)
        for number in changes:
            needed |= self.pending[number].needs
        return needed & self.pending.keys()

    def make_durable(self, directory: DirectoryInode) -> None:
        """The names in ``directory``, as a sync of it does."""
        own = [number for number, each in self.pending.items() if each.directory is directory]
        for number in sorted(self.closed(own)):
            change = self.pending.pop(number)
            _apply_to(change.directory.durable, change)
        self._forget()

    def file_of(self, operation: Operation) -> FileInode:
        """What a write or a sync is of."""
        # An open file is the same one whatever has become of its name.
        inode: Inode | None = self._handles.get((operation.rank, operation.path))
        if inode is None:
            directory, name = self._place(operation.path, operation)
            inode = directory.names.get(name)
        if not isinstance(inode, FileInode):
            _impossible(operation, f"there is no file at {operation.path!r}")
        return inode

    def durable_directories(self) -> set[DirectoryInode]:
        """Those that a durable name leads to from the root."""
        found: set[DirectoryInode] = set()
        new = [self.root]
        while new:
            directory = new.pop()
            if directory not in found:
                found.add(directory)
                new += (
                    each for each in directory.durable.values() if isinstance(each, DirectoryInode)
                )
        return found

    # Names

    def _directory(self, path: str, operation: Operation) -> DirectoryInode:
        inode: Inode | None = self.root
        for name in path.split("/") if path else ():
            if not isinstance(inode, DirectoryInode):
                break
            inode = inode.names.get(name)
        if isinstance(inode, DirectoryInode):
            return inode
        _impossible(operation, f"{path!r} is no directory")

    def _place(self, path: str, operation: Operation) -> tuple[DirectoryInode, str]:
        above, _, name = path.rpartition("/")
        if not name:
            _impossible(operation, "the root is not to be changed")
        return self._directory(above, operation), name

    def _add(self, operation: Operation, inode: Inode) -> None:
        directory, name = self._place(operation.path, operation)
        if name in directory.names:
            _impossible(operation, f"there is something at {operation.path!r}")
        self._change(directory, {name: inode}, str(operation))

    def _link(self, operation: Operation) -> None:
        source, old = self._place(operation.path, operation)
        directory, new = self._place(operation.target, operation)
        inode = source.names.get(old)
        if not isinstance(inode, FileInode) or new in directory.names:
            _impossible(operation, "it takes a file and a name that is free")
        self._has_several_names(inode)
        self._change(directory, {new: inode}, str(operation))

    def _rename(self, operation: Operation) -> None:
        source, old = self._place(operation.path, operation)
        directory, new = self._place(operation.target, operation)
        inode, replaced = source.names.get(old), directory.names.get(new)
        if inode is None:
            _impossible(operation, f"there is nothing at {operation.path!r}")
        if inode is replaced:
            return  # so POSIX has it: both names stay
        if isinstance(inode, DirectoryInode) and f"{operation.target}/".startswith(
            f"{operation.path}/"
        ):
            _impossible(operation, "a directory cannot be inside of itself")
        if replaced is not None:
            if isinstance(inode, DirectoryInode) != isinstance(replaced, DirectoryInode):
                _impossible(operation, "a directory and something else cannot replace each other")
            if isinstance(replaced, DirectoryInode) and replaced.names:
                _impossible(operation, f"{operation.target!r} is not empty")
        if source is directory:
            self._change(directory, {old: None, new: inode}, str(operation))
            return
        if isinstance(inode, FileInode):
            self._has_several_names(inode)  # as both may be durable for a while
        added = self._change(directory, {new: inode}, f"{operation}, the new name")
        self._change(source, {old: None}, f"{operation}, the loss of the old name", added)

    def _delete(self, operation: Operation) -> None:
        directory, name = self._place(operation.path, operation)
        inode = directory.names.get(name)
        is_directory = isinstance(inode, DirectoryInode)
        if inode is None or is_directory != (operation.kind is Kind.RMDIR):
            _impossible(operation, "there is no such thing with this name")
        if isinstance(inode, DirectoryInode) and inode.names:
            _impossible(operation, f"it holds {sorted(inode.names)}")
        self._change(directory, {name: None}, str(operation))

    def _change(
        self,
        directory: DirectoryInode,
        effect: Mapping[str, Inode | None],
        words: str,
        also_needs: int | None = None,
    ) -> int:
        """Change names now, for good once this is synced; the number of the change."""
        self._numbers += 1
        direct = {directory.last_changes[name] for name in effect if name in directory.last_changes}
        if also_needs is not None:
            direct.add(also_needs)
        direct &= self.pending.keys()
        needs = direct.union(*(self.pending[number].needs for number in direct))
        change = Change(self._numbers, directory, effect, frozenset(needs), words)
        for name, inode in effect.items():
            _count(directory.names.get(name), -1)
            _count(inode, +1)
            directory.last_changes[name] = self._numbers
        _apply_to(directory.names, change)
        self.pending[self._numbers] = change
        return self._numbers

    def _forget(self) -> None:
        """What no crash brings back: a directory was deleted durably, and all in it with it."""
        found: set[Inode] = set()
        new: list[Inode] = [self.root]
        effects: dict[DirectoryInode, list[Inode]] = {}
        for change in self.pending.values():
            own = effects.setdefault(change.directory, [])
            own += (inode for inode in change.effect.values() if inode is not None)
        while new:
            inode = new.pop()
            if inode not in found:
                found.add(inode)
                if isinstance(inode, DirectoryInode):
                    new += (*inode.names.values(), *inode.durable.values())
                    new += effects.get(inode, ())
        gone = [number for number, each in self.pending.items() if each.directory not in found]
        for number in gone:
            del self.pending[number]
        for file in [each for each in self.unsynced if each not in found]:
            del self.unsynced[file]

    def _has_several_names(self, file: FileInode) -> None:
        self._numbers += 1
        file.number = file.number or self._numbers

    # Contents

    def _create(self, operation: Operation) -> None:
        directory, name = self._place(operation.path, operation)
        inode = directory.names.get(name)
        if inode is None:
            inode = FileInode()
            self._change(directory, {name: inode}, str(operation))
        elif not isinstance(inode, FileInode):
            _impossible(operation, f"there is something else at {operation.path!r}")
        elif inode.written:
            inode.written = b""
            # What never was durable does not come back.
            inode.is_emptied = bool(inode.synced)
            self._note_unsynced(inode, operation.path)
        self._handles[operation.rank, operation.path] = inode

    def _write_or_sync(self, operation: Operation) -> None:
        inode = self.file_of(operation)
        if operation.kind is Kind.WRITE:
            inode.written += operation.content
        else:
            inode.synced, inode.is_emptied = inode.written, False
        self._note_unsynced(inode, operation.path)

    def _note_unsynced(self, file: FileInode, path: str) -> None:
        if file.is_synced:
            self.unsynced.pop(file, None)
        else:
            self.unsynced[file] = path

    # From and to trees

    def _begin(self, tree: Tree, path: str, files: dict[int, FileInode]) -> DirectoryInode:
        directory = DirectoryInode(path)
        for name, node in tree.entries.items():
            inode: Inode
            match node:
                case Directory():
                    inode = self._begin(node, f"{path}/{name}".lstrip("/"), files)
                case Link(target=target):
                    inode = LinkInode(target)
                case File(content=content, number=number):
                    inode = files.get(number) or FileInode(content, content)
                    if number:
                        files[number] = inode
                        self._has_several_names(inode)
            _count(inode, +1)
            directory.names[name] = inode
        directory.durable = dict(directory.names)
        return directory

    def _tree(
        self,
        directory: DirectoryInode,
        contents: Contents,
        names: Callable[[DirectoryInode], Mapping[str, Inode]],
        made: dict[DirectoryInode, Directory],
    ) -> Directory:
        # A directory that is moved into what was in it before may for a moment be in itself.
        made[directory] = EMPTY
        entries: dict[str, Node] = {}
        for name, inode in names(directory).items():
            if isinstance(inode, FileInode):
                content = contents(inode)
                key: object = (content, inode.number)
                if (node := self._nodes.get(key)) is None:
                    node = self._nodes[key] = File(content, inode.number)
            elif isinstance(inode, DirectoryInode):
                node = made.get(inode) or self._tree(inode, contents, names, made)
            elif (node := self._nodes.get(inode)) is None:
                node = self._nodes[inode] = Link(inode.target)
            entries[name] = node
        key = frozenset(entries.items())
        found = self._nodes.get(key)
        if not isinstance(found, Directory):
            found = self._nodes[key] = Directory(entries)
        made[directory] = found
        return found


def _apply_to(names: dict[str, Inode], change: Change) -> None:
    for name, inode in change.effect.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _count(inode: Inode | None, difference: int) -> None:
    if isinstance(inode, FileInode):
        inode.num_names += difference


def _impossible(operation: Operation, why: str) -> NoReturn:
    raise ValueError(f"the history cannot have gone so: {operation}: {why}")
