"""What a run writes, looked at with torch.distributed.checkpoint or torch_checkpointing alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch_checkpointing.checkpoint_manager import CheckpointManager as LibraryManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torchtitan.components.data import GrainDataLoader
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import model_registry

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import CONTEXT, make_config, run, Trace
from tests.unit_tests.components.checkpointer.ways import ASYNC, TC_WAITING, Way


def two_steps(folder: str, way: Way) -> Trace:
    config = make_config(Path(folder), "run", interval=2, **way.settings)
    config.model_spec = model_registry("jargon")
    assert isinstance(config.model_spec.model, Decoder.Config)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    # Wrapped blocks and a fused projection: the two ways in which a live name differs.
    config.activation_checkpoint = FullAC.Config()
    return run(config, crash_after=2)


def until_the_data_ends(folder: str) -> Trace:
    config = make_config(Path(folder), "run")
    assert isinstance(config.dataloader, GrainDataLoader.Config)
    config.dataloader.repeat = False
    config.training.num_tokens_per_train_step = 3 * CONTEXT
    return run(config)


def names_in_dcp(step: Path) -> dict[str, tuple[int, ...] | None]:
    """The shape of every tensor, None for everything else."""
    index = FileSystemReader(step).read_metadata().state_dict_metadata
    return {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in index.items()
    }


def names_in_tc(step: Path) -> dict[str, tuple[int, ...] | None]:
    found: dict[str, tuple[int, ...] | None] = {}
    for file in sorted(step.glob("*.pt")):
        key = file.stem.rpartition("_")[0]
        prefix = "" if key == "model" else f"{key}."
        for name, value in torch.load(file, weights_only=False).items():
            is_tensor = isinstance(value, torch.Tensor)
            found[f"{prefix}{name}"] = tuple(value.shape) if is_tensor else None
    return found


def load_with_dcp(step: Path, name: str, into: torch.Tensor) -> None:
    load({name: into}, checkpoint_id=step)


def load_with_tc(step: Path, name: str, into: torch.Tensor) -> None:
    writer = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    config = LibraryManager.Config(
        items={"model": ItemSpec(requires_copy=False, resharder=DefaultResharder())},
        save=SyncCheckpointSaverConfig(writer_config=writer),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager = LibraryManager(config)
    manager.load(str(step), into={"model": {name: into}}, strict=True)
    manager.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "way,names_in,load_with",
    [(ASYNC, names_in_dcp, load_with_dcp), (TC_WAITING, names_in_tc, load_with_tc)],
    ids=["dcp", "tc"],
)
def test_the_keys_of_a_llama_are_those_that_other_programs_read(
    tmp_path: Path, way: Way, names_in: Any, load_with: Any
) -> None:
    run_on_ranks(2, two_steps, str(tmp_path), way, init=False)
    step = tmp_path / "run" / "checkpoint" / "step-2"
    index = names_in(step)
    attention = "layers.0.attention"
    block = {
        "attention.wo": (256, 256),
        "feed_forward.w1": (768, 256),
        "feed_forward.w2": (256, 768),
        "feed_forward.w3": (768, 256),
        "attention_norm": (256,),
        "ffn_norm": (256,),
    }
    shared = {
        "tok_embeddings.weight": (2048, 256),
        "norm.weight": (256,),
        "lm_head.weight": (2048, 256),
        **{f"layers.{n}.{name}.weight": shape for n in (0, 1) for name, shape in block.items()},
    }
    split = {"wq": (256, 256), "wk": (128, 256), "wv": (128, 256)}
    model = shared | {
        f"layers.{n}.attention.qkv_linear.{name}.weight": shape
        for n in (0, 1)
        for name, shape in split.items()
    }
    live = shared | {f"layers.{n}.attention.qkv_linear.wqkv.weight": (512, 256) for n in (0, 1)}
    moments = {
        f"optimizer.state.{name}.{moment}": shape
        for name, shape in live.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    tensors = {
        name: shape
        for name, shape in index.items()
        if shape is not None and not name.endswith(".step")
    }
    assert tensors == model | moments
    values = set(index) - set(tensors)
    groups = {name.split(".")[-1] for name in values if name.startswith("optimizer.param_groups.")}
    assert {"lr", "betas", "eps", "weight_decay", "initial_lr"} <= groups
    assert {f"optimizer.state.{name}.step" for name in live} <= values
    assert {"lr_scheduler.last_epoch", "train_state.step", "train_state.ntokens_seen"} <= values
    assert {"dataloader.version", "dataloader.epoch", "dataloader.next_row"} <= values
    assert not any("_checkpoint_wrapped_module" in name for name in index)

    wanted = torch.zeros(128, 256)
    load_with(step, f"{attention}.qkv_linear.wk.weight", wanted)
    assert all(rows.std() > 0 for rows in wanted.chunk(2))


@pytest.mark.ranks
def test_rows_fetched_for_a_step_that_never_ran_are_not_counted_as_trained(tmp_path: Path) -> None:
    # 20 rows, 3 a step: the seventh step finds 2.
    [trace] = run_on_ranks(1, until_the_data_ends, str(tmp_path), init=False)
    assert max(trace.losses) == 6
    assert (trace.state["epoch"], trace.state["next_row"]) == ("0", "18")
    saved = {"dataloader.next_row": None, "train_state.step": None}
    load(saved, checkpoint_id=tmp_path / "run" / "checkpoint" / "step-6")
    assert saved == {"dataloader.next_row": 18, "train_state.step": 6}
