"""A process is told from all others, and from one that has its id after it."""

import json
import os
import subprocess
from dataclasses import replace
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer import lock_holder
from torchtitan.components.checkpointer.lock_holder import Fate, Holder, RECORD_BYTES

from tests.unit_tests.components.checkpointer.locks import elsewhere, ended, living


def test_a_record_is_read_as_it_was_written_and_all_have_one_length() -> None:
    first = Holder.here()
    later = replace(first, heartbeat=123456, step=10**9)
    for holder in (first, later):
        assert Holder.parse(holder.render()) == holder
        assert len(holder.render()) == RECORD_BYTES


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 1024,
        b"[1]",
        b"null",
        b"{}",
        Holder.here().render()[:200],
        json.dumps({**json.loads(Holder.here().render()), "pid": "7"}).encode(),
    ],
)
def test_what_is_no_record_or_not_all_of_one_tells_of_nobody(content: bytes) -> None:
    assert Holder.parse(content) is None


def test_a_later_version_may_tell_more() -> None:
    told = {**json.loads(Holder.here().render()), "mood": "good"}
    assert Holder.parse(json.dumps(told).encode()) is not None


def test_a_process_of_this_machine_is_alive_until_it_ends() -> None:
    mine = Holder.here()
    assert mine.fate() is Fate.ALIVE and mine.is_this_process()
    with living() as other:
        assert other.fate() is Fate.ALIVE and not other.is_this_process()
    assert other.fate() is Fate.DEAD


def test_an_id_that_was_given_to_another_process_since_is_not_taken_for_the_one_before() -> None:
    before = replace(Holder.here(), started="1")
    assert before.fate() is Fate.DEAD and not before.is_this_process()


def test_a_process_that_nobody_has_waited_for_is_dead() -> None:
    process = subprocess.Popen(["true"])
    started = lock_holder._start_time(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # Whether or not it was there to be asked when it began.
    for known in (started or "1", ""):
        assert replace(Holder.here(), pid=process.pid, started=known).fate() is Fate.DEAD
    process.wait()


def test_of_another_machine_or_container_nothing_is_told_whatever_its_host_is_called() -> None:
    mine = Holder.here()
    for other in (
        elsewhere(),
        elsewhere(host=mine.host),
        replace(mine, pid_namespace="pid:[1]"),
        replace(ended(), boot_id=""),
    ):
        assert other.fate() is Fate.ELSEWHERE and not other.is_this_process()
    # A machine may get another name while it runs.
    assert replace(mine, host="renamed").fate() is Fate.ALIVE


def test_without_proc_the_system_is_asked_whether_the_process_is_there() -> None:
    gone = ended()
    with (
        patch.object(lock_holder, "_stat", return_value=None),
        patch.object(lock_holder, "_boot_id", return_value=""),
        patch.object(lock_holder, "_pid_namespace", return_value=""),
    ):
        mine = Holder.here()
        assert mine.started == "" and mine.fate() is Fate.ALIVE and mine.is_this_process()
        assert replace(mine, pid=gone.pid).fate() is Fate.DEAD
        assert replace(mine, host="far-away").fate() is Fate.ELSEWHERE
        with patch.object(os, "kill", side_effect=PermissionError):
            assert replace(mine, pid=1).fate() is Fate.ALIVE
