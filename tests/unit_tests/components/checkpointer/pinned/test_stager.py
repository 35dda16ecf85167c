"""Staging beside training: what is copied when, and how a failure becomes one of all ranks."""

import errno
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.staging import StagingOptions
from torchtitan.components.checkpointer import waiting
from torchtitan.components.checkpointer.pinned import memory, stager as stager_module
from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.dcp_shards import build, describe
from torchtitan.components.checkpointer.pinned.meeting import Meeting
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.components.checkpointer.pinned.snapshot import restore
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager, Staged


class ProcessInThisOne:
    """Reads the arena as a writer process does."""

    made: list["ProcessInThisOne"] = []

    def __init__(self, arena: Arena, meeting: Meeting, *, program: str) -> None:
        self.arena, self.meeting, self.program = arena, meeting, program
        self.is_usable = True
        self.requests: list[Request] = []
        self.is_open = True
        self.pid = 1
        self.made.append(self)

    def save(self, request: Request) -> None:
        self.requests.append(request)

    def saved(self) -> dict[str, Any]:
        request = self.requests[-1]
        there = Arena(os.dup(self.arena.fd))
        there.attach(request.mapped_bytes)
        state = restore(there.read(request.payload_offset, request.payload_bytes), there, build)
        there.close()
        return state

    def end(self) -> None:
        self.is_open = False


@pytest.fixture
def stager(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedMemoryStager]:
    monkeypatch.setattr(stager_module, "WriterProcess", ProcessInThisOne)
    ProcessInThisOne.made = []
    made = SharedMemoryStager(
        StagingOptions(),
        group=None,
        timeout=timedelta(seconds=30),
        find_can_wait=lambda: lambda key, tensor: key == "still",
        describe_shard=describe,
        program="a.program",
    )
    yield made
    made.close()


def process_of(stager: SharedMemoryStager) -> Any:
    return stager._process


def begin(stager: SharedMemoryStager, state: dict[str, Any]) -> "Future[Staged]":
    stager.prepare(state)
    assert stager.shortages == []
    stager.take_room()
    return stager.stage(state)


def stage(stager: SharedMemoryStager, state: dict[str, Any]) -> Staged:
    return begin(stager, state).result(30)


def test_only_what_the_optimizer_alone_changes_is_copied_in_the_background(
    stager: SharedMemoryStager,
) -> None:
    stager.start_writer()
    gate = threading.Event()
    stager._executor.submit(gate.wait, 30)
    buffer, weight, values = torch.zeros(2), torch.zeros(2), {"rows": [1]}
    future = begin(stager, {"still": weight, "moving": buffer, "plain": values})
    # As in the next forward pass, with the copy of the weight still to come.
    buffer.fill_(9.0)
    values["rows"].append(9)
    assert not future.done()
    weight.fill_(1.0)
    gate.set()
    future.result(30).deliver({"a": "job"}, "/a/path")
    weight.fill_(9.0)
    saved = process_of(stager).saved()
    assert saved["moving"].tolist() == [0, 0] and saved["plain"] == {"rows": [1]}
    assert saved["still"].tolist() == [1, 1]
    assert process_of(stager).requests[0].path == "/a/path"
    assert pickle.loads(process_of(stager).requests[0].job) == {"a": "job"}
    assert process_of(stager).program == "a.program"


def test_state_that_changes_its_structure_is_saved_whole_in_memory_that_grows(
    stager: SharedMemoryStager,
) -> None:
    stager.start_writer()
    for size in (10, 3_000_000, 20):
        weight = torch.full((size,), float(size))
        state = {"still": weight, f"key {size}": [torch.tensor(size)]}
        stage(stager, state).deliver(None, "/a")
        saved = process_of(stager).saved()
        assert saved.keys() == state.keys() and torch.equal(saved["still"], weight)
        assert saved[f"key {size}"][0] == size
    # One copy of the largest state, and not one of each.
    assert stager._arena.size_bytes < 4 * 3_000_000 + 4 * 2**20


def test_staged_saves_are_counted_whether_they_fail_or_not(stager: SharedMemoryStager) -> None:
    assert stager.meeting is None
    for _ in range(2):
        stager.start_writer()
        stage(stager, {"still": torch.ones(2)}).deliver(None, "/a")
        with patch.object(stager, "_copy", side_effect=RuntimeError("the device is lost")):
            stage(stager, {}).deliver(None, "/a")
        assert stager.meeting is process_of(stager).meeting
    attempts = [[request.attempt for request in made.requests] for made in ProcessInThisOne.made]
    assert attempts == [[1, 2], [3, 4]]


def test_prewarming_takes_the_memory_of_the_first_save(stager: SharedMemoryStager) -> None:
    state = {"still": torch.zeros(3_000_000)}
    stager.start_writer()
    gate = threading.Event()
    stager._executor.submit(gate.wait, 30)
    stager.prewarm(state)
    assert stager.lacks_room
    stager.take_room()  # beside training
    assert stager._arena.size_bytes == 0 and not stager.lacks_room
    gate.set()
    stager.prepare(state)
    size = stager._arena.size_bytes
    assert size >= state["still"].nbytes and not stager.lacks_room and stager.shortages == []
    stage(stager, state)
    assert stager._arena.size_bytes == size


