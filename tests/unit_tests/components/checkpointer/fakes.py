"""A folder in memory that answers the checkpointer's questions, a manager without a backend, and more."""

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.checkpointer.discovery import parse_step


class MemoryStorage:
    """A tree as a dict: a path maps to None for a directory, to its bytes for a file."""

    def __init__(self, *directories: str) -> None:
        self.entries: dict[str, bytes | None] = {}
        self.calls: list[tuple[str, ...]] = []
        self.undeletable: set[str] = set()
        for path in directories:
            self.add(path)

    def add(self, path: str, content: bytes | None = None) -> None:
        parts = path.split("/")
        for depth in range(2, len(parts)):
            self.entries.setdefault("/".join(parts[:depth]), None)
        self.entries[path] = content

    def isdir(self, path: str) -> bool:
        return path in self.entries and self.entries[path] is None

    def isfile(self, path: str) -> bool:
        return self.entries.get(path) is not None

    def listdir(self, path: str) -> list[str]:
        # Not sorted: no file system promises an order.
        start = f"{path}/"
        names = {key[len(start) :].split("/")[0] for key in self.entries if key.startswith(start)}
        return sorted(names, key=lambda name: name[::-1])

    def remove(self, path: str) -> None:
        self.calls.append(("remove", path))
        if path in self.undeletable:
            raise PermissionError(f"{path} is protected")
        self._take(path)

    def move(self, source: str, target: str) -> None:
        self.calls.append(("move", source, target))
        if source in self.undeletable:
            raise PermissionError(f"{source} is protected")
        assert not self.isdir(target)
        for path, content in self._take(source).items():
            self.add(target + path[len(source) :], content)

    def size_bytes(self, path: str) -> int:
        return sum(len(content or b"") for content in self._below(path).values())

    def file_sizes(self, path: str, names: Iterable[str]) -> dict[str, int]:
        found = {name: self.entries.get(f"{path}/{name}") for name in names}
        return {name: len(content) for name, content in found.items() if content is not None}

    def read_bytes(self, path: str) -> bytes:
        content = self.entries.get(path)
        if content is None:
            raise FileNotFoundError(path)
        return content

    def write_bytes(self, path: str, content: bytes) -> None:
        self.calls.append(("write", path))
        self.add(path, content)

    def _below(self, path: str) -> dict[str, bytes | None]:
        return {
            key: content
            for key, content in self.entries.items()
            if key == path or key.startswith(f"{path}/")
        }

    def _take(self, path: str) -> dict[str, bytes | None]:
        taken = self._below(path)
        for key in taken:
            del self.entries[key]
        return taken


class UnkillableProcess:
    """A Popen whose process hangs in the kernel: it never answers, and no signal ends it."""

    pid = 4711

    def __init__(self, arguments: list[str], *, pass_fds: tuple[int, int], **others: Any) -> None:
        self._connection = os.dup(pass_fds[0])
        self.kills = 0

    def __del__(self) -> None:
        os.close(self._connection)

    def kill(self) -> None:
        self.kills += 1

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "this would wait for ever"
        raise subprocess.TimeoutExpired("a writer", timeout)


class BareManager(BaseCheckpointManager):
    """The base with hooks that record their calls; "staging-7" is a staging name."""

    def __init__(self, **attributes: Any) -> None:
        self.enable = True
        self.hook_calls: list[tuple[Any, ...]] = []
        self.save_future = None
        for name, value in attributes.items():
            setattr(self, name, value)

    def _load(self, *arguments: Any, **keywords: Any) -> bool:
        self.hook_calls.append(("load", arguments, keywords))
        return True

    def _save(self, *arguments: Any, **keywords: Any) -> bool:
        self.hook_calls.append(("save", arguments, keywords))
        return True

    def _maybe_wait_for_staging(self) -> None:
        self.hook_calls.append(("staging",))

    def _wait_for_saving(self) -> None:
        self.hook_calls.append(("saving",))

    def _close(self) -> None:
        self.hook_calls.append(("close",))

    def _parse_step(self, filename: str) -> tuple[int, bool] | None:
        is_staging = filename.startswith("staging-")
        step = parse_step(filename.replace("staging-", "step-", 1) if is_staging else filename)
        return None if step is None else (step, is_staging)

    def _is_valid_checkpoint(self, checkpoint_id: str) -> bool:
        return self._storage.isfile(f"{checkpoint_id}/done")


def folder_of(*names: str, complete: bool = True) -> MemoryStorage:
    """A storage whose directory "/run" holds directories of these ``names``."""
    storage = MemoryStorage("/run")
    for name in names:
        storage.add(f"/run/{name}")
        if complete:
            storage.add(f"/run/{name}/done", b"1")
    return storage


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    ends_at = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def without_parts(config: CheckpointManager.Config, **given: Any) -> CheckpointManager:
    """The manager of ``config`` for a run that has only the parts ``given``."""
    names = "dataloader", "optimizers", "lr_schedulers", "sd_adapter"
    return config.build(**{**dict.fromkeys(names), "model_parts": [], "states": {}, **given})
