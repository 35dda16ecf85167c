"""Where a run starts from. A value; no tensor is read here.

The run's own checkpoints come first, because a restarted run must go on rather than begin again;
what the run was told to begin from counts only while there is nothing of its own.

    load_step given   that checkpoint or an error, never another one
    load_step -1      newest full one > step-0 seed > initial_load_path > HF assets > nothing

What turned out to be damaged is not chosen again; if nothing full is left then, it is an error, since a
seed or anything else would be to begin again.

A checkpoint of another back end that would be the one to load is an error: this run cannot read it,
and to pass it over would be to train its steps once more.

Rank 0 asks ``find_start`` and every rank follows the answer, which comes with the one line to log.
docs/checkpoint.md holds the whole table.
"""

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpointer.discovery import Finder, Kind, OwnFolder, step_name
from torchtitan.components.checkpointer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.formats import MARKERS
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify
from torchtitan.components.checkpointer.settings import unusable_load_step
from torchtitan.components.checkpointer.source_text import (
    all_damaged,
    FRESH_START,
    is_inside,
    listed,
    this_run_cannot,
    those_of_others,
    what_does_not_count,
    what_else_there_is,
    what_was_passed_over,
    why_incomplete,
)
from torchtitan.components.checkpointer.storage import MovingStorage


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

    on_damaged: str = "fallback"
    """Whether what is damaged is passed over: "fallback" or "fail"."""

    def initial_flags(self) -> list[str]:
        """The flags that ask for something to begin from, as they are typed."""
        flags = {
            f"--checkpoint.initial_load_path {self.initial_load_path}": self.initial_load_path,
            "--checkpoint.no-initial-load-model-only": not self.initial_load_model_only,
            "--checkpoint.initial_load_in_hf": self.initial_load_in_hf,
            "--checkpoint.initial_load_in_hf_quantized": self.initial_load_in_hf_quantized,
        }
        return [flag for flag, is_set in flags.items() if is_set]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One checkpoint to load."""

    path: str
    step: int | None = None
    """Step of the run's own history, or None when the run begins from somewhere else."""

    model_only: bool = False
    from_hf: bool = False
    from_quantized: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run starts from."""

    source: Source | None
    """What to load, or None to begin from nothing."""

    line: str
    """What was chosen, why, what was passed over and what was ignored."""


def falls_back(request: Request, source: Source) -> bool:
    """Whether another checkpoint is taken when ``source`` is damaged."""
    is_newest_of_own = request.load_step == -1 and source.step is not None
    return is_newest_of_own and request.on_damaged == "fallback"


def find_start(request: Request, own: OwnFolder, finder: Finder) -> Start:
    """``choose_start``, with a look at what it chose outside of the run's own folder.

    Raises:
        CheckpointNotFoundError, CheckpointMismatchError, CheckpointReadError, ValueError: as
            ``choose_start``; ValueError also when the path chosen is not one checkpoint of the kind
            asked for.
    """
    start = choose_start(request, own)
    source = start.source
    if source is None or source.step is not None:
        return start
    named = (
        f"--checkpoint.initial_load_path names {source.path}"
        if request.initial_load_path
        else f"--hf_assets_path names {source.path}"
    )
    if problem := _initial_problem(source, own, finder):
        raise ValueError(f"{named}, {problem}")
    return start


def choose_start(request: Request, own: OwnFolder) -> Start:
    """Where to start, judged by what lies in the run's own folder alone.

    Raises:
        CheckpointNotFoundError: the step asked for is not there, or the folder holds only
            checkpoints that a run cannot go on from.
        CheckpointMismatchError: the one to load is of another back end.
        CheckpointReadError: all that could be loaded is damaged.
        ValueError: ``load_step`` is no step, or the Hugging Face assets were needed and not given.
    """
    if request.load_step != -1:
        return _explicit(request, own)
    newest, passed_over = own.newest_full()
    unreadable = [step for step, kind in passed_over.items() if kind is Kind.UNREADABLE]
    if newest is not None and not (unreadable and request.on_damaged == "fail"):
        if newest in own.others:
            raise _of_another(own, newest, f"{own.path} was looked into for the newest checkpoint")
        reason = what_was_passed_over("newest full checkpoint", newest, passed_over, own)
        return _own(request, own, newest, reason)
    if own.damaged:
        raise CheckpointReadError(all_damaged(own, passed_over))
    if unreadable:
        if unreadable[0] in own.others:
            raise _of_another(own, unreadable[0], f"{own.path} holds nothing full to go on from")
        # Nothing older may be taken instead. Starting afresh would bury what is there, so the load
        # itself gets to say what is wrong with it.
        which = "the only candidate" if newest is None else "the newest"
        reason = f"{which}, although its index cannot be read"
        return _own(request, own, unreadable[0], reason)
    if 0 in own.step_paths:
        if 0 in own.others:
            raise _of_another(own, 0, f"{own.path} holds nothing full to go on from")
        reason = what_was_passed_over("seed checkpoint", 0, passed_over, own)
        return _own(request, own, 0, reason)
    if own.step_paths:
        raise _only_weights(request, own)
    return _initial(request, own)


def _explicit(request: Request, own: OwnFolder) -> Start:
    step = request.load_step
    if problem := unusable_load_step(step):
        raise ValueError(f"--{problem}")
    if step not in own.step_paths:
        why = why_incomplete(own, step)
        raise CheckpointNotFoundError(
            f"--checkpoint.load_step={step} was asked for, but {own.path} holds no complete "
            f"checkpoint of that step{f' ({why})' if why else ''}; complete "
            f"steps: {listed(own.step_paths)}{those_of_others(own)}. Set --checkpoint.load_step to one "
            "of them, or to -1 for the newest full one."
        )
    if step != 0 and own.kind_of(own.step_paths[step]) is Kind.MODEL_ONLY:
        raise CheckpointNotFoundError(
            f"--checkpoint.load_step={step} was asked for, but {own.step_paths[step]} holds only "
            "the model, and a run needs optimizer and data position to go on. Load its weights "
            f"with {_backend_flag(own, step)}--checkpoint.initial_load_path and a new "
            "--checkpoint.folder instead."
        )
    if step in own.others:
        raise _of_another(own, step, f"--checkpoint.load_step={step} was asked for")
    return _own(request, own, step, f"--checkpoint.load_step={step}")


def _backend_flag(own: OwnFolder, step: int) -> str:
    """What has to be passed beside the path of ``step``, the beginning of a list of flags."""
    return f"--checkpoint.backend {own.others[step]}, " if step in own.others else ""


def _of_another(own: OwnFolder, step: int, asked: str) -> CheckpointMismatchError:
    path, backend = own.step_paths[step], own.others[step]
    kind = None if step == 0 else own.kind_of(path)
    found = this_run_cannot(path, kind, backend=backend, own_backend=own.backend)
    older = next(own.full_steps(but=step), None)
    back = f" --checkpoint.load_step {older} to go back to {step_name(older)}," if older else ""
    return CheckpointMismatchError(
        f"{asked}, but {found}. Pass --checkpoint.backend {backend} to go on from it,{back} or "
        "another --checkpoint.folder to leave it alone."
    )


def _only_weights(request: Request, own: OwnFolder) -> CheckpointNotFoundError:
    path, newest = request.initial_load_path, max(own.step_paths)
    unused = f" --checkpoint.initial_load_path {path} does not change that." if path else ""
    return CheckpointNotFoundError(
        f"{own.path} holds only model-only checkpoints (steps {listed(own.step_paths)}); a run "
        f"needs a full one to go on.{unused} To train on from such weights pass "
        f"{_backend_flag(own, newest)}--checkpoint.initial_load_path={own.step_paths[newest]} "
        "(as an absolute path) together with a new --checkpoint.folder; to begin again choose a new "
        "--checkpoint.folder. Set --checkpoint.no-last-save-model-only to save full ones."
    )


def _own(request: Request, own: OwnFolder, step: int, reason: str) -> Start:
    if ignored := request.initial_flags():
        reason += f"; ignored, as the run has checkpoints of its own: {', '.join(ignored)}"
    # Step 0 is a seed: weights to begin from, whatever else was saved beside them.
    source = Source(path=own.step_paths[step], step=step, model_only=step == 0)
    return Start(source=source, line=f"Loading the checkpoint {source.path} ({reason}).")


def _initial(request: Request, own: OwnFolder) -> Start:
    extent = "weights only" if request.initial_load_model_only else "everything it holds"
    if request.initial_load_path:
        path, reason = request.initial_load_path, "--checkpoint.initial_load_path"
    elif request.initial_load_in_hf:
        if not request.hf_assets_path:
            raise ValueError(
                "--checkpoint.initial_load_in_hf needs weights to load, but neither "
                "--checkpoint.initial_load_path nor --hf_assets_path names any; set one of them."
            )
        path, reason = request.hf_assets_path, "--hf_assets_path"
    else:
        ignored = request.initial_flags()
        unused = f" Nothing to load for {', '.join(ignored)}." if ignored else ""
        return Start(source=None, line=f"{FRESH_START}{unused}{what_does_not_count(own)}")
    source = Source(
        path=path,
        model_only=request.initial_load_model_only,
        from_hf=request.initial_load_in_hf,
        from_quantized=request.initial_load_in_hf_quantized,
    )
    line = f"Loading the checkpoint {path} ({reason}, {extent}).{what_does_not_count(own)}"
    return Start(source=source, line=line)


def what_else(source: Source, own_folder: str, finder: Finder) -> str:
    """Which checkpoint could be loaded instead of the damaged ``source``, as far as one listing tells."""
    try:
        return _what_else(source, own_folder, finder)
    except (CheckpointError, OSError) as error:
        # It comes after the word of the damage, which must not be lost for want of advice.
        return f"Whether there is another full checkpoint could not be seen: {error}"


def _what_else(source: Source, own_folder: str, finder: Finder) -> str:
    is_own = source.step is not None
    path = source.path.rstrip("/")
    folder = finder.look_into(own_folder if is_own else path.rpartition("/")[0])
    for step in folder.full_steps(but=source.step):
        other = folder.step_paths[step]
        if other == path:
            continue
        try:
            Verification.begin(finder.storage, other, Verify.SIZE, step=step)
        except CheckpointError:
            continue  # not that one either
        return what_else_there_is(other, step, is_own=is_own)
    return f"There is no other full checkpoint in {folder.path} that could be loaded."


def damage_of(path: str, step: int, storage: MovingStorage) -> str:
    """What a listing and the index show to be wrong with the checkpoint ``path``; "" for nothing.

    Raises:
        CheckpointMismatchError: a newer version wrote it.
        CheckpointReadError, OSError: the disk does not let it be looked at now.
    """
    try:
        manifest = Verification.begin(storage, path, Verify.SIZE, step=step).manifest
        if manifest is not None:
            whole = Verification(path, manifest, Verify.FULL)
            for name in sorted(manifest.files.keys() & set(MARKERS)):
                whole.check(name, storage.read_bytes(f"{path}/{name}"))
    except CheckpointDamagedError as error:
        return str(error)
    return ""


def _initial_problem(source: Source, own: OwnFolder, finder: Finder) -> str | None:
    """What keeps the path of ``source`` from being loaded as asked, the end of a sentence."""
    path = source.path.rstrip("/")
    if not finder.storage.isdir(path):
        return "which is not a directory; it must be one checkpoint, that is a step-N directory."
    if source.from_hf:
        return None
    if finder.is_staging(path):
        return (
            "which a save left behind that did not finish; it must be one complete checkpoint, that "
            "is a step-N directory."
        )
    owner = finder.owner_of(path)
    if owner is not None and owner is not finder:
        found = this_run_cannot(
            "which", owner.kind_of(path), backend=owner.backend, own_backend=finder.backend
        )
        return f"{found}; pass --checkpoint.backend {owner.backend} as well, or another path."
    if owner is not None:
        if not source.model_only and finder.kind_of(path) is Kind.MODEL_ONLY:
            return (
                "which holds only the model, but --checkpoint.no-initial-load-model-only asks for "
                "more; leave that flag out."
            )
        return None
    for folder in (path, f"{path}/checkpoint"):
        inside = finder.look_into(folder)
        if inside.step_paths:
            readable = inside.own_steps() or set(inside.step_paths)
            newest = max(readable)
            other = inside.others.get(newest)
            return (
                f"which is not a checkpoint but a folder around checkpoints (steps "
                f"{listed(readable)}); pass one of them, the newest is {inside.step_paths[newest]}"
                f"{f' and needs --checkpoint.backend {other}' if other else ''}."
            )
    where = ", in the folder of this run" if is_inside(path, own.path) else ""
    return (
        f"a directory without the index of a checkpoint{where}; it must be one complete "
        "checkpoint, that is a step-N directory."
    )


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
