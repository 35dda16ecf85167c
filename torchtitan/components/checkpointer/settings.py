"""The settings of checkpoints, and which of them contradict each other. Pure; reads no disk.

Config.__post_init__ -> violations -> reject each
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torchtitan.components.checkpointer.state import LR_SCHEDULER, MODEL, OPTIMIZER
from torchtitan.config import Configurable
from torchtitan.tools import filesystem

_MAX_FAILED_SAVES = 3


@dataclass(kw_only=True, slots=True)
class CheckpointSettings(Configurable.Config):
    """What every checkpoint manager can be told; a manager's own Config derives from this one."""

    enable: bool = False
    """Save and load checkpoints. Without it a killed run starts over."""

    folder: str = "checkpoint"
    """Directory for the checkpoints, inside --dump_folder unless it is absolute."""

    interval: int = 500
    """Save after every this many steps."""

    initial_load_path: str | None = None
    """Checkpoint (one step-N directory, absolute path) that a run without checkpoints of its
    own begins from. Once the run has saved, its own checkpoints come first."""

    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path; otherwise optimizer, data position and
    step as well."""

    initial_load_in_hf: bool = False
    """The initial checkpoint is in Hugging Face format."""

    initial_load_in_hf_quantized: bool = False
    """The initial Hugging Face weights are quantized."""

    last_save_model_only: bool = True
    """Save only the weights after the last step. Such a checkpoint cannot be resumed from;
    switch it off to be able to train for more steps later."""

    last_save_in_hf: bool = False
    """Write the last save in Hugging Face format."""

    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Dtype of the floating-point weights in a model-only last save."""

    keep_latest_k: int = 10
    """Delete all but the newest this many checkpoints; 0 keeps all of them, 1 is refused."""

    keep_every: int = 0
    """Keep the checkpoints whose step is a multiple of this for ever, beside those of keep_latest_k;
    0 keeps no more than these. Without effect where keep_latest_k is 0, which keeps all. A file
    named PIN in its directory keeps a single checkpoint."""

    on_save_failure: Literal["raise", "warn"] = "raise"
    """What to do when a save fails. raise: end the run at the next step. warn: say so, train on and
    try again when the next save is due."""

    max_failed_saves: int = _MAX_FAILED_SAVES
    """With on_save_failure at warn, end the run when this many saves in a row have failed."""

    lock_timeout_seconds: int = 300
    """Seconds without a sign of life after which the lock that a run on another machine holds on the
    folder counts as left behind. A run on this machine is looked for, and not waited for."""

    load_step: int = -1
    """Step to resume from; -1 takes the newest full checkpoint, 0 the seed checkpoint."""

    verify: Literal["full", "size", "off"] = "full"
    """How a checkpoint is checked while it is loaded. full: every byte that is read, by the digests
    made when it was saved. size: that all its files are there, with their sizes. off: not at all."""

    on_damaged: Literal["fallback", "fail"] = "fallback"
    """What to do when the newest full checkpoint turns out to be damaged. fallback: say so, leave it
    in place and take the newest one before it that is not. fail: stop. A load_step or an
    initial_load_path that is damaged always stops the run."""

    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts not to restore, comma separated: optimizer, lr_scheduler, dataloader,
    train_state, rank_state."""

    enable_first_step_checkpoint: bool = False
    """Save after step 1 too, to find out early whether saving works."""

    create_seed_checkpoint: bool = False
    """Save the freshly initialised weights as step 0 in one process and stop, so that runs
    in different layouts can begin from the same weights."""

    load_only: bool = False
    """Load but never save."""

    timeout_seconds: int = 600
    """Seconds to wait for a checkpoint at most: for the save in flight, for staging, for the other
    ranks while all read or write, for deletions at the end. Choose it above the time that the
    slowest save takes."""


def violations(settings: CheckpointSettings) -> Iterator[str]:
    """One sentence for each rule that ``settings`` break."""
    yield from _numbers(settings)
    yield from _choices(settings)
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
    if settings.keep_every < 0:
        yield (
            f"checkpoint.keep_every={settings.keep_every} cannot be negative; 0 keeps only the newest "
            "keep_latest_k checkpoints."
        )
    if settings.max_failed_saves < 1:
        yield (
            f"checkpoint.max_failed_saves={settings.max_failed_saves} must be at least 1 save; to end the "
            "run with the first one pass --checkpoint.on_save_failure raise."
        )
    elif settings.on_save_failure == "raise" and settings.max_failed_saves != _MAX_FAILED_SAVES:
        yield (
            f"checkpoint.max_failed_saves={settings.max_failed_saves} has no effect with on_save_failure "
            "raise, where the first save that fails ends the run: leave it out, or pass "
            "--checkpoint.on_save_failure warn."
        )
    if settings.lock_timeout_seconds < 10:
        yield (
            f"checkpoint.lock_timeout_seconds={settings.lock_timeout_seconds} must be at least 10: a run "
            "that is merely slow would lose its folder."
        )
    if settings.timeout_seconds <= 0:
        yield (
            f"checkpoint.timeout_seconds={settings.timeout_seconds} must be greater than 0 seconds; "
            "to wait as good as for ever choose a large one."
        )
    if problem := unusable_load_step(settings.load_step):
        yield problem


def _choices(settings: CheckpointSettings) -> Iterator[str]:
    # The command line offers nothing else; a recipe may write anything.
    choices = {
        "verify": ("full", "size", "off"),
        "on_damaged": ("fallback", "fail"),
        "on_save_failure": ("raise", "warn"),
    }
    for name, known in choices.items():
        if getattr(settings, name) not in known:
            yield f"Invalid checkpoint.{name} {getattr(settings, name)!r}: choose one of {list(known)}."


def unusable_load_step(step: int) -> str | None:
    """What is wrong with ``step`` as a ``load_step``; None when it may be there."""
    if step >= -1:
        return None
    return (
        f"checkpoint.load_step={step} is not a step: give a step that was saved, 0 for the seed "
        "checkpoint, or -1 for the newest."
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
