"""What a run loads before its first step. A value; no tensor is read here.

The run's own checkpoints come first, because a restarted run must go on rather than begin again;
what the run was told to begin from counts only while there is nothing of its own.

    load_step given   that checkpoint or an error, never another one
    load_step -1      newest full one > step-0 seed > initial_load_path > HF assets > nothing

Rank 0 asks ``choose_source`` and every rank follows the answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpointer.discovery import Kind, OwnFolder
from torchtitan.components.checkpointer.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from torchtitan.components.checkpointer.storage import CheckpointStorage


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the settings ask to load."""

    load_step: int
    """A step of the run's own folder, or -1 for the newest full one."""

    initial_load_path: str | None
    """Where a run without checkpoints of its own begins, or None."""

    initial_load_model_only: bool
    """Take only the weights from there."""

    initial_load_in_hf: bool
    """It is in Hugging Face format."""

    initial_load_in_hf_quantized: bool
    """Its weights are quantized."""

    hf_assets_path: str | None
    """Where the Hugging Face weights are when no ``initial_load_path`` is given, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One checkpoint to load, and why it was chosen."""

    path: str
    reason: str
    step: int | None = None
    """Step of the run's own history, or None when the run begins from somewhere else."""

    model_only: bool = False
    from_hf: bool = False
    from_quantized: bool = False


def find_source(request: Request, own: OwnFolder, storage: CheckpointStorage) -> Source | None:
    """``choose_source``, checked to be a directory.

    Raises:
        CheckpointNotFoundError, ValueError: as ``choose_source``; ValueError also when the path
            chosen is no directory.
    """
    source = choose_source(request, own)
    if source is not None and not storage.isdir(source.path):
        raise ValueError(
            f"{source.reason} names {source.path}, which is not a directory; it must be one "
            "checkpoint, that is a step-N directory."
        )
    return source


def choose_source(request: Request, own: OwnFolder) -> Source | None:
    """The checkpoint to load, or None to start from nothing.

    Raises:
        CheckpointNotFoundError: the step asked for is not there, or the folder holds only
            checkpoints that a run cannot go on from.
        ValueError: ``initial_load_path`` or the Hugging Face assets were needed and not given.
    """
    if request.load_step != -1:
        return _explicit(request.load_step, own)
    newest, unreadable = own.newest_full()
    if newest is not None:
        skipped = f", passing over unreadable steps {unreadable}" if unreadable else ""
        return _own(own, newest, f"newest full checkpoint{skipped}")
    if unreadable:
        # Nothing older to fall back on. Starting afresh would bury what is there, so the load
        # itself gets to say what is wrong with it.
        return _own(own, unreadable[0], "the only candidate, although its index cannot be read")
    if 0 in own.step_paths:
        return _own(own, 0, "seed checkpoint")
    if own.step_paths:
        raise CheckpointNotFoundError(
            f"{own.path} holds only model-only checkpoints (steps {sorted(own.step_paths)}); a run "
            "needs a full one to go on. To train on from such weights pass "
            f"--checkpoint.initial_load_path={own.step_paths[max(own.step_paths)]} (as an absolute "
            "path) together with a new --checkpoint.folder; to begin again choose a new "
            "--checkpoint.folder. Set --checkpoint.no-last-save-model-only to save full ones."
        )
    return _initial(request)


def _explicit(step: int, own: OwnFolder) -> Source:
    if step not in own.step_paths:
        raise CheckpointNotFoundError(
            f"--checkpoint.load_step={step} was asked for, but {own.path} holds no complete "
            f"checkpoint of that step; complete steps: {_listed(own.step_paths)}. Set "
            "--checkpoint.load_step to one of them, or to -1 for the newest full one."
        )
    if step != 0 and own.kind_of(own.step_paths[step]) is Kind.MODEL_ONLY:
        raise CheckpointNotFoundError(
            f"--checkpoint.load_step={step} was asked for, but {own.step_paths[step]} holds only "
            "the model, and a run needs optimizer and data position to go on. Load its weights "
            "with --checkpoint.initial_load_path and a new --checkpoint.folder instead."
        )
    return _own(own, step, f"--checkpoint.load_step={step}")


def _own(own: OwnFolder, step: int, reason: str) -> Source:
    # Step 0 is a seed: weights to begin from, whatever else was saved beside them.
    return Source(path=own.step_paths[step], step=step, model_only=step == 0, reason=reason)


def _initial(request: Request) -> Source | None:
    model_only, from_hf = request.initial_load_model_only, request.initial_load_in_hf
    if request.initial_load_path:
        path, reason = request.initial_load_path, "--checkpoint.initial_load_path"
    elif from_hf:
        if not request.hf_assets_path:
            raise ValueError(
                "--checkpoint.initial_load_in_hf needs weights to load, but neither "
                "--checkpoint.initial_load_path nor --hf_assets_path names any; set one of them."
            )
        path, reason = request.hf_assets_path, "--hf_assets_path"
    else:
        return None
    return Source(
        path=path,
        reason=reason,
        model_only=model_only,
        from_hf=from_hf,
        from_quantized=request.initial_load_in_hf_quantized,
    )


def _listed(steps: Iterable[int]) -> str:
    return str(sorted(steps) or "none")


def require_step(source: Source, train_state: Any) -> None:
    """Check that ``train_state``, just loaded from ``source``, is of the step in its name.

    A directory that was copied or renamed would otherwise be resumed from again and again, ahead
    of everything the run saves.

    Raises:
        CheckpointMismatchError: it is of another step.
    """
    if not source.step or not isinstance(train_state, Stateful):
        return
    saved = train_state.state_dict().get("step", source.step)
    if saved != source.step:
        raise CheckpointMismatchError(
            f"{source.path} holds the checkpoint of step {saved}, not of step {source.step}; rename "
            "the directory to what it holds, or move it away."
        )
