"""The order of things on a machine with an accelerator, whose calls are recorded and not made."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.distributed.checkpoint.staging import StagingOptions
from torchtitan.components.checkpointer.pinned import arena as arena_module, means
from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.dcp_shards import describe
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager

DEVICE = torch.device("cuda", 3)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """What is asked of streams and events, in order."""
    made: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == DEVICE

        def __enter__(self) -> None:
            made.append("enter the side stream")

        def __exit__(self, *error: Any) -> None:
            made.append("leave the side stream")

        def wait_event(self, event: Any) -> None:
            made.append("the side stream waits for the event")

        def synchronize(self) -> None:
            made.append("wait for the side stream")

    class Event:
        def __init__(self, device: torch.device) -> None:
            assert device == DEVICE

        def record(self, stream: Any) -> None:
            made.append(f"record an event on {stream}")

    class OnDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            made.append(f"turn to device {self.index}")

        def __exit__(self, *error: Any) -> None:
            made.append("turn back")

    with (
        patch.object(torch.accelerator, "device_index", OnDevice),
        patch.object(torch, "Stream", Stream),
        patch.object(torch, "Event", Event),
        patch.object(torch.accelerator, "current_stream", return_value="the training stream"),
        patch.object(means, "find_means", return_value=means.Means(device=DEVICE, pins=False)),
    ):
        yield made


def test_copies_follow_what_the_training_stream_has_begun_and_the_future_follows_them(
    calls: list[str],
) -> None:
    stager = SharedMemoryStager(
        StagingOptions(),
        group=None,
        timeout=timedelta(seconds=30),
        find_can_wait=lambda: lambda key, tensor: key == "weight",
        describe_shard=describe,
        program="a.program",
    )
    stager._process = MagicMock()
    copy = stager._copy

    def recorded(copies: Any) -> None:
        calls.extend(f"copy {int(source)}" for source, _ in copies)
        copy(copies)

    with patch.object(stager, "_copy", recorded):
        stager.prepare({"weight": torch.tensor(1), "buffer": torch.tensor(2)})
        stager.take_room()
        future = stager.stage({})
        future.add_done_callback(lambda _: calls.append("the future is done"))
        future.result(30)
    stager.close()
    assert calls == [
        "copy 2",
        "record an event on the training stream",
        "enter the side stream",
        "the side stream waits for the event",
        "copy 1",
        "leave the side stream",
        "wait for the side stream",
        "the future is done",
    ]


def test_memory_is_pinned_while_it_is_mapped_and_only_then(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = MagicMock()
    driver.cudaHostRegister.return_value = 0
    monkeypatch.setattr(arena_module, "_cuda", lambda: driver)
    arena = Arena()
    assert arena.reserve(1000, pin_for=DEVICE)
    first = arena.tensor(0, (1,), torch.uint8).data_ptr()
    assert arena.reserve(2 * arena.size_bytes, pin_for=DEVICE)
    second = arena.tensor(0, (1,), torch.uint8).data_ptr()
    size = arena.size_bytes
    arena.close()
    names = [(name, arguments[0]) for name, arguments, _ in driver.mock_calls]
    assert names == [
        ("cudaHostRegister", first),
        ("cudaHostUnregister", first),
        ("cudaHostRegister", second),
        ("cudaHostUnregister", second),
    ]
    assert driver.cudaHostRegister.call_args.args[1:] == (size, 1)
    assert calls == ["turn to device 3", "turn back"] * 2


def test_a_failure_to_pin_is_left_in_a_thread_that_runs_nothing_else(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    driver = MagicMock()

    def fail(*arguments: int) -> int:
        threads.append(threading.current_thread())
        calls.append("pin")
        return 2

    driver.cudaHostRegister = fail
    monkeypatch.setattr(arena_module, "_cuda", lambda: driver)
    arena = Arena()
    assert not arena.reserve(1000, pin_for=DEVICE)
    assert threads[0] is not threading.current_thread() and not threads[0].is_alive()
    assert calls == ["turn to device 3", "pin", "turn back"]
    arena.close()


def test_only_copies_from_the_own_device_go_unwaited() -> None:
    class Target:
        waited: list[bool] = []

        def copy_(self, source: Any, *, non_blocking: bool) -> None:
            self.waited.append(not non_blocking)

    stager = MagicMock()
    stager.means.device, stager._arena.tensor.return_value = DEVICE, Target()
    sources = [MagicMock(device=torch.device(name)) for name in ("cuda:3", "cuda:1", "cpu")]
    SharedMemoryStager._copy(stager, [(source, MagicMock()) for source in sources])
    assert Target.waited == [False, True, True]


def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = MagicMock()
    driver.cudaHostRegister.return_value = 2
    monkeypatch.setattr(arena_module, "_cuda", lambda: driver)
    monkeypatch.setattr(means, "find_means", lambda options: means.Means(device=DEVICE, pins=True))
    stager = SharedMemoryStager(
        StagingOptions(),
        group=None,
        timeout=timedelta(seconds=30),
        find_can_wait=lambda: lambda key, tensor: True,
        describe_shard=describe,
        program="a.program",
    )
    stager._process = MagicMock()
    stager.prepare({"w": torch.ones(3)})
    stager.take_room()
    assert stager.stage({}).result(30).request.failure is None
    assert "could not be pinned" in caplog.text
    stager.close()
    driver.cudaHostUnregister.assert_not_called()
