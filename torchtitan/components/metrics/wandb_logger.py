"""Weights & Biases: numbers under the id of one run, over all its starts.

The one fact to know: W&B takes steps only in rising order. A start that resumes before the newest
step that W&B has computes some steps again; those are left out there, with one message, so that
the curve has each step once.

    wandb_identity -> WandBLogger -> wandb.init(id=..., resume="allow") -> run.log -> run.finish
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from torchtitan.components.metrics.loggers import BaseLogger
from torchtitan.tools.logging import logger

_PACKAGE = "wandb"
_NOT_INSTALLED = (
    "metrics.enable_wandb was asked for, but the package wandb is not installed. Install it (pip "
    "install wandb), or leave --metrics.enable-wandb out; the structured logs hold all numbers too."
)


class WandBLogger(BaseLogger):
    """Sends numbers to one W&B run, their names under ``tag`` if there is one."""

    def __init__(
        self,
        log_dir: str,
        config_dict: dict[str, Any] | None = None,
        tag: str | None = None,
        *,
        identity: Mapping[str, Any] | None = None,
        start_step: int = 0,
    ) -> None:
        """Begin or go on; ``identity`` says which run, as arguments of ``wandb.init``.

        Raises:
            ImportError: wandb is not installed.
            RuntimeError: W&B does not begin.
        """
        if importlib.util.find_spec(_PACKAGE) is None:
            raise ImportError(_NOT_INSTALLED)
        wandb = importlib.import_module(_PACKAGE)
        os.makedirs(log_dir, exist_ok=True)
        arguments = {**settings_of(os.environ), **(identity or {})}
        try:
            self._run = wandb.init(dir=log_dir, config=config_dict, **arguments)
        # wandb raises errors of its own, of the network, and of its helper process.
        except Exception as error:
            raise RuntimeError(
                f"W&B could not be started with {arguments}: {error}. Log in with `wandb login` or set "
                "WANDB_API_KEY, set WANDB_MODE=offline to send the numbers later with `wandb sync`, or leave "
                "--metrics.enable-wandb out."
            ) from error
        self._tag = tag
        self._start_step = start_step
        self._warned = False
        logger.info(f"W&B: run {self._run.id} of the project {arguments['project']}")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if step < self._run.step:
            self._warn_of_repetition()
            return
        prefix = "" if self._tag is None else f"{self._tag}/"
        self._run.log({f"{prefix}{name}": value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        # Closing while an error is handled is the end of a run that failed.
        self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)

    def _warn_of_repetition(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                f"W&B holds the run {self._run.id} up to step {self._run.step} already; what is computed "
                "again up to there is left out. To replace it, start once with the environment variable "
                f"WANDB_RESUME_FROM='{self._run.id}?_step={self._start_step}'."
            )


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of ``wandb.init`` from the environment, beside those that say which run."""
    read = environment.get
    tags = [tag.strip() for tag in (read("WANDB_RUN_TAGS") or "").split(",") if tag.strip()]
    return {
        "entity": read("WANDB_TEAM") or None,
        "project": read("WANDB_PROJECT") or "torchtitan",
        "name": read("WANDB_RUN_NAME") or None,
        "notes": read("WANDB_RUN_NOTES") or None,
        "tags": tags or None,
        "group": read("WANDB_RUN_GROUP") or None,
        "job_type": read("WANDB_RUN_JOB_TYPE") or None,
    }


def problems(environment: Mapping[str, str]) -> list[str]:
    """What keeps W&B from being used, one message each; loads nothing."""
    found = []
    if importlib.util.find_spec(_PACKAGE) is None:
        found.append(_NOT_INSTALLED)
    both = [environment.get(name) for name in ("WANDB_RESUME_FROM", "WANDB_FORK_FROM")]
    if all(both):
        found.append(
            f"WANDB_RESUME_FROM={both[0]} and WANDB_FORK_FROM={both[1]} exclude each other. Unset one."
        )
    return found
