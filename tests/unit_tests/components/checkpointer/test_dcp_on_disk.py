"""What lies in a checkpoint of DCP; what is promised of those of either manager is in test_on_disk.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.tensor import DTensor

from tests.unit_tests.components.checkpointer.runs import build_run, Run, Tiny

pytestmark = pytest.mark.usefixtures("one_rank")


def entries(path: Path) -> dict[str, Any]:
    return torch_dcp.FileSystemReader(path).read_metadata().state_dict_metadata


def whole(run: Run, name: str) -> torch.Tensor:
    parameter = run.model.get_parameter(name).detach()
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor()


def test_the_keys_are_those_that_other_programs_read(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    run.train(1)
    run.manager.close()
    step = tmp_path / "checkpoint" / "step-1"
    written = [".metadata", "__0_0.distcp", "manifest.json"]
    assert sorted(entry.name for entry in step.iterdir()) == written
    found = entries(step)
    model = set(Tiny().state_dict())
    trainable = model - {"seen"}
    state = {
        f"optimizer.state.{n}.{s}" for n in trainable for s in ("step", "exp_avg", "exp_avg_sq")
    }
    groups = {name for name in found if name.startswith("optimizer.param_groups.")}
    rest = {"lr_scheduler.last_epoch", "train_state.inner.step", "dataloader.inner.row"}
    assert set(found) == model | state | groups | rest
    assert {f"optimizer.param_groups.{name}.initial_lr" for name in trainable} <= groups
    index = torch_dcp.FileSystemReader(step).read_metadata()
    key = "optimizer.state.scale.step"
    assert index.planner_data[key] == ("optimizer", "state.scale.step")


def test_plain_dcp_reads_what_was_saved(tmp_path: Path) -> None:
    run = build_run(tmp_path, async_mode="async")
    run.train(2)
    run.manager.close()
    plain = {"tok_embeddings.weight": torch.zeros(11, 7), "seen": torch.zeros(3, dtype=torch.int64)}
    torch_dcp.load(plain, checkpoint_id=str(tmp_path / "checkpoint" / "step-2"))
    assert torch.equal(plain["tok_embeddings.weight"], whole(run, "tok_embeddings.weight"))
    assert plain["seen"].tolist() == [2, 2, 2]


def test_the_last_save_of_weights_holds_nothing_else_in_the_chosen_dtype(tmp_path: Path) -> None:
    run = build_run(tmp_path, export_dtype="bfloat16")
    run.train(3, last_step=3)
    run.manager.close()
    found = entries(tmp_path / "checkpoint" / "step-3")
    assert set(found) == set(Tiny().state_dict())
    dtypes = {name: entry.properties.dtype for name, entry in found.items()}
    assert dtypes.pop("seen") is torch.int64 and set(dtypes.values()) == {torch.bfloat16}
