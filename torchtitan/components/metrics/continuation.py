"""Decide whether a start goes on with the curves of the one before it, or begins new ones.

A start that resumes after step N goes on with the same curves, from N + 1; a start from nothing begins
new ones. The names of the curves stand in a small file in the dump folder. It is written before the
first number is, so a run that is killed at any moment is found again.

    metrics_run.json -> record_of_start -> tensorboard_folder, wandb_identity -> write_record
"""

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch.distributed as dist

from torchtitan.tools.logging import logger


@dataclass(kw_only=True, slots=True, frozen=True)
class RunRecord:
    """The names of the curves of a run; None where it has none yet."""

    tensorboard: str | None = None
    """Folder below ``metrics.save_tb_folder``: the date of the start that began the curves."""

    wandb_id: str | None = None
    wandb_origin: str | None = None
    """The place in another W&B run that this one was made from; done once, not at each restart."""


def record_path(dump_folder: str, replica: int | None = None) -> str:
    """Where the record of a run lies; each ``replica`` of a fault-tolerant run has its own."""
    middle = "" if replica is None else f".replica_{replica}"
    return os.path.join(dump_folder, f"metrics_run{middle}.json")


def record_of_start(path: str, start_step: int) -> RunRecord:
    """What a start after ``start_step`` goes on with; an empty record where it begins new curves."""
    if start_step == 0:
        return RunRecord()
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        names = [field.name for field in dataclasses.fields(RunRecord)]
        values = {name: found.get(name) for name in names}
        if all(value is None or isinstance(value, str) for value in values.values()):
            return RunRecord(**values)
        problem = "values that are no text"
    except FileNotFoundError:
        return RunRecord()
    except (OSError, ValueError, AttributeError) as error:
        problem = repr(error)
    logger.warning(
        f"{path} says which curves this run goes on with, but cannot be used: {problem}. Beginning new ones."
    )
    return RunRecord()


def write_record(path: str, record: RunRecord) -> None:
    """Replace the record at ``path`` as a whole, so that no kill leaves half of one."""
    if _is_simulated():
        return  # one process that plays a rank is no part of the run whose folder it borrows
    unfinished = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(record), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(unfinished)
        logger.warning(
            f"Could not write {path}: {error}. Training goes on, but a restart will begin new curves."
        )


def tensorboard_folder(record: RunRecord, parent: str) -> str:
    """The name of the folder below ``parent`` that the run of ``record`` writes to."""
    name = record.tensorboard
    if name is not None and os.path.isdir(os.path.join(parent, name)):
        return name
    return datetime.now().strftime("%Y%m%d-%H%M")


def wandb_identity(
    record: RunRecord, environment: Mapping[str, str]
) -> tuple[RunRecord, dict[str, Any]]:
    """Which W&B run to write to: the record with its id, and arguments of ``wandb.init``.

    ``WANDB_RESUME_FROM`` rewinds a run and ``WANDB_FORK_FROM`` copies one (``<id>?_step=<step>``), both
    once: a restart with the same environment goes on with what came of it.
    """
    rewound, forked = environment.get("WANDB_RESUME_FROM"), environment.get("WANDB_FORK_FROM")
    given = environment.get("WANDB_RUN_ID") or None
    origin = rewound or forked or None
    arguments: dict[str, Any]
    if origin is not None and origin != record.wandb_origin:
        if rewound:
            run_id = rewound.partition("?")[0]
            arguments = {"resume_from": rewound}
        else:
            run_id = given or new_wandb_id()
            arguments = {"id": run_id, "fork_from": forked}
    else:
        came_of_origin = record.wandb_id if origin is not None else None
        run_id = came_of_origin or given or record.wandb_id or new_wandb_id()
        arguments = {"id": run_id, "resume": "allow"}
    return dataclasses.replace(record, wandb_id=run_id, wandb_origin=origin), arguments


def new_wandb_id() -> str:
    """An id that no other run of the project has; W&B itself takes 8 characters as well."""
    return secrets.token_hex(4)


def agreed_name(name: str, rank: int) -> str:
    """``name`` as ``rank`` has it, on every rank; a collective over all ranks."""
    if not dist.is_initialized() or _is_simulated() or dist.get_world_size() == 1:
        return name
    # The clocks of two ranks may show different minutes.
    names = [name]
    dist.broadcast_object_list(names, src=rank)
    return names[0]


def _is_simulated() -> bool:
    return dist.is_initialized() and dist.get_backend() == "fake"
