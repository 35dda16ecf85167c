"""A real writer process: it answers, it is found dead or late, and it never outlives its trainer.

Starting one takes seconds, so each is put through as much as possible.
"""

import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import waiting
from torchtitan.components.checkpointer.dcp_pinned import WRITER_PROGRAM
from torchtitan.components.checkpointer.pinned.arena import aligned, Arena
from torchtitan.components.checkpointer.pinned.dcp_shards import describe
from torchtitan.components.checkpointer.pinned.meeting import (
    committed_key,
    Meeting,
    open_store,
    written_key,
)
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.components.checkpointer.pinned.snapshot import take
from torchtitan.components.checkpointer.pinned.writer_process import WriterDiedError, WriterProcess

from tests.ranks.steering import BEFORE_DATA, COMMIT, disk_full, Hold, SteeredWriter
from tests.unit_tests.components.checkpointer.fakes import UnkillableProcess

_started: list[WriterProcess] = []


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    yield
    for process in _started:
        process._process.kill()
        process._process.wait()
    _started.clear()


ALONE = Meeting(rank=0, world_size=1, host="", port=0, generation=1, timeout=timedelta(seconds=60))


def start(arena: Arena, meeting: Meeting = ALONE) -> WriterProcess:
    _started.append(WriterProcess(arena, meeting, program=WRITER_PROGRAM))
    return _started[-1]


def request_for(arena: Arena, writer: Any) -> Request:
    snapshot = take({"w": torch.zeros(3)}, lambda key, tensor: True, describe)
    offset = aligned(snapshot.size_bytes)
    arena.reserve(offset + len(snapshot.payload))
    arena.write(offset, snapshot.payload)
    return Request(
        path=str(writer.path),
        mapped_bytes=arena.size_bytes,
        payload_offset=offset,
        payload_bytes=len(snapshot.payload),
        job=pickle.dumps(writer),
    )


def in_a_thread(action: Any, *arguments: Any) -> Any:
    """The value of a call that a thread made which has ended by now."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(action(*arguments)))
    thread.start()
    thread.join()
    return values[0]


def test_a_full_disk_is_told_as_such_and_a_process_that_hangs_is_ended_in_time(
    tmp_path: Path,
) -> None:
    arena = Arena()
    process = start(arena)
    full = request_for(arena, SteeredWriter(str(tmp_path / "step-1"), BEFORE_DATA, disk_full))
    with pytest.raises(BaseException) as failed:
        process.save(full)
    assert "No space left on device" in str(failed.value)
    assert process.is_usable
    os.kill(process.pid, signal.SIGSTOP)
    process._timeout = timedelta(seconds=0.2)
    with pytest.raises(TimeoutError, match="did not finish within 0 s .*timeout_seconds"):
        process.save(full)
    assert not process.is_usable and process._process.wait(30) == -signal.SIGKILL
    process.end()
    arena.close()


def test_a_killed_process_is_known_before_the_next_save_and_named_by_it(tmp_path: Path) -> None:
    arena = Arena()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    of_two = replace(ALONE, world_size=2, host="localhost", port=store.port)
    process = start(arena, of_two)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_usable
    with pytest.raises(WriterDiedError, match=f"{process.pid} of rank 0 was ended by SIGKILL"):
        process.save(
            replace(
                request_for(arena, SteeredWriter(str(tmp_path), BEFORE_DATA, disk_full)), attempt=7
            )
        )
    # The writer of the other rank may wait for this one at any of these.
    there = open_store(of_two, timedelta(seconds=30))
    for key in (written_key(7), committed_key(7)):
        assert f"{process.pid} of rank 0 was ended by SIGKILL" in there.get(key).decode()
    assert not there.check([written_key(8)])
    process.end()
    arena.close()


def test_a_process_started_by_another_thread_ends_with_its_connection_and_commits_nothing(
    tmp_path: Path,
) -> None:
    arena, hold = Arena(), Hold(tmp_path, "index").make()
    process = in_a_thread(start, arena)
    request = request_for(arena, SteeredWriter(str(tmp_path / "step-1"), COMMIT, hold.stop_here))
    process._connection.send(request)
    hold.await_reached()  # so it outlived the thread that started it
    process._connection.close()
    assert process._process.wait(30) == 0
    assert not (tmp_path / "step-1/.metadata").exists()
    arena.close()


def test_giving_up_a_save_ends_the_process_and_whoever_waits_for_it(tmp_path: Path) -> None:
    arena, hold = Arena(), Hold(tmp_path, "index").make()
    process = start(arena)
    failures: list[BaseException] = []

    def save() -> None:
        try:
            process.save(
                request_for(arena, SteeredWriter(str(tmp_path / "step-1"), COMMIT, hold.stop_here))
            )
        except WriterDiedError as error:
            failures.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    hold.await_reached()
    process.end()
    saving.join(30)
    assert len(failures) == 1 and process._process.poll() == -signal.SIGKILL
    arena.close()


def test_a_process_that_sigkill_does_not_end_is_left_behind_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_has_given_up", False)
    monkeypatch.setattr(subprocess, "Popen", UnkillableProcess)
    arena = Arena()
    process = WriterProcess(
        arena,
        replace(ALONE, timeout=timedelta(seconds=0.1)),
        program=WRITER_PROGRAM,
    )
    with pytest.raises(TimeoutError, match="timeout_seconds.* was killed, but the kernel still"):
        process.save(Request(path="", mapped_bytes=0, payload_offset=0, payload_bytes=0))
    assert not process.is_usable
    with process._in_use:  # as the thread that delivers a save has it while it waits
        process.end()
    assert waiting._has_given_up and not process._connection.closed
    assert f"the writer process {process.pid} of rank 0 was killed and has not ended" in caplog.text
    process.end()
    assert process._connection.closed
    arena.close()
