"""A load through torch_checkpointing: from where, into what, and what is refused."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.errors import CheckpointMismatchError, CheckpointReadError
from torchtitan.components.checkpointer.pinned import means
from torchtitan.components.checkpointer.tc.library import Backend
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager

from tests.unit_tests.components.checkpointer.runs import build_run, Counter, Run

pytestmark = pytest.mark.usefixtures("one_rank")


def run_in(folder: Path, **settings: Any) -> Run:
    """A run that has loaded nothing yet, and waits for its saves if it saves."""
    with patch.object(means, "no_shared_memory", return_value="the test says so"):
        return build_run(folder, manager=TorchCheckpointingManager, **settings)


def trained(folder: Path, until: int = 2, **settings: Any) -> Run:
    run = run_in(folder, last_save_model_only=False, **settings)
    run.train(until)
    run.manager.close()
    return run


@pytest.fixture
def calls() -> Iterator[list[tuple[str, dict[str, Any], dict[str, Any]]]]:
    """(path, into, keywords) of what back ends are asked to load."""
    seen: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    load = Backend.load

    def noted(backend: Backend, path: str, into: Any = None, **more: Any) -> Any:
        seen.append((path, dict(into), more))
        return load(backend, path, into=into, **more)

    with patch.object(Backend, "load", noted):
        yield seen


def test_tensors_are_read_strictly_into_the_state_of_the_run(tmp_path: Path, calls: Any) -> None:
    saved = trained(tmp_path)
    run = run_in(tmp_path, seed=5, load_only=True)
    assert run.manager.load() is True
    ((path, into, more),) = calls
    assert path == f"{tmp_path}/checkpoint/step-2" and more == {"strict": True}
    assert set(into) == {"model", "optimizer"}
    assert into["model"] is run.manager.states["model"].state_dict()
    assert run.snapshot() == saved.snapshot()
    run.manager.close()


def test_nothing_to_load_is_no_error_and_asks_nobody(tmp_path: Path, calls: Any) -> None:
    run = run_in(tmp_path)
    before = run.snapshot()
    assert run.manager.load() is False and calls == []
    assert run.snapshot() == before
    run.manager.close()


def test_the_step_that_is_asked_for_is_loaded(tmp_path: Path, calls: Any) -> None:
    trained(tmp_path, until=3)
    run = run_in(tmp_path, seed=5, load_only=True)
    assert run.manager.load(1) and run.step == 1
    with pytest.raises(FileNotFoundError, match="--checkpoint.load_step=7"):
        run.manager.load(7)
    assert [path.rpartition("/")[2] for path, *_ in calls] == ["step-1"]
    run.manager.close()


@pytest.mark.parametrize("excluded", [["optimizer", "lr_scheduler"], ["dataloader"]])
def test_what_is_excluded_is_not_read_and_stays(
    tmp_path: Path, calls: Any, excluded: list[str]
) -> None:
    saved = trained(tmp_path).snapshot()
    for key in excluded:
        path = tmp_path / f"checkpoint/step-2/{key}_0.pt"
        path.write_bytes(b"x" * path.stat().st_size)
    run = run_in(tmp_path, seed=5, load_only=True, exclude_from_loading=excluded)
    before = run.snapshot()
    assert run.manager.load()
    ((_, into, _),) = calls
    assert set(into) == {"model", "optimizer"} - set(excluded)
    prefixes = {"optimizer": "optimizer.", "lr_scheduler": ("lr.", "rates."), "dataloader": "data."}
    after = run.snapshot()
    for name, value in after.items():
        stays = any(name.startswith(prefixes[key]) for key in excluded)
        assert value == (before[name] if stays else saved[name]), name
    run.manager.close()


def test_weights_from_elsewhere_come_alone(tmp_path: Path, calls: Any) -> None:
    saved = trained(tmp_path / "one").snapshot()
    run = run_in(
        tmp_path / "two",
        seed=5,
        initial_load_path=f"{tmp_path}/one/checkpoint/step-2",
    )
    assert run.manager.load()
    assert set(calls[0][1]) == {"model"} and run.step == 0
    after = run.snapshot()
    assert all(after[name] == saved[name] for name in after if name.startswith("model."))
    run.manager.close()


def test_a_run_of_another_shape_is_told_of_every_difference(tmp_path: Path, calls: Any) -> None:
    trained(tmp_path)
    run = run_in(tmp_path, width=9, load_only=True)
    run.manager.states["other"] = Counter(count=1)
    before = run.snapshot()
    with pytest.raises(CheckpointMismatchError) as caught:
        run.manager.load()
    text = str(caught.value)
    assert "tok_embeddings.weight (here [11, 9], there [11, 7])" in text
    assert "optimizer.state.layers.0.bias.exp_avg (here [9], there [7])" in text
    assert "1 missing: other.inner.count" in text
    assert calls == [] and run.snapshot() == before
    run.manager.close()


@pytest.mark.parametrize("file", ["metadata.pkl", "model_0.pt", "train_state_0.pt"])
@pytest.mark.parametrize("damage", ["cut short", "gone"])
def test_a_damaged_checkpoint_is_an_error_that_names_it(
    tmp_path: Path, file: str, damage: str
) -> None:
    trained(tmp_path, until=1)
    path = tmp_path / f"checkpoint/step-1/{file}"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run = run_in(tmp_path, seed=5, load_only=True)
    with pytest.raises(CheckpointReadError, match=f"checkpoint/step-1.*{file[:5]}"):
        run.manager.load()
    run.manager.close()


def test_empty_metadata_without_a_manifest_is_known_as_damaged_before_anything_is_read(
    tmp_path: Path, calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path)
    (tmp_path / "checkpoint/step-2/metadata.pkl").write_bytes(b"")
    (tmp_path / "checkpoint/step-2/manifest.json").unlink()  # which would say that it was full
    run = run_in(tmp_path, seed=5)
    assert run.manager.newest_checkpoint() == f"{tmp_path}/checkpoint/step-1"
    assert "step-2/metadata.pkl cannot be read: it is empty." in caplog.text
    assert calls == []
    run.manager.close()


def test_formats_that_are_not_there_yet_are_refused(tmp_path: Path) -> None:
    run = run_in(tmp_path, initial_load_path=str(tmp_path), initial_load_in_hf=True, load_only=True)
    with pytest.raises(ValueError, match="Hugging Face"):
        run.manager.load()
    run.manager.close()


def test_values_beside_sharded_tensors_come_back_whatever_the_run_had(tmp_path: Path) -> None:
    saved = trained(tmp_path)
    groups = saved.optimizers.optimizers[0].param_groups
    run = run_in(tmp_path, seed=5, load_only=True)
    for group in run.optimizers.optimizers[0].param_groups:
        group["lr"], group["betas"] = 77.0, (0.5, 0.5)
    assert run.manager.load()
    for here, there in zip(run.optimizers.optimizers[0].param_groups, groups, strict=True):
        assert (here["lr"], here["betas"]) == (there["lr"], there["betas"])
    run.manager.close()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_manifest_is_kept_no_longer_than_the_load_takes(tmp_path: Path, is_damaged: bool) -> None:
    trained(tmp_path, until=1)
    run = run_in(tmp_path, seed=5, load_only=True)
    if is_damaged:
        (tmp_path / "checkpoint/step-1/model_0.pt").unlink()
        with pytest.raises(CheckpointReadError):
            run.manager.load()
    else:
        assert run.manager.load()
    assert run.manager._manager._checked.verification is None
    run.manager.close()


def test_a_load_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "checkpoint/tmp_step-9").mkdir()
    before = sorted(os.walk(tmp_path))
    run = run_in(tmp_path, seed=5, load_only=True)
    assert run.manager.load()
    run.train(1)
    run.manager.close()
    assert sorted(os.walk(tmp_path)) == before
    assert dist.is_initialized() and torch.is_grad_enabled()
