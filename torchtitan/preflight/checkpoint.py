"""Whether checkpoints can be written where they should, and what a run is to begin from exists."""

import os
import re
from collections.abc import Iterator

from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
)
from torchtitan.components.checkpointer.discovery import Finder, OwnFolder
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointError
from torchtitan.components.checkpointer.formats import (
    CheckpointFiles,
    finder,
    Format,
    marker_folders,
)
from torchtitan.components.checkpointer.history import REPLACED, SUPERSEDED
from torchtitan.components.checkpointer.source import (
    damage_of,
    falls_back,
    find_start,
    Request,
    what_else,
)
from torchtitan.components.checkpointer.state import RANK_STATE
from torchtitan.preflight.folders import write_problem
from torchtitan.tools import filesystem
from torchtitan.trainer import Trainer

_STATE_KEYS = frozenset({OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE, RANK_STATE})
_RESTARTS = re.compile(r"(?:^|\s)--max[-_]restarts(?:=|\s+)(\S+)")


def checkpoint_problems(config: Trainer.Config, world_size: int | None) -> Iterator[str]:
    """Checkpoint settings that contradict the run, each other or the disk."""
    checkpoint = config.checkpoint
    if checkpoint.create_seed_checkpoint:
        yield from _seed_problems(config, world_size)
    if not checkpoint.enable:
        yield from _idle_settings(config)
        return
    chosen = getattr(checkpoint._owner, "FORMAT", None)
    if chosen is None:
        return  # a manager of the user's own, which knows by itself what it can load
    if unknown := sorted(set(checkpoint.exclude_from_loading) - _STATE_KEYS - {MODEL}):
        yield (
            f"--checkpoint.exclude_from_loading names {', '.join(unknown)}; it takes names out of "
            f"{', '.join(sorted(_STATE_KEYS))}."
        )
    yield from _restart_problems(config)
    yield from _disk_problems(config, chosen)


def _seed_problems(config: Trainer.Config, world_size: int | None) -> Iterator[str]:
    checkpoint = config.checkpoint
    if not checkpoint.enable or world_size not in (1, None):
        yield (
            "--checkpoint.create_seed_checkpoint is made by one process and saved as a checkpoint: "
            f"it needs --checkpoint.enable and 1 rank, found {world_size} (NGPU=1)."
        )
    others = {
        "--checkpoint.load_only": checkpoint.load_only,
        "--checkpoint.load_step": checkpoint.load_step != -1,
        "--checkpoint.initial_load_path": bool(checkpoint.initial_load_path),
        "--comm.mode": config.comm.mode != "default",
    }
    if contrary := [flag for flag, is_set in others.items() if is_set]:
        yield (
            "--checkpoint.create_seed_checkpoint saves freshly initialised weights and loads "
            f"nothing, which contradicts {', '.join(contrary)}; leave one side out."
        )


