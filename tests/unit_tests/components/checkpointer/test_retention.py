import queue
from unittest.mock import patch

from hypothesis import given, strategies as st
from torchtitan.components.checkpointer import retention
from torchtitan.components.checkpointer.base import purge_thread
from torchtitan.components.checkpointer.retention import expired


@given(st.lists(st.integers()), st.integers(0, 20))
def test_what_expires_is_the_oldest_and_k_stay(items: list[int], keep: int) -> None:
    gone = expired(items, keep)
    assert gone == items[: len(gone)]
    assert len(items) - len(gone) == min(keep, len(items))


def test_choosing_leaves_the_list_alone() -> None:
    items = (1, 2, 3)
    assert expired(items, 2) == [1]
    assert expired(items, 0) == [1, 2, 3]


def test_the_thread_outlives_a_failure_and_ends_at_none() -> None:
    calls = []

    def remove(path: str) -> None:
        calls.append(path)
        if path == "fails":
            raise OSError("busy")

    waiting: queue.Queue[str | None] = queue.Queue()
    for item in ("fails", "succeeds", None, "ignored"):
        waiting.put(item)
    with patch.object(retention, "logger") as logger:
        purge_thread(waiting, remove)
    assert calls == ["fails", "succeeds"]
    assert waiting.get_nowait() == "ignored"
    (message,) = logger.warning.call_args.args
    assert "fails" in message and "busy" in message
