"""What a checkpoint of torch_checkpointing holds, told from its metadata and its small values."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_checkpointing.default_metadata import DefaultShardingMetadata
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    DistributedMetadata,
    GlobalObjectMetadata,
    ShardingMetadata,
)
from torch_checkpointing.dtensor_metadata import (
    DTensorShardingMetadata,
    get_device_mesh_spec,
    ShardSpec,
)
from torchtitan.components.checkpointer.errors import CheckpointMismatchError, CheckpointReadError
from torchtitan.components.checkpointer.source import Source
from torchtitan.components.checkpointer.state import ModelWrapper
from torchtitan.components.checkpointer.tc.reading import look, restore, restore_state_dict, Saved
from torchtitan.components.checkpointer.tc.storage import DurableStorage
from torchtitan.components.checkpointer.templates import SavedEntry

from tests.unit_tests.components.checkpointer.tc.stand_ins import plain_tensor, Watched

Described = dict[tuple[str | int, ...], list[ShardingMetadata]]


def shared(*shape: int) -> list[ShardingMetadata]:
    """A tensor in rows over ranks 0 and 1."""
    mesh = get_device_mesh_spec(device_type="cpu", mesh_shape=(2,), mesh_data=(0, 1))
    return [DTensorShardingMetadata(shape, "torch.float32", (1,), mesh, (ShardSpec(0),))]


def write(folder: Path, described: dict[str, Described], **files: Any) -> str:
    """A checkpoint of these ``files``, named ``<item>_<rank>``."""
    metadata = {
        key: DistributedItemMetadata(
            nested_path_to_metadata={
                path: [GlobalObjectMetadata(one, one.equivalent_ranks or ()) for one in groups]
                for path, groups in item.items()
            },
            rank_to_layout_info={0: None, 1: None},
        )
        for key, item in described.items()
    }
    content = DistributedMetadata(metadata=metadata, world_size=2).to_dict()
    (folder / "metadata.pkl").write_bytes(pickle.dumps(content))
    for name, tree in files.items():
        torch.save(tree, folder / f"{name}.pt")
    return str(folder)


def looked_into(path: str, **more: Any) -> tuple[Saved, list[str]]:
    """What is found, and which of the items were opened for it."""
    watched = Watched()
    saved = look(watched.create_storage(), path, **more)
    opened = [opened.name for name, opened in watched.calls if name == "stream_read"]
    return saved, sorted(name for name in opened if name != "metadata.pkl")


def test_names_are_flat_with_the_model_at_the_top(tmp_path: Path) -> None:
    described: dict[str, Described] = {
        "model": {("layers.0.weight",): shared(4, 2), ("seen",): [plain_tensor(0, 3)]},
        "optimizer": {("state", "w", "step"): [plain_tensor(0, dtype="torch.float64")]},
    }
    path = write(
        tmp_path,
        described,
        model_0={"layers.0.weight": torch.zeros(2, 2), "extra": "text"},
        optimizer_0={"state": {"w": {"step": torch.zeros(())}}, "groups": {"lr": 0.1}},
        train_state_0={"step": 3},
    )
    saved, _ = looked_into(path)
    assert saved.outline == {
        "layers.0.weight": SavedEntry(path=("layers.0.weight",), shape=(4, 2), dtype=torch.float32),
        "seen": SavedEntry(path=("seen",), shape=(3,), dtype=torch.float32),
        "extra": SavedEntry(path=("extra",), shape=None, dtype=None),
        "optimizer.state.w.step": SavedEntry(
            path=("optimizer", "state", "w", "step"), shape=(), dtype=torch.float64
        ),
        "optimizer.groups.lr": SavedEntry(
            path=("optimizer", "groups", "lr"), shape=None, dtype=None
        ),
        "train_state.step": SavedEntry(path=("train_state", "step"), shape=None, dtype=None),
    }
    assert saved.values == {"extra": "text", "optimizer.groups.lr": 0.1, "train_state.step": 3}


def test_values_that_ranks_share_are_those_of_the_lowest_and_their_own_are_all_there(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path,
        {},
        rank_state_0={"world_size": "of 0", "rank_0": {"seed": 1}},
        rank_state_1={"world_size": "of 1", "rank_1": {"seed": 2}},
        rank_state_10={"world_size": "of 10", "rank_10": {"seed": 3}},
    )
    assert looked_into(path)[0].values == {
        "rank_state.world_size": "of 0",
        "rank_state.rank_0.seed": 1,
        "rank_state.rank_1.seed": 2,
        "rank_state.rank_10.seed": 3,
    }


@pytest.mark.parametrize(
    "described,expected",
    [
        ({("w",): shared(4)}, ["model_0.pt"]),
        # What only rank 1 has, as a stage of a pipeline, may have values beside it as well.
        ({("w",): shared(4), ("b",): [plain_tensor(1, 2)]}, ["model_0.pt", "model_1.pt"]),
        ({("w",): [plain_tensor(0, 4)]}, ["model_0.pt", "model_1.pt"]),
    ],
)
def test_no_more_files_are_opened_than_can_hold_values_of_their_own(
    tmp_path: Path, described: Described, expected: list[str]
) -> None:
    path = write(tmp_path, {"model": described}, model_0={"n": 1}, model_1={"n": 2})
    saved, opened = looked_into(path)
    assert saved.values == {"n": 1} and opened == expected


def test_what_a_run_does_not_restore_is_not_opened_and_other_files_are_nobodys(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, {}, model_0={"n": 1}, dataloader_0={"row": 1}, notes={"x": 1})
    for name in ("model_01.pt", "dataloader_0.pt", "model_0.pt.tmp", "_0.pt", "model_0.bin"):
        (tmp_path / name).write_bytes(b"damaged, or not even ours")
    saved, opened = looked_into(path, unneeded={"dataloader"})
    assert saved.values == {"n": 1} and opened == ["model_0.pt"]


def test_lists_of_values_are_one_value_and_lists_of_more_are_several(tmp_path: Path) -> None:
    tree = {"plain": [1, "a", (2,)], "deep": [{"x": 1}, torch.zeros(1), [2, 3]], "empty": []}
    saved, _ = looked_into(write(tmp_path, {}, extra_0=tree))
    assert saved.values == {
        "extra.plain": [1, "a", (2,)],
        "extra.deep.0.x": 1,
        "extra.deep.2": [2, 3],
        "extra.empty": [],
    }


def test_tensors_beside_the_values_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, {}, model_0={"n": 1, "w": torch.zeros(1 << 20)})
    reads: list[int] = []

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            reads.append(len(buffer))
            return super().readinto(buffer)

        def read(self, size: int | None = -1) -> Any:
            content = super().read(size)
            reads.append(len(content or b""))
            return content

    class Counting(DurableStorage):
        def _open_for_read(self, path: Path, use_direct_io: bool) -> Any:
            return Counted(path, "rb")

    assert look(Counting(Watched()), path).values == {"n": 1}
    assert 0 < sum(reads) < 100_000 and os.path.getsize(f"{path}/model_0.pt") > 4_000_000


def test_a_path_without_metadata_is_told_what_it_must_be(tmp_path: Path) -> None:
    torch.save({"n": 1}, tmp_path / "model_0.pt")
    with pytest.raises(CheckpointReadError, match=f"no index {tmp_path}/metadata.pkl.* step-N"):
        looked_into(str(tmp_path))


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_that_would_call_something_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    trace = tmp_path / "trace"
    content = pickle.dumps({"metadata": {}, "world_size": Harmful(trace)})
    (tmp_path / "metadata.pkl").write_bytes(content)
    with pytest.raises(CheckpointReadError, match="metadata.pkl cannot be read: .*holds no code"):
        looked_into(path)
    assert not trace.exists()


def test_metadata_whose_parts_do_not_fit_together_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {("w",): shared(4)}})
    content = pickle.loads((tmp_path / "metadata.pkl").read_bytes())
    content["world_size"] = 7
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointReadError, match="metadata.pkl is not one that .*writes: Runtime"):
        looked_into(path)


def test_tensors_that_another_program_describes_in_its_way_are_refused(tmp_path: Path) -> None:
    other = DefaultShardingMetadata((4,), ((0,),), ((0,),), ((4,),), "torch.float32")
    path = write(tmp_path, {"model": {("w",): [other]}})
    with pytest.raises(CheckpointReadError, match="describes w by DefaultShardingMetadata"):
        looked_into(path)


@pytest.mark.parametrize("damage", ["empty", "cut short", "other bytes", "metadata"])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, {}, model_0={"n": 1})
    file = tmp_path / ("metadata.pkl" if damage == "metadata" else "model_0.pt")
    content = file.read_bytes()
    file.write_bytes(
        {"empty": b"", "other bytes": b"x" * 100}.get(damage, content[: len(content) // 2])
    )
    with pytest.raises(CheckpointReadError) as caught:
        looked_into(path)
    assert str(file) in str(caught.value) and "move " in str(caught.value)


class Item:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


def source(path: str, step: int = 3, model_only: bool = False) -> Source:
    return Source(path=path, step=step, model_only=model_only)


def run_of_one_layer() -> dict[str, Any]:
    return {
        "model": ModelWrapper(torch.nn.Linear(2, 1, bias=False)),
        "train_state": Item(step=0),
        "plain": {"count": 0},
    }


def one_layer(folder: Path, **changed: Any) -> str:
    files = {
        "model_0": {"weight": torch.ones(1, 2)},
        "train_state_0": {"step": 3},
        "plain_0": {"count": 7},
        **changed,
    }
    described: dict[str, Described] = {"model": {("weight",): [plain_tensor(0, 1, 2)]}}
    return write(folder, described, **files)


def restored(path: str, states: dict[str, Any], read: Any = None, **more: Any) -> list[Any]:
    """Restore; what was to be read by the library."""
    asked: list[Any] = []
    options: dict[str, Any] = {"excluded": (), "model_only": False, **more}
    restore(
        source(path, model_only=options["model_only"]),
        states,
        read or asked.append,
        storage=Watched().create_storage(),
        excluded=options["excluded"],
        group=None,
    )
    return asked


def test_the_library_reads_tensors_and_everything_else_is_put_in_its_place(
    tmp_path: Path,
) -> None:
    states = run_of_one_layer()
    plain = states["plain"]
    (asked,) = restored(one_layer(tmp_path), states)
    assert list(asked) == ["model"]
    assert asked["model"]["weight"] is states["model"].state_dict()["weight"]
    assert states["train_state"].state == {"step": 3}
    assert states["plain"] is plain and plain == {"count": 7}


def test_what_is_excluded_is_neither_read_nor_changed(tmp_path: Path) -> None:
    states = run_of_one_layer()
    path = one_layer(tmp_path)
    (tmp_path / "plain_0.pt").write_bytes(b"damaged")
    restored(path, states, excluded=["plain"])
    assert states["plain"] == {"count": 0} and states["train_state"].state == {"step": 3}
    with pytest.raises(CheckpointReadError, match="plain_0.pt"):
        restored(path, states)
    with pytest.raises(ValueError, match="nothing_of_ours not found"):
        restored(path, states, excluded=["nothing_of_ours"])


def test_of_weights_alone_nothing_else_is_read(tmp_path: Path) -> None:
    states = run_of_one_layer()
    path = one_layer(tmp_path)
    for name in ("plain_0.pt", "train_state_0.pt"):
        (tmp_path / name).write_bytes(b"damaged")
    (asked,) = restored(path, states, model_only=True, excluded=["train_state"])
    assert list(asked) == ["model"] and states["plain"] == {"count": 0}


def test_all_that_a_run_needs_and_a_checkpoint_lacks_is_one_error(tmp_path: Path) -> None:
    states = run_of_one_layer()
    states["model"] = ModelWrapper(torch.nn.Linear(3, 1))
    states["other"] = Item(rate=0.1)
    before = {key: states[key].state for key in ("train_state", "other")}
    with pytest.raises(CheckpointMismatchError) as caught:
        restored(one_layer(tmp_path), states, read=lambda into: pytest.fail("nothing to read"))
    text = str(caught.value)
    assert "2 missing: bias, other.rate" in text
    assert "weight (here [1, 3], there [1, 2])" in text
    assert {key: states[key].state for key in before} == before


def test_another_step_than_that_of_the_name_is_refused(tmp_path: Path) -> None:
    path = one_layer(tmp_path, train_state_0={"step": 4})
    with pytest.raises(CheckpointMismatchError, match="4"):
        restored(path, run_of_one_layer())


def test_an_error_of_the_library_names_checkpoint_and_rank(tmp_path: Path) -> None:
    def fail(into: dict[str, Any]) -> None:
        raise OSError(5, "input/output error")

    path = one_layer(tmp_path)
    with pytest.raises(CheckpointReadError) as caught:
        restored(path, run_of_one_layer(), read=fail)
    assert f"Could not read the checkpoint {path}: rank 0: OSError(5," in str(caught.value)


def test_objects_get_their_state_dicts_take_theirs_and_the_model_comes_last() -> None:
    order: list[str] = []

    class Noting(Item):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            order.append(state_dict["name"])
            super().load_state_dict(state_dict)

    states: dict[str, Any] = {"model": Noting(), "z": Noting(), "a": Noting(), "plain": {"x": 1}}
    loaded = {key: {"name": key} for key in ("model", "z", "a")}
    restore_state_dict(states, {**loaded, "plain": {"y": 2}})
    assert order == ["a", "z", "model"]
    assert states["plain"] == {"x": 1, "y": 2}


def test_what_cannot_be_restored_is_an_error_that_names_all_of_it() -> None:
    states: dict[str, Any] = {"model": Item(), "b": 3, "a": (1, 2)}
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_state_dict(states, {"model": {}, "b": 4, "a": (), "gone": {}})
    text = str(caught.value)
    assert "holds a (tuple), b (int), gone (NoneType), which cannot be restored" in text
    assert "--checkpoint.exclude_from_loading" in text


def test_a_bare_tensor_is_filled_in_place_and_a_bare_value_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    mean, states = torch.zeros(2), run_of_one_layer()
    path = one_layer(tmp_path, loader_0=None)
    described: dict[str, Described] = {
        "model": {("weight",): [plain_tensor(0, 1, 2)]},
        "mean": {(): [plain_tensor(0, 2)]},
    }
    write(tmp_path, described, mean_0=torch.ones(2))
    (asked,) = restored(path, states | {"mean": mean, "loader": None})
    assert asked["mean"] is mean
    torch.save(0.5, tmp_path / "best_0.pt")
    with pytest.raises(CheckpointMismatchError, match=r"holds best \(float\), which cannot be"):
        restored(
            path,
            states | {"mean": mean, "loader": None, "best": 0.1},
            read=lambda into: pytest.fail("read"),
        )
