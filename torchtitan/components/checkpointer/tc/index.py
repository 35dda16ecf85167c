"""Tell what lies on disk in the format of torch_checkpointing, by names alone.

Nothing of that package is imported, so that a run of another back end knows its checkpoints too. A
save is written into ``tmp_step-<n>`` and renamed when every rank is done, so ``step-<n>`` is whole.

    step-7/metadata.pkl         what lies where, written by rank 0; the marker
    step-7/<state key>_<r>.pt   what rank r wrote of one part of the state
"""

import re
from collections.abc import Set

from torchtitan.components.checkpointer.discovery import HF_MARKER, Kind
from torchtitan.components.checkpointer.storage import CheckpointStorage
from torchtitan.tools.logging import logger

MARKER = "metadata.pkl"
"""A directory under its final name that has it is complete."""

TEMP_DIR_PREFIX = "tmp_"
"""What a checkpoint's name begins with until it is renamed."""

_ITEM_NAME = re.compile(r"(?P<key>[A-Za-z0-9_-]+)_[0-9]+\.pt", re.ASCII)


def step_dir_pattern(temp_dir_prefix: str) -> re.Pattern[str]:
    """What the names of our directories match as a whole: groups ``tmp`` (may be None), ``step``."""
    return re.compile(
        rf"\A(?P<tmp>{re.escape(temp_dir_prefix)})?step-(?P<step>0|[1-9][0-9]*)\Z", re.ASCII
    )


def parse_entry(name: str, pattern: re.Pattern[str]) -> tuple[int, bool] | None:
    """(step, is a staging name) of a directory name; None when it is not one of ours."""
    match = pattern.fullmatch(name)
    return None if match is None else (int(match["step"]), bool(match["tmp"]))


def is_complete(storage: CheckpointStorage, checkpoint_id: str) -> bool:
    """Whether the metadata, or the index of a Hugging Face export, is in the directory."""
    return any(storage.isfile(f"{checkpoint_id}/{marker}") for marker in (MARKER, HF_MARKER))


def kind_of(storage: CheckpointStorage, checkpoint_id: str, other_keys: Set[str]) -> Kind:
    """What a complete checkpoint holds, judged by the names of its files.

    Args:
        other_keys: state keys besides the model's. With none of them everything is full.
    """
    marker = f"{checkpoint_id}/{MARKER}"
    if not storage.isfile(marker):
        if storage.isfile(f"{checkpoint_id}/{HF_MARKER}"):
            return Kind.MODEL_ONLY
        logger.warning(f"The index {checkpoint_id}/{MARKER} is gone. The rest is left in place.")
        return Kind.UNREADABLE
    if _is_empty(storage, marker):
        logger.warning(f"The index {marker} cannot be read: it is empty. It is left in place.")
        return Kind.UNREADABLE
    items = (_ITEM_NAME.fullmatch(name) for name in storage.listdir(checkpoint_id))
    saved = {item["key"] for item in items if item is not None}
    return Kind.FULL if not other_keys or other_keys & saved else Kind.MODEL_ONLY


def _is_empty(storage: CheckpointStorage, path: str) -> bool:
    # Only a storage that moves directories can measure, and some measure directories alone.
    measure = getattr(storage, "size_bytes", None)
    try:
        return measure is not None and measure(path) == 0
    except (FileNotFoundError, NotADirectoryError):
        return False
