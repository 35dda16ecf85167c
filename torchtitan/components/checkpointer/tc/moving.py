"""Move a checkpoint where nothing is renamed: file by file, so that no half of it is ever taken for one.

Such a storage would copy all files in some order of its own, and one that is cut short leaves a marker
over whatever came first. Here what makes a checkpoint complete is copied last, and deleted first.

    BackendCheckpointStorage.move -> copy_in_order, then the deletion of what was copied
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torch_checkpointing.storage.base_storage import ReadArgs, Storage

_PIECE_BYTES = 16 * 2**20


def copy_in_order(storage: Storage, source: Path, target: Path, markers: Sequence[str]) -> None:
    """Copy all files below ``source`` to ``target``, where nothing may be yet.

    Args:
        markers: the files that make it complete, the commit record first; it is copied last.
    """
    names = sorted(_files(storage, source, Path()), key=lambda name: _place(name, markers))
    try:
        for folder in dict.fromkeys((target / name).parent for name in names):
            storage.mkdir(folder)
        for name in names:
            _copy(storage, source / name, target / name)
    except BaseException:
        with suppress(Exception):  # what is left without them is no checkpoint
            for marker in markers:
                if storage.exists(target / marker):
                    storage.delete(target / marker)
            storage.rmdir(target)
        raise


def _place(name: Path, markers: Sequence[str]) -> int:
    """Before all others, or among the markers: the first of them comes last."""
    return len(markers) - markers.index(str(name)) if str(name) in markers else 0


def _files(storage: Storage, folder: Path, below: Path) -> Iterator[Path]:
    for name in sorted(storage.ls(folder / below)):
        if storage.isdir(folder / below / name):
            yield from _files(storage, folder, below / name)
        else:
            yield below / name


def _copy(storage: Storage, source: Path, target: Path) -> None:
    in_pieces = ReadArgs(pre_read_full_file=False)  # one may be larger than the memory
    with storage.stream_read(source, in_pieces) as found, storage.stream_write(target) as copy:
        shutil.copyfileobj(found, copy, _PIECE_BYTES)
