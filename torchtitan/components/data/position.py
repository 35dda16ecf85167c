"""Write the loader's position into a checkpoint and read it back. Pure.

A state is the same on all ranks, and its keys never change with progress, because a checkpoint is
read into the state of a freshly built loader. The one fact to know: the position in a corpus is a
number, the same for any number of ranks, and the end of an epoch is written as the start of the next;
the place in a stream is text of its own, and is kept with the number of ranks.

    position     <-> {"version", "epoch", "next_row", "fingerprint": {...}}
    stream place <-> {"version", "next_row", "stream": "<json>", "dp_world_size", "fingerprint": {...}}
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from torchtitan.components.data.types import DataFingerprint, StreamPoint

STATE_VERSION = 1
_START_ANEW = (
    "Restore it to what it was, or start the data anew with "
    "--checkpoint.exclude_from_loading dataloader."
)


def encode_position(position: int, num_rows: int, fingerprint: DataFingerprint) -> dict[str, Any]:
    epoch, next_row = divmod(position, num_rows)
    return {
        "version": STATE_VERSION,
        "epoch": epoch,
        "next_row": next_row,
        "fingerprint": asdict(fingerprint),
    }


def decode_position(
    state: dict[str, Any] | None, num_rows: int, fingerprint: DataFingerprint
) -> int:
    """The position that ``state`` holds; an empty state or None is the beginning.

    Raises ValueError for a state of another version, of other data, or out of range.
    """
    if not state:
        return 0
    _refuse_misfits(state, {"version", "epoch", "next_row", "fingerprint"}, fingerprint)
    epoch, next_row = state["epoch"], state["next_row"]
    if epoch < 0 or not 0 <= next_row < num_rows:
        raise ValueError(
            f"the saved data position is out of range: epoch {epoch}, row {next_row} of "
            f"{num_rows}. {_START_ANEW}"
        )
    return epoch * num_rows + next_row


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A place in a stream, and how many rows lie before it over all ranks."""

    num_rows: int
    point: StreamPoint


def encode_stream_position(
    position: StreamPosition, dp_world_size: int, fingerprint: DataFingerprint
) -> dict[str, Any]:
    return {
        "version": STATE_VERSION,
        "next_row": position.num_rows,
        # As text: its inner structure may change with progress, and keys of a checkpoint may not.
        "stream": json.dumps(position.point),
        "dp_world_size": dp_world_size,
        "fingerprint": asdict(fingerprint),
    }


def decode_stream_position(
    state: dict[str, Any] | None,
    start: StreamPosition,
    dp_world_size: int,
    fingerprint: DataFingerprint,
    *,
    allow_changed_degree: bool,
) -> StreamPosition:
    """The place that ``state`` holds; an empty state or None is ``start``.

    Raises ValueError for a state of another version or of other data, and unless it is allowed for
    one of another number of ranks.
    """
    if not state:
        return start
    keys = {"version", "next_row", "stream", "dp_world_size", "fingerprint"}
    _refuse_misfits(state, keys, fingerprint)
    saved = state["dp_world_size"]
    if saved != dp_world_size and not allow_changed_degree:
        raise ValueError(
            f"the saved place in the stream is of a run with data-parallel degree {saved}, this one has "
            f"{dp_world_size}. The order of the rows stays the same if the stream gives what it gave "
            "before, which cannot be checked; if you know that it does, add "
            f"--dataloader.allow-changed-degree, else run on {saved} data-parallel ranks."
        )
    return StreamPosition(state["next_row"], json.loads(state["stream"]))


def _refuse_misfits(
    state: dict[str, Any], expected: set[str], fingerprint: DataFingerprint
) -> None:
    if state.get("version") != STATE_VERSION:
        raise ValueError(
            f"the saved data position has version {state.get('version')!r}, this program reads "
            f"version {STATE_VERSION}. {_START_ANEW}"
        )
    if isinstance(saved := state.get("fingerprint"), dict):
        _refuse_changes(saved, asdict(fingerprint))
    if set(state) != expected:
        raise ValueError(
            f"the saved data position was written by another program: expected the keys "
            f"{sorted(expected)}, found {sorted(state)}. {_START_ANEW}"
        )


def _refuse_changes(saved: dict[str, str], present: dict[str, str]) -> None:
    changed = [name for name in present if saved.get(name) != present[name]]
    if changed:
        values = "; ".join(
            f"{name}: saved {saved.get(name)!r}, now {present[name]!r}" for name in sorted(changed)
        )
        raise ValueError(
            f"the saved data position belongs to other data, since the {' and the '.join(changed)} "
            f"changed ({values}). {_START_ANEW}"
        )
