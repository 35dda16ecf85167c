"""Which checkpoint settings contradict themselves or each other. Pure; reads no disk.

Config.__post_init__ -> violations -> reject each
"""

from collections.abc import Iterator
from typing import Protocol

from torchtitan.components.checkpointer.state import LR_SCHEDULER, MODEL, OPTIMIZER
from torchtitan.tools import filesystem


class CheckpointSettings(Protocol):
    """The fields that the rules look at."""

    folder: str
    interval: int
    initial_load_path: str | None
    initial_load_model_only: bool
    initial_load_in_hf: bool
    initial_load_in_hf_quantized: bool
    last_save_model_only: bool
    last_save_in_hf: bool
    keep_latest_k: int
    load_step: int
    exclude_from_loading: list[str]


def violations(settings: CheckpointSettings) -> Iterator[str]:
    """One sentence for each rule that ``settings`` break."""
    yield from _numbers(settings)
    yield from _exclusions(settings.exclude_from_loading)
    yield from _initial_load(settings)
    yield from _last_save(settings)


def _numbers(settings: CheckpointSettings) -> Iterator[str]:
    if not settings.folder.strip():
        yield (
            f"checkpoint.folder={settings.folder!r} cannot be empty: checkpoints need a directory "
            "of their own; leave the option out for the default."
        )
    if settings.interval < 1:
        yield (
            f"checkpoint.interval={settings.interval} must be at least 1 step; to save less often "
            "choose a larger one, to save nothing pass --checkpoint.load_only."
        )
    if settings.keep_latest_k < 0:
        yield (
            f"checkpoint.keep_latest_k={settings.keep_latest_k} cannot be negative; 0 keeps every "
            "checkpoint."
        )
    if settings.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k=1 would leave nothing to resume from while the next one is "
            "written: at least 2 checkpoint replicas are needed, or 0 to keep all."
        )
    if settings.load_step < -1:
        yield (
            f"checkpoint.load_step={settings.load_step} is not a step: give a step that was saved, "
            "0 for the seed checkpoint, or -1 for the newest."
        )


def _exclusions(excluded: list[str]) -> Iterator[str]:
    if MODEL in excluded:
        yield (
            "checkpoint.exclude_from_loading names the model: the model key shouldn't be in "
            "exclude_from_loading. Without its weights there is nothing to go on from."
        )
    if OPTIMIZER in excluded and LR_SCHEDULER not in excluded:
        yield (
            "checkpoint.exclude_from_loading names optimizer without lr_scheduler: the learning "
            "rate is kept in the optimizer's state, so the schedule alone would not apply it. "
            "Exclude both, or neither."
        )


def _initial_load(settings: CheckpointSettings) -> Iterator[str]:
    path = settings.initial_load_path
    if path and not (path.startswith("/") or filesystem.is_remote(path)):
        yield (
            f"checkpoint.initial_load_path={path!r} must be an absolute path or a remote URI, and "
            "name one checkpoint (a step-N directory), not the folder around it."
        )
    if settings.initial_load_in_hf and not settings.initial_load_model_only:
        yield (
            "checkpoint.initial_load_in_hf requires initial_load_model_only: Hugging Face files "
            "hold weights and no optimizer state."
        )
    if settings.initial_load_in_hf_quantized and not (settings.initial_load_in_hf and path):
        yield (
            "checkpoint.initial_load_in_hf_quantized requires initial_load_in_hf and an "
            "initial_load_path to the quantized weights."
        )
    if settings.initial_load_in_hf and path and filesystem.is_remote(path):
        yield (
            f"checkpoint.initial_load_in_hf is not supported with a remote initial_load_path "
            f"({path}); copy the files to a local disk first."
        )


def _last_save(settings: CheckpointSettings) -> Iterator[str]:
    if settings.last_save_in_hf and not settings.last_save_model_only:
        yield (
            "checkpoint.last_save_in_hf requires last_save_model_only=True: Hugging Face files "
            "hold weights alone."
        )
    if settings.last_save_in_hf and filesystem.is_remote(settings.folder):
        yield (
            "checkpoint.last_save_in_hf is not supported with a remote folder "
            f"({settings.folder}); use a local one."
        )
