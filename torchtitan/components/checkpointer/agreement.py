"""Let rank 0 look at the disk and every rank follow; let ranks tell each other what each of them knows.

On a shared folder two ranks can list different contents a moment apart. What a rank decides by
itself would then send ranks to different checkpoints, or leave one waiting for the others.

Training waits while ranks meet. So what is said is sent in one piece of a size that all know; only where
something is longer than that do they meet once more.
"""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import cast, TypeVar

import torch
import torch.distributed as dist

from torchtitan.tools.errors import portable

T = TypeVar("T")

_PIECE_BYTES = 4096
"""What the ranks say before a save takes about 1,000; each rank gets a piece of every other one."""

_LENGTH_BYTES = 8


def rank_zero_decides(decide: Callable[[], T], group: "dist.ProcessGroup | None" = None) -> T:
    """The value of ``decide()`` on rank 0, on every rank; what it raises, every rank raises.

    A collective over ``group`` (default: all ranks) where a process group exists, otherwise a
    plain call. The value must survive pickling.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return decide()
    own_value: T | None = None
    own_error: Exception | None = None
    said: bytes | None = None
    if dist.get_rank() == 0:
        try:
            own_value = decide()
            said = pickle.dumps((own_value, None))
        except Exception as raised:  # whatever it is, every rank raises it
            own_error = raised
            said = pickle.dumps((None, portable(raised, "on rank 0")))
    try:
        heard = _said_by_rank_zero(said, group)
    except RuntimeError:
        # The other ranks may have given up by now; why they had to wait says more than that.
        if own_error is None:
            raise
        heard = b""
    if own_error is not None:
        raise own_error
    value, error = (own_value, None) if said is not None else pickle.loads(heard)
    if error is not None:
        raise error
    # Rank 0 put T here whenever it did not put an error.
    return value  # pyrefly: ignore[bad-return]


def own_group(timeout_seconds: float) -> dist.ProcessGroup:
    """A gloo group of all ranks beside training's, whose collectives may come in any order. Collective."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    # A cast, because new_group answers with a number on ranks that are not members.
    return cast(dist.ProcessGroup, group)


def renewed(group: "dist.ProcessGroup | None", timeout_seconds: float) -> dist.ProcessGroup:
    """Another ``own_group`` in the place of ``group``, which nobody uses any more. Collective."""
    dist.destroy_process_group(group)
    return own_group(timeout_seconds)


def gather(value: T, group: "dist.ProcessGroup | None" = None) -> list[T]:
    """The ``value`` of every rank, in rank order; just this one without a process group."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    return [pickle.loads(each) for each in _said_by_all(pickle.dumps(value), group)]


def _said_by_rank_zero(said: bytes | None, group: "dist.ProcessGroup | None") -> bytes:
    """What rank 0 has ``said``, on every rank."""
    if not _takes_pieces(group):
        whole = [said]
        dist.broadcast_object_list(whole, src=0, group=group)
        return whole[0] or b""
    piece = _piece(said or b"")
    dist.broadcast(piece, src=0, group=group)
    length, content = _opened(piece)
    if length > len(content):
        rest = _as_tensor(bytes(length) if said is None else said)
        dist.broadcast(rest, src=0, group=group)
        content = rest.numpy().tobytes()
    return content


def _said_by_all(said: bytes, group: "dist.ProcessGroup | None") -> list[bytes]:
    """What every rank has ``said``, in rank order."""
    if not _takes_pieces(group):
        everything = [said] * dist.get_world_size(group)
        dist.all_gather_object(everything, said, group=group)
        return everything
    found = [_opened(piece) for piece in _of_all(_piece(said), group)]
    longest = max(length for length, _ in found)
    if all(length == len(content) for length, content in found):
        return [content for _, content in found]
    contents = _of_all(_as_tensor(said.ljust(longest, b"\0")), group)
    pairs = zip(contents, found, strict=True)
    return [content.numpy().tobytes()[:length] for content, (length, _) in pairs]


def _takes_pieces(group: "dist.ProcessGroup | None") -> bool:
    """Whether memory of the CPU can be sent over ``group`` as it is."""
    return dist.get_backend(group) == dist.Backend.GLOO


def _of_all(own: torch.Tensor, group: "dist.ProcessGroup | None") -> list[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return found


def _piece(said: bytes) -> torch.Tensor:
    """The length of what is ``said``, and as much of it as there is place for."""
    begin = len(said).to_bytes(_LENGTH_BYTES, "little") + said[: _PIECE_BYTES - _LENGTH_BYTES]
    return _as_tensor(begin.ljust(_PIECE_BYTES, b"\0"))


def _opened(piece: torch.Tensor) -> tuple[int, bytes]:
    """The length of what is said, and what of it is in the ``piece``."""
    text = piece.numpy().tobytes()
    length = int.from_bytes(text[:_LENGTH_BYTES], "little")
    return length, text[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
