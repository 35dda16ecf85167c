"""What writes checkpoints changes a disk through ``tools/disk.py`` and in no other way.

Else the crash tests would look at a part of what happens, and never say so.
"""

import ast

import pytest

from tests.unit_tests.structure.sources import ROOT, tracked_files

FILES = [
    "torchtitan/tools/filesystem.py",
    *tracked_files("torchtitan/components/checkpointer/*.py"),
]

# Not pwrite and ftruncate: they change memory that is shared, and the sign of life in a lock.
OF_THE_SYSTEM = {
    *("rename", "renames", "replace", "link", "symlink", "unlink", "remove", "removedirs"),
    *("mkdir", "makedirs", "rmdir", "mknod", "truncate", "fsync", "fdatasync", "sync"),
    *("write", "writev", "O_CREAT", "O_TRUNC", "O_APPEND", "O_WRONLY"),
}
OF_PATHS = {
    *("write_bytes", "write_text", "touch", "symlink_to", "hardlink_to"),
    *("unlink", "rename", "mkdir", "rmdir"),
}
OURS = {"disk.current()", "filesystem", "storage", "_storage", "files", "super()"}
"""What has functions of such names that go through it."""
IN_MEMORY = {"stream"}
"""What a BytesIO is called that torch.save writes to."""


def changes_of_a_disk(path: str, source: str) -> list[str]:
    """One line for each expression that changes a disk past ``tools/disk.py``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in OF_THE_SYSTEM:
                found.append((node.lineno, f"os.{name}"))
            case ast.Attribute(value=ast.Name(id="shutil"), attr=name) if name != "copyfileobj":
                found.append((node.lineno, f"shutil.{name}"))
            case ast.ImportFrom(module="os" | "shutil" as module, names=names):
                wanted = OF_THE_SYSTEM if module == "os" else {each.name for each in names}
                several = sorted({each.name for each in names} & wanted - {"copyfileobj"})
                found += [(node.lineno, f"{module}.{name}") for name in several]
            case ast.Attribute(value=value, attr=name) if name in OF_PATHS:
                owner = value.attr if isinstance(value, ast.Attribute) else ast.unparse(value)
                if owner not in OURS:
                    found.append((node.lineno, ast.unparse(node)))
            case ast.Call(func=ast.Attribute(attr="replace"), args=[_], keywords=[]):
                found.append((node.lineno, ast.unparse(node)))  # that of text takes two
            case ast.Call(func=ast.Name(id="open")) if _writes(node, 1):
                found.append((node.lineno, ast.unparse(node)))
            case ast.Call(func=ast.Attribute(value=value, attr="open")) if _writes(node, 0):
                if ast.unparse(value) not in OURS | {"os"}:
                    found.append((node.lineno, ast.unparse(node)))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="save")):
                if len(node.args) < 2 or ast.unparse(node.args[1]) not in IN_MEMORY:
                    found.append((node.lineno, ast.unparse(node)))
    return [f"{path}:{line}: {what} changes a disk past tools/disk.py" for line, what in found]


def _writes(call: ast.Call, place: int) -> bool:
    modes = [
        *call.args[place : place + 1],
        *(each.value for each in call.keywords if each.arg == "mode"),
    ]
    # One that is not written down may be any.
    return any(
        not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes
    )


def test_nothing_that_writes_checkpoints_changes_a_disk_past_the_seam() -> None:
    assert len(FILES) > 50
    found = [line for path in FILES for line in changes_of_a_disk(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "os.rename(a, b)",
        "delete = os.unlink",
        "os.open(a, os.O_RDWR | os.O_CREAT)",
        "os.fsync(file.fileno())",
        "shutil.rmtree(a)",
        "open(a, 'wb')",
        "open(a, mode='r+')",
        "open(a, mode)",
        "Path(a).write_text(b)",
        "(folder / name).touch()",
        "from os import rename, stat",
        "from shutil import move",
        "os.open(a, os.O_WRONLY)",
        "Path(a).unlink()",
        "path.rename(b)",
        "(folder / name).replace(b)",
        "path.parent.mkdir()",
        "path.rmdir()",
        "path.open('wb')",
        "torch.save(a, path)",
        "torch.save(obj=a, f=path)",
    ],
)
def test_what_changes_a_disk_is_found(planted: str) -> None:
    assert len(changes_of_a_disk("a.py", planted)) == 1


@pytest.mark.parametrize(
    "planted",
    [
        "disk.current().rename(a, b)",
        "filesystem.write_bytes(a, b)",
        "self._storage.write_bytes(a, b)",
        "open(a)",
        "open(a, 'rb')",
        "os.stat(a)",
        "shutil.copyfileobj(a, b)",
        "super().unlink(a)",
        "path.open()",
        "path.open('rb')",
        "torch.save(value, stream)",
        "text.replace(a, b)",
    ],
)
def test_what_does_not_is_passed(planted: str) -> None:
    assert changes_of_a_disk("a.py", planted) == []
