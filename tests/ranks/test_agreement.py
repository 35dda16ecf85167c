"""What ranks tell each other arrives whole, short or long, and short messages with one meeting."""

from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer import agreement
from torchtitan.components.checkpointer.agreement import gather, own_group, rank_zero_decides

from tests.ranks.pool import run_on_ranks
from tests.ranks.trouble import noted_collectives

pytestmark = pytest.mark.ranks

WORLD = 3
MEETINGS = ("all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")
ROOM = agreement._PIECE_BYTES
# Around what fits into a piece together with its length and what pickle adds, and far beyond.
SIZES = [0, 1, *range(ROOM - 48, ROOM + 16), 3 * ROOM, 1_000_003]


def message(rank: int, size_bytes: int) -> bytes:
    return bytes([rank + 1]) * size_bytes


def tell_each_other() -> dict[str, Any]:
    group, rank = own_group(60), dist.get_rank()
    told: dict[str, Any] = {}
    for where in (None, group):
        for size in SIZES:
            # Of one rank the long one, of the others something short; and of all of them.
            sizes = [[size if one == speaker else 7 for one in range(WORLD)] for speaker in (0, 2)]
            for each in (*sizes, [size] * WORLD):
                wanted = [message(one, each[one]) for one in range(WORLD)]
                assert gather(message(rank, each[rank]), where) == wanted, (size, each)
            said = rank_zero_decides(lambda size=size: message(9, size), where)
            assert said == message(9, size), size
    for name, size in (("short", 1000), ("long", 5000)):
        with noted_collectives(MEETINGS) as told[f"gather {name}"]:
            gather(message(rank, size), group)
        with noted_collectives(MEETINGS) as told[f"decide {name}"]:
            rank_zero_decides(lambda size=size: message(1, size), group)
    return told


def refuse_at_length() -> Any:
    def refuse() -> None:
        raise FileNotFoundError("not there: " + "x" * 3 * ROOM)

    def unpicklable() -> Any:
        return lambda: None

    found = []
    for decide in (refuse, unpicklable):
        try:
            rank_zero_decides(decide)
        except Exception as error:
            found.append((type(error), len(str(error)) > 3 * ROOM))
    return found, gather(dist.get_rank())


def test_messages_of_every_length_arrive_and_short_ones_take_one_meeting() -> None:
    for told in run_on_ranks(WORLD, tell_each_other):
        assert told == {
            "gather short": ["all_gather"],
            "decide short": ["broadcast"],
            "gather long": ["all_gather"] * 2,
            "decide long": ["broadcast"] * 2,
        }


def test_what_rank_0_cannot_say_or_says_at_length_fails_on_all_ranks() -> None:
    for found, ranks in run_on_ranks(WORLD, refuse_at_length):
        assert found[0] == (FileNotFoundError, True)
        assert len(found) == 2 and issubclass(found[1][0], Exception)
        assert ranks == [0, 1, 2]