@pytest.mark.parametrize("ahead", [False, True])
def test_too_little_memory_is_found_out_before_it_is_taken(
    stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    (stager.prewarm if ahead else stager.prepare)({"still": torch.zeros(3_000_000)})
    # The copy and the writer process.
    (shortage,) = stager.shortages
    assert "0.31 GiB" in shortage and "0.00 GiB" in shortage and stager._arena.size_bytes == 0


def test_only_what_is_missing_is_asked_for(
    stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(memory, "shortage", asked.append)
    state = {"still": torch.zeros(3_000_000)}
    stager.prepare(state)
    stager.take_room()
    stager.start_writer()
    stager.prepare(state)
    state["more"] = torch.zeros(1_000_000)
    stager.prepare(state)
    first, growth = asked
    assert 12_000_000 + memory.WRITER_BYTES < first < 15_000_000 + memory.WRITER_BYTES
    assert 2_000_000 < growth < 5_000_000


@pytest.mark.parametrize("ahead", [False, True])
def test_memory_that_is_refused_after_all_is_a_shortage_before_the_save(
    stager: SharedMemoryStager, ahead: bool
) -> None:
    state = {"still": torch.ones(2)}
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(os, "posix_fallocate", side_effect=full):
        (stager.prewarm if ahead else stager.prepare)(state)
        stager.take_room()
        stager._executor.submit(lambda: None).result(30)  # behind what is done ahead
    assert "not to be had" in stager.shortages[0] and "No space left" in stager.shortages[0]


def test_state_that_cannot_be_staged_is_a_shortage_before_the_save(
    stager: SharedMemoryStager,
) -> None:
    stager.prepare({"moving": torch.eye(2).to_sparse()})
    assert "moving holds a tensor" in stager.shortages[0] and not stager.lacks_room


def test_a_failed_copy_travels_to_the_writer_as_the_failure_of_the_save(
    stager: SharedMemoryStager,
) -> None:
    stager.start_writer()
    with patch.object(stager, "_copy", side_effect=[None, RuntimeError("the device is lost")]):
        staged = stage(stager, {"still": torch.ones(2)})
    staged.deliver(None, "/a")
    request = process_of(stager).requests[0]
    assert "the device is lost" in str(request.failure) and request.path == "/a"


def test_a_job_that_does_not_pickle_fails_the_save_and_not_the_delivery(
    stager: SharedMemoryStager,
) -> None:
    stager.start_writer()
    stage(stager, {}).deliver(lambda: None, "/a")
    assert "lambda" in str(process_of(stager).requests[0].failure)


def test_a_process_that_cannot_be_started_is_a_shortage(
    stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_processes(arena: Arena, meeting: Meeting, *, program: str) -> Any:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(stager_module, "WriterProcess", out_of_processes)
    stager.start_writer()
    assert "could not start a writer process" in stager.shortages[0]
    assert not stager.has_usable_writer and stager.writer_pid is None


def test_a_new_writer_takes_the_place_of_the_old_one_with_a_new_number(
    stager: SharedMemoryStager,
) -> None:
    stager.start_writer()
    stager.start_writer()
    first, second = ProcessInThisOne.made
    assert not first.is_open and second.is_open
    assert (first.meeting.generation, second.meeting.generation) == (1, 2)
    stager.close()
    stager.close()
    assert not second.is_open


def test_memory_taken_ahead_that_never_comes_is_given_up_by_the_next_save(
    stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_has_given_up", False)
    stager.start_writer()
    stager._timeout, gate = timedelta(seconds=0.05), threading.Event()
    stager._executor.submit(gate.wait, 30)
    stager.prewarm({"still": torch.zeros(2)})
    stager.take_room()
    # An error and no shortage: the other ranks have waited as long, and settle nothing any more.
    with pytest.raises(waiting.WaitExpiredError):
        stager.prepare({"still": torch.zeros(2)})
    assert waiting._has_given_up and stager.shortages == []
    gate.set()


def test_ranks_that_are_late_for_the_store_are_no_shortage_that_can_be_settled(
    stager: SharedMemoryStager,
) -> None:
    late = RuntimeError("Timed out waiting 1000ms for recv operation to complete")
    with (
        patch.object(stager_module.dist, "is_initialized", return_value=True),
        patch.object(stager_module.dist, "get_world_size", return_value=2),
        patch.object(stager_module.dist, "get_rank", return_value=1),
        patch.object(stager_module, "rank_zero_decides", side_effect=late),
        pytest.raises(RuntimeError, match="Timed out"),
    ):
        stager.start_writer()
    assert stager.shortages == []


def test_closing_gives_up_a_copy_that_hangs(
    stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_has_given_up", False)
    stager.start_writer()
    stager._timeout, gate = timedelta(seconds=0.05), threading.Event()
    hanging = stager._executor.submit(gate.wait, 30)
    stager.close()
    assert not hanging.done() and not ProcessInThisOne.made[-1].is_open
    assert waiting._has_given_up and "--checkpoint.timeout_seconds" in caplog.text
    # The device may still write into it.
    assert stager._arena.fd >= 0
    gate.set()
    stager._arena.close()
