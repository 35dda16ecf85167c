"""What torch_checkpointing would write or read wrong, and is an error here, on all ranks.

what it does if left alone                         what shows that it does not reach a user
-------------------------------------------------  -----------------------------------------------
a tensor of another shape on each rank: a prefix   test_what_could_not_be_read_back_is_refused...
a lone strided shard comes back in another order   the same
sums to come, sparse and other kinds of tensors    the same
two keys of one name fail when they are resharded  the same
a function in the state ends the saver for good    the same: a good save follows each bad one
another global shape: a prefix is loaded           test_what_does_not_fit_is_one_error_with_all...
missing keys are left, surplus ones passed over    the same
without metadata each rank reads its own file      test_a_damaged_checkpoint_is_an_error_that_says...
a staging directory is loaded like a checkpoint    the same
what a file of it was made to call is called       the same
a cut file raises, but it says not which           the same
a key that is no file name is found while saving   test_a_key_that_is_no_file_name_is_refused_at_once
"""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.ranks.pool import run_on_ranks
from tests.ranks.traps import held, Held, run_with
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names
from tests.unit_tests.components.checkpointer.ways import TC

pytestmark = pytest.mark.ranks


class OfOurOwn(torch.Tensor):
    """A kind of tensor."""


def _lone_stripes(mesh: DeviceMesh) -> DTensor:
    stripes = [_StridedShard(0, split_factor=2)]
    return DTensor.from_local(torch.arange(4.0), mesh, stripes, run_check=False)


# What to put into a state, and what is said of it.
REFUSED: dict[str, tuple[Callable[[DeviceMesh], dict[str, Any]], str]] = {
    "a function of rank 1": (
        lambda mesh: {"f": (lambda: 1)} if dist.get_rank() == 1 else {},
        "rank 1: the state extra cannot be saved: ValueError: extra.f cannot be saved: AttributeError(\"Can't",
    ),
    "a function beside shards": (
        lambda mesh: {"f": len, "g": lambda: 1, "t": distribute_tensor(torch.ones(4), mesh, [Shard(0)])},
        "rank 0: the state extra cannot be saved: ValueError: extra.f cannot be saved, because no load would",
    ),
    "values of one name": (
        lambda mesh: {"a.b": 1, "a": {"b": 2}},
        "two entries of one name, once they are written with dots: extra.a.b (['a.b'] and ['a', 'b'])",
    ),
    "tensors of one name": (
        lambda mesh: {"a": [torch.ones(1)], "a.0": torch.zeros(1)},
        "two entries of one name, once they are written with dots: extra.a.0",
    ),
    "sums to come": (
        lambda mesh: {"t": DTensor.from_local(torch.ones(2), mesh, [Partial()])},
        "extra::t is P(sum): its values are still to be summed over ranks",
    ),
    "lone stripes": (
        lambda mesh: {"t": _lone_stripes(mesh)},
        "reads back in another order; use --checkpoint.backend dcp",
    ),
    "another shape on each rank": (
        lambda mesh: {"t": torch.ones(2 + dist.get_rank())},
        "extra.t differs between ranks: [2] of float32 on rank 0; [3] of float32 on rank 1",
    ),
    "another dtype on each rank": (
        lambda mesh: {"t": torch.ones(2, dtype=[torch.int32, torch.int64][dist.get_rank()])},
        "extra.t differs between ranks: [2] of int32 on rank 0; [2] of int64 on rank 1",
    ),
    "a sparse tensor": (
        lambda mesh: {"deep": [{"t": torch.eye(3).to_sparse()}]},
        "deep.0.t is a tensor of type Tensor (torch.sparse_coo, torch.float32), which",
    ),
    "a tensor of another kind": (
        lambda mesh: {"t": torch.ones(2).as_subclass(OfOurOwn)},
        "t is a tensor of type OfOurOwn (torch.strided, torch.float32), which",
    ),
}  # fmt: skip


def save_bad_ones(folder: Path) -> tuple[dict[str, str], list[str], Any]:
    """What is said of each bad state; the names of what is there; what a run loads then."""
    run = run_with(folder, extra={"good": 1})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    run.train(1, last_step=1)  # the saves after it are made by this thread too
    extra, messages = run.manager.states["extra"], {}
    for name, (make, _) in REFUSED.items():
        extra.values = make(mesh)
        messages[name] = message_of(run.train, run.step + 1)
        extra.values = {"good": run.step + 1}
        run.train(run.step + 1)
    run.manager.close()
    other = run_with(folder, seed=3, extra={})
    assert other.manager.load()
    assert other.snapshot() == run.snapshot()
    return messages, names(folder), held(other)["extra"]


