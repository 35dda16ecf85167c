"""A damaged checkpoint is found by the rank that reads the damage, and all ranks go back together."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.tools.logging import logger

from tests.integration_tests.launched import Launched
from tests.integration_tests.small_run import complete_steps, LLAMA, main_on_ranks, SETTINGS, Story
from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.runs import build_run, names
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way
from tests.unit_tests.structure.sources import ROOT

pytestmark = pytest.mark.ranks


def data_of(way: Way, step_path: Path, rank: int) -> Path:
    """The file that this rank alone has written, and of the same layout alone reads."""
    return step_path / (
        f"__{rank}_0.distcp" if way.format.backend == "dcp" else f"optimizer_{rank}.pt"
    )


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Warnings(logging.Handler):
    """What this rank has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def start(folder: Path, way: Way, step: int = -1, **settings: Any) -> dict[str, Any]:
    """What one more start in ``folder`` ends with on this rank."""
    warnings = Warnings()
    logger.addHandler(warnings)
    begun = build_run(folder, seed=99, **settings, **way.settings)
    before, error = (begun.step, dict(begun.dataloader.values)), ""
    try:
        begun.manager.load(step)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
        assert (begun.step, begun.dataloader.values) == before, "a failed start changed the state"
    finally:
        logger.removeHandler(warnings)
        begun.manager.close()
    said = [line for line in warnings.said if line.startswith("Passing over")]
    # Tensors of a failed start may hold anything.
    return {"error": error, "said": said, "state": None if error else begun.snapshot()}


def start_over_damage(folder: Path, way: Way) -> dict[str, Any]:
    run = build_run(folder, keep_latest_k=0, **way.settings)
    run.train(1)
    at_1 = run.snapshot()
    run.train(3)
    run.manager.close()
    own = folder / "checkpoint"
    if dist.get_rank() == 0:
        flip_a_bit(data_of(way, own / "step-3", rank=1))
        flip_a_bit(data_of(way, own / "step-2", rank=0))
    dist.barrier()
    found: dict[str, Any] = {
        "at 1": at_1,
        "start": start(folder, way),
        "asked for": start(folder, way, 3),
        "fail": start(folder, way, on_damaged="fail"),
    }
    again = build_run(folder, seed=99, **way.settings)
    again.manager.load()
    again.train(2)
    again.manager.close()
    found["after a save"] = names(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (own / "step-2", own / "step-1"):
            flip_a_bit(data_of(way, path, rank=1))
    dist.barrier()
    found["nothing left"] = start(folder, way)
    return found


@over(DISABLED, TC_WAITING)
def test_ranks_go_back_together_whichever_of_them_reads_the_damage(
    tmp_path: Path, way: Way
) -> None:
    first, second = run_on_ranks(2, start_over_damage, tmp_path, way)
    for name in first:
        assert first[name] == second[name], name
    folder = tmp_path / "checkpoint"
    begun = first["start"]
    assert begun["error"] == "" and begun["state"] == first["at 1"]
    for step, rank, line in zip((3, 2), (1, 0), begun["said"], strict=True):
        damaged = data_of(way, folder / f"step-{step}", rank)
        assert line.startswith(f"Passing over {folder}/step-{step}, which is not deleted: ")
        assert f"{damaged}" in line and "expected" in line and "found" in line
    for name in ("asked for", "fail"):
        assert first[name]["error"].startswith("CheckpointDamagedError: "), first[name]
        assert str(data_of(way, folder / "step-3", 1)) in first[name]["error"]
        # A listing shows nothing of a bit.
        assert first[name]["error"].endswith("is step-2: --checkpoint.load_step 2")
    assert first["after a save"] == ["step-1", "step-2", "superseded"]
    assert sorted(path.name for path in (folder / "superseded").iterdir()) == ["step-2", "step-3"]
    error = first["nothing left"]["error"]
    assert error.startswith(f"CheckpointReadError: {folder} holds no full checkpoint")
    assert "step-2: " in error and "step-1: " in error


def torchrun(arguments: list[str], cache: Path) -> tuple[int, Story]:
    """How a run on two ranks ends, and what rank 0 says."""
    command = [sys.executable, "-m", "torchtitan.launch", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local-ranks-filter=0"]
    command += ["--tee=3", "-m", "torchtitan.train", *arguments]
    environment = {"TORCHTITAN_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with Launched(command, cwd=ROOT, env=environment) as launched:
        code = launched.finish()
    return code, Story(launched.output)


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_resumes_over_a_damaged_newest_checkpoint_and_fails_when_none_is_good(
    tmp_path: Path,
) -> None:
    folder, cache = tmp_path / "run", tmp_path / "cache"
    arguments = [*LLAMA, f"--dump_folder={folder}", *SETTINGS, "--checkpoint.interval=2"]
    whole = Story(main_on_ranks(2, [*arguments, "--training.steps=4"], cache=cache)[0].log)
    assert complete_steps(folder) == [2, 4]
    damaged = folder / "checkpoint/step-4/__1_0.distcp"
    flip_a_bit(damaged)
    other_decay = "--optimizer.param_groups.0.optimizer_kwargs.weight_decay=0.05"
    code, resumed = torchrun([*arguments, "--training.steps=5", other_decay], cache)
    assert code == 0, resumed.output
    assert f"Passing over {folder}/checkpoint/step-4, which is not deleted: " in resumed.output
    assert f"{damaged}" in resumed.output
    assert resumed.loaded_steps() == [4, 2]
    assert "Settings that differ from those of" in resumed.output
    assert "optimizer_kwargs.weight_decay: 0.1 -> 0.05  (the value in the checkpoint holds;" in (
        resumed.output
    )
    # The steps after the good one are trained again, to the same losses: what was saved holds.
    assert resumed.losses()[3] == whole.losses()[3] and sorted(resumed.losses()) == [3, 4, 5]
    assert complete_steps(folder) == [2, 4, 5]
    assert (folder / "checkpoint/superseded/step-4").is_dir()

    # With nothing good left it begins nothing anew, and the launcher hears of it.
    left = complete_steps(folder)
    for step in left:
        flip_a_bit(folder / f"checkpoint/step-{step}/__1_0.distcp")
    before = contents(folder / "checkpoint")
    code, stopped = torchrun([*arguments, "--training.steps=7"], cache)
    assert code == 1, stopped.output
    assert f"{folder}/checkpoint holds no full checkpoint that is not damaged" in stopped.output
    assert contents(folder / "checkpoint") == before and complete_steps(folder) == left


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
