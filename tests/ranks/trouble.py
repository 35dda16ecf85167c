"""A save and a load on several ranks, looked at from inside; the same for both back ends."""

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.errors import CheckpointReadError

from tests.unit_tests.components.checkpointer.runs import build_run, objects_of
from tests.unit_tests.components.checkpointer.ways import Way

Outcome = tuple[str, str, bool, bool]
"""(class of the error, its text, whether all objects are the same, whether a good step loads then)"""


class RankLog(logging.Handler):
    """What this rank says from here on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def as_saved(snapshot: dict[str, Any], *, model_prefix: str) -> dict[str, Any]:
    """What of ``snapshot`` a checkpoint holds, under the names that it has there."""
    prefixes = {
        "model.": model_prefix,
        "optimizer.": "optimizer.",
        "progress.": "train_state.inner.",
    }
    return {
        there + name.removeprefix(here): value
        for here, there in prefixes.items()
        for name, value in snapshot.items()
        if name.startswith(here)
    }


@contextmanager
def noted_collectives(names: Iterable[str]) -> Generator[list[str]]:
    """Those of torch.distributed among ``names`` that are called meanwhile, in order."""
    called: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(dist, name, noted(name, getattr(dist, name))))
        yield called


def load_in_trouble(
    folder: Path,
    way: Way,
    troubles: Iterable[str],
    trouble_on_rank_1: Callable[[str], AbstractContextManager[Any]],
) -> list[Outcome]:
    """What comes of loading the second of two steps in each of ``troubles``, and then the first."""
    first = build_run(folder, **way.settings)
    first.train(2)
    first.manager.close()
    outcomes: list[Outcome] = []
    for trouble in troubles:
        run = build_run(folder, seed=3, **way.settings)
        before = objects_of(run)
        kind, text = "", "nothing was raised"
        with trouble_on_rank_1(trouble):
            try:
                run.manager.load(2)
            except CheckpointReadError as error:
                kind, text = type(error).__name__, str(error)
        is_same = objects_of(run) == before
        # The ranks must still be in step, and go on with what is good.
        dist.all_reduce(torch.ones(1))
        is_loaded = run.manager.load(1) and run.step == 1
        outcomes.append((kind, text, is_same, is_loaded))
        run.manager.close()
    return outcomes
