"""A broken setting is an error at once, unless somebody collects."""

import threading

import pytest
from torchtitan.config.violations import collecting, reject


def test_reject_raises_when_nobody_collects():
    with pytest.raises(ValueError, match="^too small$"):
        reject("too small")


def test_collecting_gathers_each_message_once_in_order():
    with collecting() as found:
        for message in ("b", "a", "b"):
            reject(message)
    assert found == ["b", "a"]
    with pytest.raises(ValueError):
        reject("after the block")


def test_an_inner_block_keeps_its_messages_to_itself():
    with collecting() as outer:
        reject("first")
        with collecting() as inner:
            reject("second")
        reject("third")
    assert (outer, inner) == (["first", "third"], ["second"])


def test_another_thread_is_not_part_of_the_block():
    errors = []

    def build() -> None:
        try:
            reject("elsewhere")
        except ValueError as error:
            errors.append(error)

    with collecting() as found:
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert len(errors) == 1 and found == []
