"""Parts of a run, and what is said of those that are switched off."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan import assembly
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed.utils import init_fake_mode

PARTS = ("dataloader", "optimizers", "lr_schedulers")


def warnings_of(folder: Path, *, enable: bool, mode: str = "default") -> list[str]:
    """What building the checkpointer of a run warns of."""
    config: Any = SimpleNamespace(
        model_spec=SimpleNamespace(model=None, state_dict_adapter=None),
        checkpoint=CheckpointManager.Config(enable=enable, keep_latest_k=0),
        comm=SimpleNamespace(mode=mode),
        dump_folder=str(folder),
        hf_assets_path="",
    )
    parts = {**dict.fromkeys(PARTS), "model_parts": [], "states": {}}
    with patch.object(assembly.logger, "warning") as warning:
        assembly.build_checkpointer(config, **parts).close()
    return [call.args[0] for call in warning.call_args_list]


def test_a_run_that_saves_no_checkpoints_is_told_what_that_costs(tmp_path: Path) -> None:
    [line] = warnings_of(tmp_path, enable=False)
    assert line == (
        "Checkpoints are off: a run that is stopped starts over. --checkpoint.enable saves them."
    )
    init_fake_mode(2, rank=1)
    try:
        assert warnings_of(tmp_path, enable=False) == [], "once, and not by each rank"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("enable", "mode"), [(True, "default"), (False, "fake_backend")])
def test_a_run_that_saves_them_or_computes_nothing_that_lasts_is_told_nothing(
    tmp_path: Path, enable: bool, mode: str
) -> None:
    assert warnings_of(tmp_path, enable=enable, mode=mode) == []
