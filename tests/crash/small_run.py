"""A run of three small tensors: every value in it tells which step it is of and which run has made it.

So a state can be checked bit for bit without the run that made it. It has no optimizer and no data,
only what stands for them: a crash point is worth a tenth of a second, and there are thousands.

    SmallRun.save, settle -> a real manager, and what was asked and answered as notes (promises.py)
    SmallRun.load, found -> what a start goes on from
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components.checkpointer.integrity.manifest import RunDescription

from tests.crash.promises import ACKNOWLEDGED, BEGUN, facts, LOADED, Saved
from tests.unit_tests.components.checkpointer.runs import build_manager
from tests.unit_tests.components.checkpointer.ways import Way

NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "resumed", "again")
"""Of all runs that there are; weights alone do not tell it."""

SHAPES = {"weight": (6, 2), "bias": (3,), "moments": (6, 2)}
_SHARDED = ("weight", "moments")

Note = Callable[[str, int, bytes], None]


def values(step: int, by: str) -> dict[str, torch.Tensor]:
    """All tensors of the state after ``step`` in the run ``by``; no two states share a value."""
    # Whole numbers that float32 holds exactly.
    first = step * 65536 + zlib.crc32(by.encode()) % 1024 * 64
    found = {}
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
        first += count
    return found


class Moments:
    """What stands for an optimizer: flat names, a tensor and a number."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.rate = tensor, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"state.weight.exp_avg": self.tensor, "param_groups.weight.lr": self.rate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with torch.no_grad():
            self.tensor.copy_(state_dict["state.weight.exp_avg"])
        self.rate = state_dict["param_groups.weight.lr"]


class Progress:
    """The trainer's own state, whose step a load compares with that in the name of the checkpoint."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"step": 0, "by": ""}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)


class SmallRun:
    """One run, on all ranks that there are."""

    def __init__(
        self,
        folder: str | Path,
        way: Way,
        *,
        by: str,
        note: Note = lambda what, step, content: None,
        keep: int = 2,
        **settings: Any,
    ) -> None:
        """
        Args:
            by: the name of the run, by which its states are told from those of others.
            note: takes down what it asks of the manager, and is answered.
            keep: as ``keep_latest_k``.
        """
        assert by in NAMES
        self.by, self.keep = by, keep
        self._note = note
        self._open: tuple[int, str] | None = None
        self.weights_alone = bool(settings.setdefault("last_save_model_only", False))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if _num_ranks() > 1 else None
        tensors = {name: _zeros(name, mesh) for name in SHAPES}
        self.model = nn.Module()
        for name in ("weight", "bias"):
            self.model.register_parameter(name, nn.Parameter(tensors[name]))
        self.moments = Moments(tensors["moments"])
        self.progress = Progress()
        parts: tuple[Any, ...] = (self.model, self.moments, None, None, self.progress)
        settings = {**way.settings, "keep_latest_k": keep, "timeout_seconds": 120, **settings}
        self.manager = build_manager(folder, *parts, **settings)
        self._describe()

    def load(self, step: int = -1) -> bool:
        """Load, and note what a run goes on from."""
        is_loaded = self.manager.load(step)
        found = self.progress.values
        self._say(LOADED, found["step"], by=found["by"], is_asked=step != -1)
        if _num_ranks() > 1:
            # Rank 0 says it for all, and nobody is to begin a save before that is said.
            dist.barrier()
        return is_loaded

    def save(self, step: int, *, by: str = "", is_last: bool = False) -> None:
        """Save after ``step``, from now on in the name ``by`` if one is given."""
        self.settle()
        self.manager.maybe_wait_for_staging()
        self.by = by or self.by
        self.become(step)
        is_full = not (is_last and self.weights_alone)
        asked = {"by": self.by, "keep": self.keep, "is_last": is_last, "is_full": is_full}
        self._say(BEGUN, step, **asked)
        self._open = step, self.by
        assert self.manager.save(step, last_step=is_last)
        if self.manager.save_future is None:
            self.settle()

    def settle(self) -> None:
        """Wait for the save in flight, and note that it is complete."""
        self.manager.maybe_wait_for_saving()
        if self._open is not None:
            (step, by), self._open = self._open, None
            self._say(ACKNOWLEDGED, step, by=by)

    def delete_before_writing(self) -> None:
        """Let deletions be as fast as they can be, where they would be over at any time."""
        make_ready = self.manager._make_ready

        def make_ready_and_wait(*args: Any, **keywords: Any) -> None:
            make_ready(*args, **keywords)
            self.manager.purge_queue.join()

        self.manager._make_ready = make_ready_and_wait

    def close(self) -> None:
        """End in order."""
        self.settle()
        self.manager.close()
        if _num_ranks() == 1 and (group := getattr(self.manager, "pg", None)) is not None:
            # A program has one manager; of thousands the sockets and threads would stay.
            dist.destroy_process_group(group)

    def become(self, step: int) -> None:
        """Take on the state after ``step``."""
        wanted = values(step, self.by)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                _local(tensor).copy_(_share(wanted[name], name))
        self.moments.rate = float(step)
        self.progress.values.update(step=step, by=self.by)
        self._describe()

    def found(self) -> Saved:
        """Which state this is, on one rank. AssertionError if it is none, or not all of one."""
        step, by = self.progress.values["step"], self.progress.values["by"]
        wanted = values(step, by)
        for name, tensor in self._tensors().items():
            assert torch.equal(tensor, wanted[name]), (
                f"{name} is not that of step {step} of the run {by!r}: {tensor.flatten().tolist()}, "
                f"and not {wanted[name].flatten().tolist()}"
            )
        assert self.moments.rate == step, f"the rate is {self.moments.rate} in step {step}"
        return Saved(step, by)

    def found_weights(self, step: int) -> Saved | None:
        """Which state of ``step`` the weights are those of, on one rank; None if of none."""
        for by in NAMES:
            wanted = values(step, by)
            if all(torch.equal(it, wanted[name]) for name, it in self.model.named_parameters()):
                return Saved(step, by, is_full=False)
        return None

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), "moments": self.moments.tensor}

    def _describe(self) -> None:
        self.manager.describe_run(RunDescription(config={"by": self.by}))

    def _say(self, what: str, step: int, **known: Any) -> None:
        # What is loaded is the same on all ranks, and one of them may be ahead of another one.
        if what != LOADED or not dist.is_initialized() or dist.get_rank() == 0:
            self._note(what, step, facts(**known))


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _zeros(name: str, mesh: Any) -> torch.Tensor:
    if mesh is None or name not in _SHARDED:
        return torch.zeros(SHAPES[name])
    own = _share(torch.zeros(SHAPES[name]), name).clone()
    return DTensor.from_local(own, mesh, [Shard(0)])


def _share(whole: torch.Tensor, name: str) -> torch.Tensor:
    """What this rank has of a tensor."""
    if name not in _SHARDED or _num_ranks() == 1:
        return whole
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