def _restart_problems(config: Trainer.Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.load_only or config.comm.mode != "default":
        return  # nothing is saved that a restart could put aside
    flags = []
    if checkpoint.load_step >= 0:
        flags.append(f"--checkpoint.load_step {checkpoint.load_step}")
    if checkpoint.exclude_from_loading:
        flags.append(
            f"--checkpoint.exclude_from_loading {' '.join(sorted(checkpoint.exclude_from_loading))}"
        )
    num_restarts = _max_restarts()
    if flags and num_restarts > 0:
        yield (
            f"{' and '.join(flags)} with --max-restarts {num_restarts}: each restart would go back "
            "again; start once without --max-restarts, then leave the flag out."
        )


def _max_restarts() -> int:
    """How often torchrun starts failed ranks again; 0 without torchrun."""
    # On the ranks torchrun says it; before they start, the options that run_train.sh gives to it do.
    options = os.environ.get("TORCHRUN_ARGS", "")
    said = os.environ.get("TORCHELASTIC_MAX_RESTARTS") or ([""] + _RESTARTS.findall(options))[-1]
    return int(said) if said.isdecimal() else 0


def _idle_settings(config: Trainer.Config) -> Iterator[str]:
    # Only what asks for a certain checkpoint: the rest of the section may wait to be switched on.
    checkpoint = config.checkpoint
    flags = {
        f"load_step {checkpoint.load_step}": checkpoint.load_step != -1,
        f"initial_load_path {checkpoint.initial_load_path}": bool(checkpoint.initial_load_path),
    }
    for flag, is_set in flags.items():
        if is_set:
            yield (
                f"--checkpoint.{flag} has no effect while checkpoints are off; add "
                "--checkpoint.enable."
            )


def _disk_problems(config: Trainer.Config, chosen: Format) -> Iterator[str]:
    checkpoint = config.checkpoint
    folder = filesystem.join(config.dump_folder, checkpoint.folder)
    if any(filesystem.is_remote(path) for path in (folder, checkpoint.initial_load_path or "")):
        return  # refused as such
    if os.path.lexists(folder) and not os.path.isdir(folder):
        yield f"--checkpoint.folder {folder} is not a folder; choose another one or move it away."
        return
    is_written = not checkpoint.load_only and config.comm.mode == "default"
    # A folder inside of the dump folder that cannot be written is reported with that one.
    if is_written and write_problem("--dump_folder", config.dump_folder) is None:
        if problem := write_problem("--checkpoint.folder", folder):
            yield problem
            return
    # A seed is made from nothing; and a step that is none is refused as such.
    if checkpoint.load_step >= -1 and not checkpoint.create_seed_checkpoint:
        yield from _source_problems(config, folder, chosen)


def _source_problems(config: Trainer.Config, folder: str, chosen: Format) -> Iterator[str]:
    checkpoint = config.checkpoint
    request = Request(
        load_step=checkpoint.load_step,
        initial_load_path=checkpoint.initial_load_path,
        initial_load_model_only=checkpoint.initial_load_model_only,
        initial_load_in_hf=checkpoint.initial_load_in_hf,
        initial_load_in_hf_quantized=checkpoint.initial_load_in_hf_quantized,
        hf_assets_path=config.hf_assets_path,
        on_damaged=checkpoint.on_damaged,
    )
    where = finder(chosen, CheckpointFiles(), _STATE_KEYS)
    try:
        own = where.look_into(folder)
        if not checkpoint.load_only and config.comm.mode == "default":
            yield from _obstacles(own)
        if checkpoint.load_step == -1 and _is_finished(config, own):
            return
        _require_readable(chosen, request, own, where)
    except (CheckpointError, ValueError) as error:
        yield str(error)
    except OSError as error:
        yield (
            f"--checkpoint.folder {folder} cannot be read ({error.filename or folder}: "
            f"{error.strerror or error}); make it readable or choose another one."
        )


def _obstacles(own: OwnFolder) -> Iterator[str]:
    """What a save would stop at, each time it is tried again."""
    for name in (SUPERSEDED, REPLACED):
        path = filesystem.join(own.path, name)
        if os.path.lexists(path) and not os.path.isdir(path):
            yield (
                f"--checkpoint.folder {own.path} holds {name}, which is no folder, and checkpoints are put "
                "aside into one of this name; move it away."
            )
    for name in sorted(own.unfinished):
        path = filesystem.join(own.path, name)
        if found := marker_folders(CheckpointFiles(), path):
            yield (
                f"--checkpoint.folder {own.path} holds {name} with {', '.join(found)} as a folder, where a "
                f"checkpoint has a file; move {path} away."
            )


def _is_finished(config: Trainer.Config, own: OwnFolder) -> bool:
    """Whether the run will find nothing to do, and load nothing."""
    step = own.export_step()
    if step < config.training.steps or config.checkpoint.verify == "off":
        return step >= config.training.steps
    return not damage_of(own.step_paths[step], step, CheckpointFiles())


def _require_readable(chosen: Format, request: Request, own: OwnFolder, where: Finder) -> None:
    """Read the index of what the run will load, and go back past damaged ones as the run will."""
    damaged: dict[str, str] = {}
    while True:
        source = find_start(request, own, where).source
        if source is None or source.from_hf:
            return
        try:
            chosen.read_index(source.path)
            return
        except CheckpointDamagedError as error:
            if not falls_back(request, source):
                raise CheckpointDamagedError(
                    f"{error} {what_else(source, own.path, where)}"
                ) from error
            damaged[source.path] = str(error)
            own = where.look_into(own.path, damaged)
