"""Copies a state dict into shared memory beside training, and hands it to this rank's writer process.

    prepare: take apart -> (all ranks agree, take_room: settling.py)
      -> stage: copies that cannot wait | thread: the others | deliver: the writer process saves

What this rank cannot do at all is found out by ``prepare`` and ``take_room``, before a save has begun,
and noted as a shortage. A failure after that never becomes a rank that stays away: it travels as the
save's failure through the writer processes, which agree on it, and so it is the failure of all ranks.
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
from torchtitan.components.checkpointer.pinned import means, memory
from torchtitan.components.checkpointer.pinned.arena import aligned, Arena
from torchtitan.components.checkpointer.pinned.meeting import Meeting
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.components.checkpointer.pinned.snapshot import (
    CanWait,
    DescribeShard,
    Place,
    Snapshot,
    take,
)
from torchtitan.components.checkpointer.pinned.writer_process import WriterProcess
from torchtitan.components.checkpointer.waiting import (
    explanation,
    is_late,
    result_within,
    WaitExpiredError,
)
from torchtitan.tools.errors import portable
from torchtitan.tools.logging import logger

# Values that grow a little between saves should not need more memory each time.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class Moment:
    """When a state was taken that is prepared later, beside training."""

    event: Any
    """Where the training stream of the device was; None without one."""

    def wait(self) -> None:
        """Block until the device has computed what the state then was."""
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True)
class Staged:
    """What lies in the arena, and who writes it."""

    process: WriterProcess
    request: Request

    def deliver(self, job: Any, path: str) -> None:
        """Let the process do its ``job``, a save to ``path``; blocks until that is durable."""
        request = replace(self.request, path=path)
        try:
            request = replace(request, job=pickle.dumps(job))
        except Exception as error:  # sent on, so that it is the error of all ranks
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
        describe_shard: DescribeShard,
        program: str,
    ) -> None:
        """Takes no memory and starts nothing yet.

        Args:
            group: where the ranks agree on the writers.
            find_can_wait: what of the state as it is now may be copied after ``stage``.
            describe_shard: what the writer has to know of a sharded tensor.
            program: the module that the writer process runs.
        """
        self.means = means.find_means(options)
        self.shortages: list[str] = []
        """Why this rank cannot stage any more; empty while it can."""
        self.losses_in_a_row = 0
        """Saves that were lost with a writer process of any rank, without one that was not."""
        self._group = group
        self._timeout = timeout
        self._find_can_wait = find_can_wait
        self._describe_shard = describe_shard
        self._program = program
        self._arena = Arena()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-staging")
        self._snapshot: Snapshot | None = None
        self._taken_at: Moment | None = None
        self._prewarms = False
        self._prewarming: Future[None] | None = None
        self._stream = None if self.means.device is None else torch.Stream(self.means.device)
        self._process: WriterProcess | None = None
        self._store: dist.Store | None = None
        self._address = ("", 0)
        self._generation = 0
        self._num_staged = 0
        self._is_open = True

    @property
    def writer_pid(self) -> int | None:
        """The process id of this rank's writer process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def meeting(self) -> Meeting | None:
        """Where the writer processes that are there have met, if there are any."""
        return None if self._process is None else self._process.meeting

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
                if is_late(error):
                    raise  # the ranks stand at different places by now
                self.shortages.append(f"the writer processes have no store to meet at: {error}")
                return
        if self._process is not None:
            if not self._process.is_usable:
                logger.warning(f"{self._process} can write no more; all ranks start new ones.")
            self._process.end()
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
            self._process = WriterProcess(self._arena, meeting, program=self._program)
        except OSError as error:
            self._process = None
            self.shortages.append(f"rank {rank} could not start a writer process: {error}")

    @property
    def lacks_room(self) -> bool:
        """Whether memory has to be taken for what was prepared."""
        return self._snapshot is not None and self._missing_bytes(self._snapshot) > 0

    def moment(self) -> Moment:
        """Now, in the thread that trains."""
        return Moment(self._mark())

    def prepare(self, state_dict: Mapping[str, Any], taken_at: Moment | None = None) -> None:
        """Take ``state_dict`` apart for the save that follows, and see whether it can be staged.

        Takes no memory yet. Until ``stage`` is called the state must not change.

        Args:
            taken_at: when it was taken in such a way that only updates change its tensors; None is now.

        Raises:
            WaitExpiredError: the memory that ``prewarm`` asked for has not come within the limit.
        """
        if self._prewarming is not None:
            # No shortage, which is for all ranks to settle: they have waited as long by now.
            result_within(self._prewarming, self._timeout.total_seconds())
            self._prewarming = None
        self._snapshot, self._prewarms, self._taken_at = None, False, taken_at
        try:
            values = {key: plain(value) for key, value in state_dict.items()}
            can_wait = self._find_can_wait() if taken_at is None else _everything_can
            self._snapshot = take(values, can_wait, self._describe_shard)
        except Exception as error:  # of any object in the state; the ranks settle what follows
            self.shortages.append(f"{type(error).__name__}: {error}")
            return
        needed = self._missing_bytes(self._snapshot)
        if not self.has_usable_writer:
            needed += memory.WRITER_BYTES
        if needed > 0 and (shortage := memory.shortage(needed)):
            self.shortages.append(shortage)

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Like ``prepare`` on a step without a save: ``take_room`` then returns at once."""
        self.prepare(state_dict)
        self._prewarms = True

    def take_room(self) -> None:
        """Take the memory that is missing."""
        assert self._snapshot is not None
        if not self._prewarms:
            self._reserve(_needed_bytes(self._snapshot))
            return
        self._prewarming = self._executor.submit(self._reserve, _needed_bytes(self._snapshot))
        self._snapshot = None  # the state will be another one when it is saved

    def stage(self, state_dict: Mapping[str, Any]) -> "Future[Staged]":
        """Begin to copy what was prepared, whatever is handed over here. On all ranks alike.

        The future ends when every tensor may change again.
        """
        snapshot, self._snapshot = self._snapshot, None
        assert self._process is not None and snapshot is not None
        self._num_staged += 1
        failed: Future[Staged] = Future()
        request = Request(
            path="", mapped_bytes=0, payload_offset=0, payload_bytes=0, attempt=self._num_staged
        )
        try:
            request = self._put_payload(snapshot, request)
            self._copy(snapshot.at_once)
            begun = self._mark() if self._taken_at is None else self._taken_at.event
            return self._executor.submit(self._finish, self._process, request, snapshot, begun)
        except Exception as error:  # travels through the writers, to all ranks
            failed.set_result(_failed(self._process, request, error))
        return failed

    def close(self) -> None:
        """Free everything; no save may be in flight, except for one that was given up."""
        if not self._is_open:
            return
        self._is_open = False
        idle, limit_seconds = self._executor.submit(lambda: None), self._timeout.total_seconds()
        self._executor.shutdown(wait=False)
        if self._process is not None:
            self._process.end()
        self._process = self._store = None
        try:
            result_within(idle, limit_seconds)
        except WaitExpiredError:
            # Its memory stays until the process ends: the device may still write into it.
            logger.warning(
                f"Ending a copy for a checkpoint was given up: {explanation(limit_seconds)}"
            )
        else:
            self._arena.close()

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
        except Exception as error:  # likewise
            return _failed(process, request, error)
        finally:
            # They keep tensors alive that the run may have replaced.
            snapshot.at_once.clear()
            snapshot.later.clear()
        return Staged(process, request)

    @torch.no_grad()
    def _copy(self, copies: list[tuple[torch.Tensor, Place]]) -> None:
        for source, place in copies:
            target = self._arena.tensor(place.offset, place.shape, place.dtype)
            # The side stream is waited for in the end, and no stream of another device.
            target.copy_(source, non_blocking=source.device == self.means.device)

    def _mark(self) -> Any:
        """The point that the training stream has reached, the copies just enqueued included."""
        if self.means.device is None:
            return None
        event = torch.Event(self.means.device)
        event.record(torch.accelerator.current_stream(self.means.device))
        return event

    def _missing_bytes(self, snapshot: Snapshot) -> int:
        return max(0, _needed_bytes(snapshot) - self._arena.size_bytes)

    def _reserve(self, size_bytes: int) -> None:
        if size_bytes <= self._arena.size_bytes:
            return
        try:
            pinned = self._arena.reserve(
                size_bytes, pin_for=self.means.device if self.means.pins else None
            )
        except OSError as error:
            needed = f"{size_bytes / 2**30:.2f} GiB"
            self.shortages.append(f"{needed} of shared memory are not to be had: {error}")
            return
        if self.means.pins and not pinned:
            logger.warning(
                "The memory for staging could not be pinned; copies into it will be slower."
            )

    def _put_payload(self, snapshot: Snapshot, request: Request) -> Request:
        offset = aligned(snapshot.size_bytes)
        self._arena.write(offset, snapshot.payload)
        return replace(
            request,
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


def plain(value: Any) -> Any:
    """The state of an object that has one; everything else is itself."""
    # To ask a tensor takes long: it looks for each method of the protocol, in vain.
    if isinstance(value, torch.Tensor) or not isinstance(value, Stateful):
        return value
    return value.state_dict()


def _everything_can(key: str, tensor: torch.Tensor) -> bool:
    return True


def _failed(process: WriterProcess, request: Request, error: Exception) -> Staged:
    return Staged(process, replace(request, failure=portable(error)))
