"""A folder is one run's: no other gets it while that one lives, and every other one afterwards."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer import lock_file, run_lock
from torchtitan.components.checkpointer.errors import CheckpointInUseError
from torchtitan.components.checkpointer.lock_file import LocalLockFile, Seen
from torchtitan.components.checkpointer.lock_holder import Fate, Holder
from torchtitan.components.checkpointer.run_lock import hold, RUN_LOCK, RunLock, Silence

from tests.unit_tests.components.checkpointer.locks import (
    elsewhere,
    ended,
    leave,
    living,
    stopped_clock,
)

DAYS = 1e6
"""So that no thread of a lock gives a sign of life by itself."""


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What was logged, in order, each line with its level."""
    lines: list[str] = []

    def note(level: str) -> Callable[[str], None]:
        return lambda line: lines.append(f"{level}: {line}")

    with patch.object(run_lock, "logger") as logger:
        for level in ("info", "warning", "error"):
            setattr(logger, level, note(level))
        yield lines


def holder_in(folder: Path) -> Holder | None:
    return Holder.parse((folder / RUN_LOCK).read_bytes())


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointInUseError) as caught:
        hold(str(folder), timeout_seconds=options.pop("timeout_seconds", DAYS), **options)
    return str(caught.value)


def test_who_holds_a_folder_stands_in_it_until_it_is_given_back(
    tmp_path: Path, said: list[str]
) -> None:
    folder = tmp_path / "a/checkpoint"
    lock = hold(str(folder), timeout_seconds=DAYS)
    lock.require()
    assert holder_in(folder) == lock.holder and lock.holder.pid == os.getpid()
    assert os.listdir(folder) == [RUN_LOCK]
    lock.release()
    assert not folder.exists() and said == []


def test_the_same_process_may_hold_it_several_times(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "again").symlink_to(tmp_path / "checkpoint")
    first = hold(str(tmp_path / "checkpoint"), timeout_seconds=DAYS)
    second = hold(str(tmp_path / "again"), timeout_seconds=DAYS)
    first.release()
    assert holder_in(tmp_path / "checkpoint") == second.holder
    second.release()
    assert not (tmp_path / "checkpoint").exists() and said == []
    # As after a reload of the module: nobody remembers it, but it is this process.
    leave(tmp_path / "checkpoint", Holder.here())
    hold(str(tmp_path / "checkpoint"), timeout_seconds=DAYS).release()


def test_a_second_run_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with living() as other:
        path = leave(tmp_path, other)
        text = refusal(tmp_path)
        assert f"{tmp_path} is in use: {path} is held by process {other.pid} on host" in text
        assert f"(since {other.since}, from step 50 on), which is alive" in text
        assert "--dump_folder" in text and f"delete {path}" in text
        assert holder_in(tmp_path) == other and os.listdir(tmp_path) == [RUN_LOCK]


def test_the_lock_of_a_dead_run_is_taken_over_at_once_and_told_in_one_line(
    tmp_path: Path, said: list[str]
) -> None:
    dead = ended()
    path = leave(tmp_path, dead)
    with stopped_clock() as clock:
        lock = hold(str(tmp_path), timeout_seconds=DAYS)
    assert clock.slept == [] and holder_in(tmp_path) == lock.holder
    assert said == [f"info: Took over {path}: {dead} is no more."]
    assert os.listdir(tmp_path) == [RUN_LOCK]
    lock.release()


@pytest.mark.parametrize("content", [elsewhere(), b"", b"half a rec"], ids=["run", "empty", "torn"])
def test_one_that_cannot_be_looked_for_is_taken_over_when_it_was_silent_for_all_the_time(
    tmp_path: Path, content: Holder | bytes, said: list[str]
) -> None:
    leave(tmp_path, content)
    with stopped_clock() as clock:
        lock = hold(str(tmp_path), timeout_seconds=300)
    assert sum(clock.slept) == pytest.approx(300, abs=0.1)
    assert [line.split(" for ")[0] for line in said] == [
        "info: Waiting up to 300 s",
        f"info: Took over {tmp_path}/{RUN_LOCK}: "
        + (str(content) if isinstance(content, Holder) else "a run whose record cannot be read")
        + " has given no sign of life",
    ]
    assert holder_in(tmp_path) == lock.holder
    lock.release()


@pytest.mark.parametrize("kind", ["heartbeat", "time of change", "another run"])
def test_a_sign_of_life_in_that_time_is_enough_to_refuse(tmp_path: Path, kind: str) -> None:
    other = elsewhere()
    path = leave(tmp_path, other)

    def live() -> None:
        if kind == "time of change":
            os.utime(path, ns=(1, 1))
        elif kind == "heartbeat":
            path.write_bytes(replace(other, heartbeat=1).render())
        else:
            leave(tmp_path, elsewhere(host="third"))

    with stopped_clock() as clock:
        clock.on_sleep = lambda: live() if len(clock.slept) == 3 else None
        text = refusal(tmp_path, timeout_seconds=300)
    assert "which is alive" in text and len(clock.slept) == 3


