"""Copies a state dict into shared memory beside training, and hands it to this rank's writer process.

    stage: snapshot, copies that cannot wait | thread: the others | deliver: the writer process saves

A failure on the way never becomes a rank that stays away: it travels as the save's failure through the
writer processes, which agree on it, and so it is the failure of all ranks.
"""

import os
import pickle
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.pinned import means, torch_seam
from torchtitan.components.checkpointer.pinned.arena import aligned, Arena
from torchtitan.components.checkpointer.pinned.messages import Meeting, portable, Request
from torchtitan.components.checkpointer.pinned.snapshot import CanWait, Place, Snapshot, take
from torchtitan.components.checkpointer.pinned.writer_process import WriterProcess
from torchtitan.tools.logging import logger

# Values that grow a little between saves should not need more memory each time.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class Staged:
    """What lies in the arena, and who writes it."""

    process: WriterProcess
    request: Request

    def deliver(self, storage_writer: Any) -> None:
        """Let the process save; blocks until the checkpoint is durable."""
        request = replace(self.request, path=str(storage_writer.path))
        try:
            request = replace(request, writer=pickle.dumps(storage_writer))
        except Exception as error:
            request = replace(request, failure=portable(error))
        self.process.save(request)


class SharedMemoryStager:
    """One for the life of a manager: its arena, its thread, its writer process."""

    def __init__(
        self,
        options: StagingOptions,
        *,
        group: "dist.ProcessGroup | None",
        timeout: timedelta,
        find_can_wait: Callable[[], CanWait],
    ) -> None:
        """Takes no memory and starts nothing yet; ``group`` is where ranks agree on the writers."""
        self.means = means.find_means(options)
        self.shortages: list[str] = []
        """Why this rank cannot stage any more; empty while it can."""
        self._group = group
        self._timeout = timeout
        self._find_can_wait = find_can_wait
        self._arena = Arena()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-staging")
        self._prewarming: Future[None] | None = None
        self._stream = None if self.means.device is None else torch.Stream(self.means.device)
        self._process: WriterProcess | None = None
        self._store: dist.Store | None = None
        self._address = ("", 0)
        self._generation = 0
        self._is_open = True
        torch_seam.open_route()

    @property
    def writer_pid(self) -> int | None:
        """The process id of this rank's writer process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def has_usable_writer(self) -> bool:
        """Whether the next save can go to the writer process that is there."""
        return self._process is not None and self._process.is_usable

    def start_writer(self) -> None:
        """Start this rank's writer process in the place of the one that is there. Collective."""
        world_size = dist.get_world_size(self._group) if dist.is_initialized() else 1
        rank = dist.get_rank(self._group) if dist.is_initialized() else 0
        if world_size > 1 and self._generation == 0:
            try:
                self._address = rank_zero_decides(self._open_store, self._group)
            except (OSError, RuntimeError) as error:
                self.shortages.append(f"the writer processes have no store to meet at: {error}")
                return
        if self._process is not None:
            self._process.discard()
        self._generation += 1
        meeting = Meeting(
            rank=rank,
            world_size=world_size,
            host=self._address[0],
            port=self._address[1],
            generation=self._generation,
            timeout=self._timeout,
        )
        try:
            self._process = WriterProcess(self._arena, meeting)
        except OSError as error:
            self._process = None
            self.shortages.append(f"rank {rank} could not start a writer process: {error}")

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Take the memory that ``state_dict`` needs, in the background."""
        try:
            plain = {key: _plain(value) for key, value in state_dict.items()}
            needed = _needed_bytes(take(plain, self._find_can_wait()))
        except Exception as error:
            self.shortages.append(str(error))
            return
        if shortage := means.memory_shortage(needed):
            self.shortages.append(shortage)
        else:
            self._prewarming = self._executor.submit(self._reserve, needed)

    def stage(self, state_dict: Mapping[str, Any]) -> "Future[Staged]":
        """Begin to copy ``state_dict``; the future ends when every tensor may change again."""
        assert self._process is not None
        failed: Future[Staged] = Future()
        try:
            if self._prewarming is not None:
                self._prewarming.result()
                self._prewarming = None
            snapshot = take(state_dict, self._find_can_wait())
            self._reserve(_needed_bytes(snapshot))
            request = self._put_payload(snapshot)
            self._copy(snapshot.at_once)
            begun = self._mark()
            return self._executor.submit(self._finish, self._process, request, snapshot, begun)
        except Exception as error:
            failed.set_result(_failed(self._process, error))
        return failed

    def close(self) -> None:
        """Free everything; no save may be in flight."""
        if not self._is_open:
            return
        self._is_open = False
        self._executor.shutdown(wait=True)
        if self._process is not None:
            self._process.end()
        self._process = self._store = None
        self._arena.close()
        torch_seam.close_route()

    def _finish(
        self, process: WriterProcess, request: Request, snapshot: Snapshot, begun: Any
    ) -> Staged:
        try:
            if self._stream is None:
                self._copy(snapshot.later)
            else:
                with self._stream:
                    # What the training stream was still computing when the save was called.
                    self._stream.wait_event(begun)
                    self._copy(snapshot.later)
                self._stream.synchronize()
        except Exception as error:
            return _failed(process, error)
        finally:
            # They keep tensors alive that the run may have replaced.
            snapshot.at_once.clear()
            snapshot.later.clear()
        return Staged(process, request)

    @torch.no_grad()
    def _copy(self, copies: list[tuple[torch.Tensor, Place]]) -> None:
        for source, place in copies:
            target = self._arena.tensor(place.offset, place.shape, place.dtype)
            target.copy_(source, non_blocking=self._stream is not None)

    def _mark(self) -> Any:
        """The point that the training stream has reached, the copies just enqueued included."""
        if self.means.device is None:
            return None
        event = torch.Event(self.means.device)
        event.record(torch.accelerator.current_stream(self.means.device))
        return event

    def _reserve(self, size_bytes: int) -> None:
        if size_bytes <= self._arena.size_bytes:
            return
        try:
            pinned = self._arena.reserve(size_bytes, pin=self.means.pins)
        except OSError as error:
            needed = f"{size_bytes / 2**30:.2f} GiB"
            self.shortages.append(f"{needed} of shared memory are not to be had: {error}")
            raise
        if self.means.pins and not pinned:
            logger.warning(
                "The memory for staging could not be pinned; copies into it will be slower."
            )

    def _put_payload(self, snapshot: Snapshot) -> Request:
        offset = aligned(snapshot.size_bytes)
        self._arena.write(offset, snapshot.payload)
        return Request(
            path="",
            mapped_bytes=self._arena.size_bytes,
            payload_offset=offset,
            payload_bytes=len(snapshot.payload),
        )

    def _open_store(self) -> tuple[str, int]:
        # Port 0 is any that is free; the writers connect as soon as they are up.
        store = dist.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        self._store = store
        return os.environ.get("MASTER_ADDR") or socket.getfqdn(), store.port


def _needed_bytes(snapshot: Snapshot) -> int:
    return aligned(snapshot.size_bytes) + len(snapshot.payload) + _SPARE_BYTES


def _plain(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _failed(process: WriterProcess, error: Exception) -> Staged:
    request = Request(
        path="", mapped_bytes=0, payload_offset=0, payload_bytes=0, failure=portable(error)
    )
    return Staged(process, request)
