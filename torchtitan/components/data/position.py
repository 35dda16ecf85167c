"""Write the loader's position into a checkpoint and read it back. Pure.

A state is the same on all ranks and for any number of them, and its keys never change with
progress, because a checkpoint is read into the state of a freshly built loader. The one fact to
know: the end of an epoch is written as the start of the next.

    position <-> {"version", "epoch", "next_row", "fingerprint": {...}}
"""

from dataclasses import asdict
from typing import Any

from torchtitan.components.data.types import DataFingerprint

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
    if state.get("version") != STATE_VERSION:
        raise ValueError(
            f"the saved data position has version {state.get('version')!r}, this program reads "
            f"version {STATE_VERSION}. {_START_ANEW}"
        )
    expected = {"version", "epoch", "next_row", "fingerprint"}
    if set(state) != expected:
        raise ValueError(
            f"the saved data position was written by another program: expected the keys "
            f"{sorted(expected)}, found {sorted(state)}. {_START_ANEW}"
        )
    _refuse_changes(state["fingerprint"], asdict(fingerprint))
    epoch, next_row = state["epoch"], state["next_row"]
    if epoch < 0 or not 0 <= next_row < num_rows:
        raise ValueError(
            f"the saved data position is out of range: epoch {epoch}, row {next_row} of "
            f"{num_rows}. {_START_ANEW}"
        )
    return epoch * num_rows + next_row


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