def test_what_could_not_be_read_back_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for messages, found, loaded in run_on_ranks(2, save_bad_ones, tmp_path):
        assert messages.keys() == REFUSED.keys()
        for number, (name, (_, words)) in enumerate(REFUSED.items()):
            step = 2 * number + 2
            begin = (
                f"Saving the checkpoint of step {step} to {tmp_path}/checkpoint/step-{step} failed"
            )
            assert messages[name].startswith(begin), name
            assert words in messages[name] and "Older checkpoints are untouched" in messages[name]
        # Nothing of the bad ones, not even under a staging name.
        last = 2 * len(REFUSED) + 1
        assert found == sorted(f"step-{step}" for step in range(1, last + 1, 2))
        assert loaded == {"good": last}


def save_one(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])
    run = run_with(folder, extra={"table": table, "name": "first"}, other={"a": {"b": 1}})
    run.train(1, last_step=1)
    run.manager.close()


def error_of(action: Callable[..., Any], *arguments: Any) -> str:
    try:
        action(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def load_into_another_run(folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = distribute_tensor(torch.zeros(10, 4), mesh, [Shard(0)])
    wider = run_with(folder, width=8, extra={"table": table}, missing={"c": {"d": 2}, "e": 3})
    # A state may have grown; the model may not.
    grown = run_with(folder, extra={"table": table}, other={})
    messages = [error_of(run.manager.load) for run in (wider, grown)]
    assert held(grown)["extra"]["table"][1] == (8, 4) and grown.step == 1
    for run in (wider, grown):
        run.manager.close()
    return messages


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_what_does_not_fit_is_one_error_with_all_of_it(tmp_path: Path, num_ranks: int) -> None:
    run_on_ranks(2, save_one, tmp_path)
    for wider, grown in run_on_ranks(num_ranks, load_into_another_run, tmp_path):
        assert wider.startswith(
            f"CheckpointMismatchError: The checkpoint {tmp_path}/checkpoint/step-1"
        )
        assert "2 missing: missing.c.d, missing.e; " in wider
        assert "1 unexpected: other.a.b; " in wider
        assert "tok_embeddings.weight (here [11, 8], there [11, 7])" in wider
        assert "layers.1.bias (here [8], there [7])" in wider
        assert "optimizer.state.layers.0.weight.exp_avg (here" in wider
        assert grown == "nothing was raised"


def take(path: Path, name: str) -> None:
    (path / name).unlink()


def cut(path: Path, name: str) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])


class _CallsWhenRead:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def arm(path: Path, name: str) -> None:
    armed = _CallsWhenRead(path / "was called")
    if name.endswith(".pt"):
        torch.save(armed, path / name)
    else:
        (path / name).write_bytes(pickle.dumps(armed))


# (name of the directory, what is done to it, what is said of it)
DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("tmp_step-1", lambda path: None, "which a save left behind that did not finish"),
    ("no-index", lambda path: take(path, "metadata.pkl"), "without the index of a checkpoint"),
    ("cut-index", lambda path: cut(path, "metadata.pkl"), "/metadata.pkl cannot be read"),
    ("armed-index", lambda path: arm(path, "metadata.pkl"), "asks for posix.mkdir, and the index"),
    (
        "armed-values",
        lambda path: arm(path, "other_0.pt"),
        "asks for posix.mkdir, and a checkpoint",
    ),
    ("armed-shard", lambda path: arm(path, "model_1.pt"), "asks for posix.mkdir, and a checkpoint"),
    ("no-shard", lambda path: take(path, "model_1.pt"), "model_1.pt is missing"),
    ("cut-shard", lambda path: cut(path, "optimizer_1.pt"), "optimizer_1.pt cannot be read: "),
    ("cut-values", lambda path: cut(path, "other_0.pt"), "/cut-values/other_0.pt cannot be read: "),
    ("no-values", lambda path: take(path, "other_0.pt"), "1 missing: other.a.b"),
]


def load_what_is_damaged(folder: Path) -> dict[str, str]:
    messages = {}
    for name, _, _ in DAMAGES:
        settings = {"initial_load_path": str(folder / name), "initial_load_model_only": False}
        run = build_run(folder / "empty", load_only=True, **settings, **TC.settings)
        run.manager.states |= {"extra": Held({}), "other": Held({"a": {"b": 2}})}
        messages[name] = error_of(run.manager.load)
        run.manager.close()
    return messages


def test_a_damaged_checkpoint_is_an_error_that_says_where(tmp_path: Path) -> None:
    run_on_ranks(2, save_one, tmp_path)
    for name, damage, _ in DAMAGES:
        shutil.copytree(tmp_path / "checkpoint/step-1", tmp_path / name)
        # Of what is known about its files a manifest tells sooner, and more.
        (tmp_path / name / "manifest.json").unlink()
        damage(tmp_path / name)
    for messages in run_on_ranks(2, load_what_is_damaged, tmp_path):
        for name, _, words in DAMAGES:
            assert words in messages[name] and str(tmp_path / name) in messages[name], messages
    assert list(tmp_path.glob("*/was called")) == []
