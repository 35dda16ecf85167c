"""A disk in memory that may die or fail before any change, and a run whose checkpoints lie on it.

Every change is an operation. A deletion takes one for each file, in the order of the real storages.
"""

import functools
import queue
from collections.abc import Iterable
from typing import Any

from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.manifest import (
    head_of,
    Manifest,
    MANIFEST,
    render,
)
from torchtitan.components.checkpointer.retention import purge_thread
from torchtitan.components.checkpointer.storage import delete_in_order

from tests.unit_tests.components.checkpointer.fakes import BareManager

PAYLOAD, DONE = "payload", "done"
FILES = PAYLOAD, DONE, MANIFEST
"""In the order in which a save writes them; "done" is the marker of the back end."""


class KilledError(BaseException):
    """The process is gone."""


class FailingDisk:
    """Folders by path, and in each its names: None for a folder, bytes for a file."""

    def __init__(self, folder: str) -> None:
        self.folders: dict[str, dict[str, bytes | None]] = {folder: {}}
        self.dies_in: int | None = None
        self.fails_in: int | None = None

    def operate(self) -> None:
        """Count one operation, which is not carried out when it is time to die or to fail."""
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                raise KilledError
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                raise OSError("the disk has refused")

    def isdir(self, path: str) -> bool:
        return path in self.folders

    def isfile(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return self.folders.get(folder, {}).get(name) is not None

    def listdir(self, path: str) -> list[str]:
        return list(self.folders[path])[::-1]  # no file system promises an order

    def read_bytes(self, path: str) -> bytes:
        folder, _, name = path.rpartition("/")
        content = self.folders.get(folder, {}).get(name)
        if content is None:
            raise FileNotFoundError(path)
        return content

    def write_bytes(self, path: str, content: bytes) -> None:
        self.operate()
        folder, _, name = path.rpartition("/")
        self._make(folder)
        self.folders[folder][name] = content

    def move(self, source: str, target: str) -> None:
        self.operate()
        assert source in self.folders and target not in self.folders, f"{source} onto {target}"
        self._make(target)
        for path in [path for path in self.folders if path.startswith(f"{source}/")]:
            self.folders[target + path[len(source) :]] = self.folders.pop(path)
        self.folders[target] = self.folders[source]
        self._drop(source)

    def remove(self, path: str) -> None:
        files = self.folders[path]
        assert not any(content is None for content in files.values()), f"{path} holds folders"
        delete_in_order(self, path, (MANIFEST, DONE))

    def rename(self, src: str, dst: str) -> None:
        self.operate()
        folder, _, name = src.rpartition("/")
        self.folders[folder][dst.rpartition("/")[2]] = self.folders[folder].pop(name)

    def remove_file(self, path: str) -> None:
        if self.isfile(path):
            self.operate()
            folder, _, name = path.rpartition("/")
            del self.folders[folder][name]

    def rmtree(self, path: str, *, last: str) -> None:
        for name in sorted(self.folders[path], key=lambda name: name == last):
            self.remove_file(f"{path}/{name}")
        self.operate()
        self._drop(path)

    def size_bytes(self, path: str) -> int:
        return sum(len(content or b"") for content in self.folders[path].values())

    def file_sizes(self, path: str, names: Iterable[str]) -> dict[str, int]:
        found = {name: self.folders.get(path, {}).get(name) for name in names}
        return {name: len(content) for name, content in found.items() if content is not None}

    def _make(self, folder: str) -> None:
        if folder not in self.folders:
            parent, _, name = folder.rpartition("/")
            self._make(parent)
            self.folders[parent][name] = None
            self.folders[folder] = {}

    def _drop(self, folder: str) -> None:
        parent, _, name = folder.rpartition("/")
        del self.folders[parent][name]
        del self.folders[folder]


@functools.cache
def manifest_of(step: int, *, is_full: bool) -> bytes:
    """The commit record of a checkpoint."""
    head = head_of(step, "full" if is_full else "model_only", "a test", 1, None)
    return render(Manifest(head=head, files={}))


class LateThread:
    """Deletes what is queued when it is waited for, in the thread that waits."""

    def __init__(self, manager: "Traced") -> None:
        self._manager = manager
        self._is_over = False

    def is_alive(self) -> bool:
        return not self._is_over

    def join(self, timeout: float) -> None:
        self._is_over = True
        purge_thread(self._manager.purge_queue, self._manager._deletions.delete)


class Traced(BareManager):
    """A run on a ``FailingDisk``; what it loads is a payload, which may be known to be damaged."""

    def __init__(self, disk: FailingDisk, damaged: set[bytes], **settings: Any) -> None:
        usual = {
            "initial_load_path": None,
            "initial_load_model_only": True,
            "initial_load_in_hf": False,
            "initial_load_in_hf_quantized": False,
            "exclude_from_loading": [],
            "sd_adapter": None,
            "states": {"model": 0, "optimizer": 0},
            "load_only": False,
        }
        super().__init__(
            _storage=disk,
            folder="/run",
            purge_queue=queue.Queue(),
            purge_thread=None,
            _history_settled=False,
            **{**usual, **settings},
        )
        self.loaded: bytes | None = None
        self._damaged_payloads = damaged
        if self.keep_latest_k:
            # Deleting has to come at a moment that the test chooses.
            self.purge_thread: Any = LateThread(self)

    def __del__(self) -> None:
        """A process that is gone closes nothing."""

    @property
    def step(self) -> int:
        """The step that it has loaded, 0 for none."""
        return self._loaded_step or 0

    def _load(self, step: int) -> bool:
        source = self._choose_start(step).source
        self.loaded = None
        if source is None:
            return False
        payload = self._storage.read_bytes(f"{source.path}/{PAYLOAD}")
        if payload in self._damaged_payloads:
            raise CheckpointDamagedError(f"{source.path}/{PAYLOAD} is damaged.")
        self.loaded = payload
        return True

    def _kind_of(self, checkpoint_id: str) -> Kind:
        payload = self._storage.read_bytes(f"{checkpoint_id}/{PAYLOAD}")
        return Kind.MODEL_ONLY if payload.startswith(b"weights") else Kind.FULL

    def delete_some(self, number: int) -> None:
        """Let the thread that deletes come as far as to the ``number``th path."""
        now: queue.Queue[str | None] = queue.Queue()
        for _ in range(min(number, self.purge_queue.qsize())):
            now.put(self.purge_queue.get_nowait())
        now.put(None)
        purge_thread(now, self._deletions.delete)

    def _close(self) -> None:
        self._stop_purging()