@pytest.mark.parametrize("fate", [Fate.DEAD, Fate.ALIVE])
def test_what_a_rank_on_its_machine_says_of_a_run_is_not_waited_for(
    tmp_path: Path, fate: Fate, said: list[str]
) -> None:
    other = elsewhere()
    leave(tmp_path, other)
    verdicts = {other.run_id: fate}
    with stopped_clock() as clock:
        if fate is Fate.ALIVE:
            assert "which is alive" in refusal(tmp_path, verdicts=verdicts)
        else:
            hold(str(tmp_path), timeout_seconds=DAYS, verdicts=verdicts).release()
    assert clock.slept == []


def test_nobody_is_waited_for_where_the_other_ranks_wait(tmp_path: Path) -> None:
    leave(tmp_path, elsewhere())
    with stopped_clock() as clock, pytest.raises(TimeoutError, match="takes more silence"):
        hold(str(tmp_path), timeout_seconds=DAYS, may_wait=False)
    assert clock.slept == []


def test_what_an_earlier_try_has_seen_counts_in_the_next_one(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    silence = Silence(300)
    leave(tmp_path, elsewhere())
    with stopped_clock() as clock, patch.object(LocalLockFile, "take_over", side_effect=full):
        with pytest.raises(OSError, match="No space"):
            hold(str(tmp_path), timeout_seconds=300, silence=silence)
        assert sum(clock.slept) == pytest.approx(300, abs=0.1)
    options: dict[str, Any] = {"timeout_seconds": 300, "silence": silence, "may_wait": False}
    with stopped_clock() as clock:
        clock.now += 1000
        lock = hold(str(tmp_path), **options)
        assert clock.slept == [] and holder_in(tmp_path) == lock.holder
    lock.release()
    # Somebody who has come since is alive.
    leave(tmp_path, elsewhere())
    with stopped_clock():
        assert "which is alive" in refusal(tmp_path, **options)


def test_one_that_comes_where_there_was_none_is_alive(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    silence = Silence(DAYS)
    with patch.object(LocalLockFile, "create", side_effect=full):
        with pytest.raises(OSError, match="No space"):
            hold(str(tmp_path), timeout_seconds=DAYS, silence=silence)
    leave(tmp_path, elsewhere())
    assert "which is alive" in refusal(tmp_path, silence=silence, may_wait=False)


def test_a_name_that_is_neither_there_nor_free_is_given_up(tmp_path: Path) -> None:
    (tmp_path / RUN_LOCK).symlink_to(tmp_path / "nowhere")
    with stopped_clock() as clock:
        clock.on_sleep = lambda: setattr(clock, "now", clock.now + 10)
        with pytest.raises(TimeoutError, match="cannot be made"):
            hold(str(tmp_path), timeout_seconds=300)
    assert 50 < len(clock.slept) < 70
    with pytest.raises(TimeoutError, match="cannot be made"):
        hold(str(tmp_path), timeout_seconds=300, may_wait=False)
    assert os.listdir(tmp_path) == [RUN_LOCK]


def test_a_lock_is_given_back_while_another_one_is_waited_for(tmp_path: Path) -> None:
    mine = hold(str(tmp_path / "mine"), timeout_seconds=DAYS)
    leave(tmp_path / "other", elsewhere())
    waits, goes_on = threading.Event(), threading.Event()

    def wait(seconds: float) -> None:
        waits.set()
        goes_on.wait(20)

    with patch.object(run_lock.time, "sleep", wait):
        arguments: dict[str, Any] = {"timeout_seconds": 0.01}
        waiting = threading.Thread(
            target=hold, args=[str(tmp_path / "other")], kwargs=arguments, daemon=True
        )
        waiting.start()
        assert waits.wait(20)
        giving = threading.Thread(target=mine.release, daemon=True)
        giving.start()
        giving.join(5)
        is_over = not giving.is_alive()
        goes_on.set()
        waiting.join(20)
    assert is_over and not (tmp_path / "mine").exists()
    run_lock._held[str(tmp_path / "other")].release()


def test_silence_is_measured_from_the_first_look_and_ends_with_any_change() -> None:
    silence, seen = Silence(10), Seen(b"a", (1, 7))
    assert [silence.seconds_left(seen, now) for now in (100, 104, 110, 200)] == [10, 6, 0, 0]
    for changed in (Seen(b"b", (1, 7)), Seen(b"a", (1, 8)), Seen(b"a", (2, 7))):
        assert silence.seconds_left(changed, 104) is None


def test_a_live_run_gives_signs_of_life_by_itself(tmp_path: Path) -> None:
    beats = threading.Semaphore(0)
    write = LocalLockFile.write

    def noted(file: LocalLockFile, content: bytes) -> None:
        write(file, content)
        beats.release()

    with patch.object(LocalLockFile, "write", noted):
        lock = hold(str(tmp_path), timeout_seconds=0.05)
        lock.note_step(7)
        assert all(beats.acquire(timeout=20) for _ in range(3))
        found = holder_in(tmp_path)
        lock.release()
    assert found is not None and found.run_id == lock.holder.run_id
    assert found.heartbeat >= 3 and found.step == 7
    lock._thread.join(20)
    assert not lock._thread.is_alive() and os.listdir(tmp_path) == []


def test_a_lock_that_was_taken_over_is_told_at_once_and_refuses_the_next_save(
    tmp_path: Path, said: list[str]
) -> None:
    lock = hold(str(tmp_path), timeout_seconds=DAYS)
    other = elsewhere()
    path = leave(tmp_path, other)
    lock._look()
    [line] = said
    assert line.startswith(
        f"error: {other} has taken over {path} from this run, process {os.getpid()}"
    )
    for _ in range(2):
        with pytest.raises(CheckpointInUseError, match="belongs to another run now") as caught:
            lock.require()
        assert str(other) in str(caught.value)
    assert holder_in(tmp_path) == other and len(said) == 1
    # Whoever begins anew in this process has to ask as everybody else.
    with pytest.raises(TimeoutError, match=str(other.pid)):
        hold(str(tmp_path), timeout_seconds=DAYS, may_wait=False)
    lock.release()
    assert holder_in(tmp_path) == other


def test_a_save_looks_for_itself_whether_the_lock_was_taken_over(
    tmp_path: Path, said: list[str]
) -> None:
    lock = hold(str(tmp_path), timeout_seconds=DAYS)
    leave(tmp_path, elsewhere())
    with pytest.raises(CheckpointInUseError):
        lock.require()
    lock.release()


def test_a_lock_that_was_deleted_is_made_again_unless_somebody_may_have_been_there(
    tmp_path: Path, said: list[str]
) -> None:
    lock = hold(str(tmp_path), timeout_seconds=DAYS)
    for action in (lambda: lock._look(), lock.require):
        (tmp_path / RUN_LOCK).unlink()
        action()
        assert holder_in(tmp_path) == lock.holder
        lock._look()  # into the new one
        assert holder_in(tmp_path) == lock.holder
    assert ["has deleted" in line for line in said] == [True, True]
    (tmp_path / RUN_LOCK).unlink()
    with stopped_clock() as clock:
        clock.now = lock._beaten_at + DAYS + 1
        with pytest.raises(CheckpointInUseError, match="A run that has ended since"):
            lock.require()
    assert os.listdir(tmp_path) == []
    lock.release()


def test_a_disk_that_takes_no_sign_of_life_is_one_warning_until_it_does_again(
    tmp_path: Path, said: list[str]
) -> None:
    lock = hold(str(tmp_path), timeout_seconds=DAYS)
    full = OSError(errno.ENOSPC, "No space left on device")
    # What a storage of URIs raises is not always of the system.
    for error in (full, ValueError("No space left on device")):
        with patch.object(LocalLockFile, "write", side_effect=error):
            lock._look()
            lock._look()
        lock._look()
        lock.require()
    assert ["No space left on device" in line for line in said] == [True, True]
    lock.release()


def test_a_process_that_was_forked_gives_nothing_back(tmp_path: Path) -> None:
    lock = hold(str(tmp_path), timeout_seconds=DAYS)
    with patch.object(os, "getpid", return_value=os.getpid() + 1):
        lock.release()
        assert holder_in(tmp_path) == lock.holder
        # Nor has it the lock.
        assert "which is alive" in refusal(tmp_path)
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        RunLock(str(tmp_path / "file"), DAYS).take({}, may_wait=True)


def test_a_wait_for_a_lock_that_leads_nowhere_is_told(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / RUN_LOCK).symlink_to(tmp_path / "nothing")
    with pytest.raises(TimeoutError, match="cannot be made"):
        RunLock(str(tmp_path), 0.5).take({}, may_wait=True)
    (line,) = said
    assert "Waiting up to 1 s" in line and "a link that leads nowhere, delete it" in line


@pytest.fixture
def at_once() -> Iterator[None]:
    with patch.object(lock_file, "SETTLING_SECONDS", 0):
        yield


def test_a_storage_of_uris_has_locks_as_good_as_it_can(said: list[str], at_once: None) -> None:
    folder = "memory://bucket/run"
    lock = hold(folder, timeout_seconds=DAYS)
    assert lock.path == f"{folder}/{RUN_LOCK}" and "no more than an attempt" in said[0]
    lock._look()
    seen = lock._file.read()
    assert seen is not None and Holder.parse(seen.content) == replace(lock.holder, heartbeat=1)
    assert not lock_file.lock_file(lock.path).create(b"another")
    other = lock_file.RemoteLockFile(lock.path)
    assert not other.take_over(Seen(b"what was there before"), b"another")
    assert other.take_over(seen, elsewhere().render())
    with pytest.raises(CheckpointInUseError):
        lock.require()
    lock.release()
    assert other.read() is not None
    other.remove()
    assert other.read() is None
