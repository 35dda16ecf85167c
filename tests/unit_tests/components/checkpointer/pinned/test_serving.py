"""What every writer process does, whatever its program: join, answer each request, stay in step."""

import os
import pickle
from datetime import timedelta
from typing import Any

import pytest
from torchtitan.components.checkpointer.pinned import serving
from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.meeting import Meeting, WriterMissingError
from torchtitan.components.checkpointer.pinned.messages import Reply, Request
from torchtitan.components.checkpointer.pinned.writer_process import WriterDiedError, WriterProcess
from torchtitan.tools import disk

from tests.unit_tests.components.checkpointer.pinned import program

ALONE = Meeting(rank=0, world_size=1, host="", port=0, generation=1, timeout=timedelta(seconds=60))


def request(arena: Arena, job: Any) -> Request:
    return Request(
        path="/a",
        mapped_bytes=arena.size_bytes,
        payload_offset=64,
        payload_bytes=4,
        job=pickle.dumps(job),
    )


def test_a_program_is_found_by_its_name_and_keeps_what_joining_gave_it() -> None:
    arena = Arena()
    arena.reserve(100)
    arena.write(64, b"text")
    process = WriterProcess(arena, ALONE, program=program.__name__)
    try:
        process.save(request(arena, "write"))
        with pytest.raises(program.Agreed, match="save 2 of /a"):
            process.save(request(arena, "agree"))
        assert process.is_usable
        with pytest.raises(ValueError, match="save 3 reads b'text'"):
            process.save(request(arena, "fail"))
        assert not process.is_usable
    finally:
        process.end()
        arena.close()


def test_a_writer_process_writes_through_the_disk_of_the_moment_it_was_started() -> None:
    arena = Arena()
    arena.reserve(100)
    with disk.using(program.OtherDisk()):
        process = WriterProcess(arena, ALONE, program=program.__name__)
    try:
        for _ in range(2):
            with pytest.raises(program.Agreed, match="writes through OtherDisk"):
                process.save(request(arena, "disk"))
    finally:
        process.end()
        arena.close()


def test_a_writer_process_that_cannot_read_what_it_is_sent_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    arena = Arena()
    arena.reserve(100)
    with disk.using(program.StrangeDisk()):
        process = WriterProcess(arena, ALONE, program=program.__name__)
    try:
        with pytest.raises(WriterDiedError, match="with exit code 1"):
            process.save(request(arena, "write"))
    finally:
        process.end()
        arena.close()
    assert "cannot be made here" in capfd.readouterr().err


def test_a_process_that_could_not_join_answers_every_request_with_the_reason() -> None:
    def join(meeting: Meeting) -> None:
        raise WriterMissingError("rank 1 will not come")

    def save(request: Request, joined: None) -> None:
        raise AssertionError("never asked for")

    answer = serving._joined(ALONE, join, save, lambda error: True)
    for _ in range(2):
        reply = answer(Request(path="", mapped_bytes=0, payload_offset=0, payload_bytes=0))
        assert isinstance(reply.failure, WriterMissingError) and not reply.is_agreed


class Bare(BaseException):
    """No Exception, as the error of DCP."""


def test_only_what_is_agreed_on_may_be_more_than_an_exception() -> None:
    errors: list[BaseException | None] = [None, Bare("a"), OSError(28, "full")]

    def save(request: Request, joined: list[BaseException | None]) -> None:
        if (error := joined.pop(0)) is not None:
            raise error

    def is_agreed(error: BaseException) -> bool:
        return isinstance(error, Bare)

    anything = Request(path="", mapped_bytes=0, payload_offset=0, payload_bytes=0)
    answer = serving._joined(ALONE, lambda meeting: errors, save, is_agreed)
    assert answer(anything) == Reply()
    assert [
        (type(reply.failure), reply.is_agreed) for reply in (answer(anything), answer(anything))
    ] == [
        (Bare, True),
        (OSError, False),
    ]
    errors.append(SystemExit(3))
    with pytest.raises(SystemExit):
        answer(anything)


def test_a_trainer_that_is_gone_is_told_from_one_that_runs() -> None:
    serving.require_trainer(os.getppid())
    with pytest.raises(serving.TrainerGoneError, match=f"process {os.getpid()}, has ended"):
        serving.require_trainer(os.getpid())
