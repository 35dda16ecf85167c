"""Saves through a process of their own on real ranks: what they hold and leave behind, how they end."""

import gc
import os
import pickle
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.tc.leaves import leaves
from torchtitan.components.checkpointer.tc.metadata_file import read_metadata
from torchtitan.tools.signals import StopRequested, StopSignals

from tests.ranks.pinned_runs import load_newest, PATIENCE, writer_pid
from tests.ranks.pool import end_of_ranks, run_on_ranks
from tests.ranks.processes import await_end, children
from tests.ranks.steering import BEFORE_DATA, COMMIT, Hold, Steering
from tests.unit_tests.components.checkpointer.runs import build_run, names, Run
from tests.unit_tests.components.checkpointer.ways import (
    ASYNC,
    DISABLED,
    over,
    PINNED,
    stager_of,
    TC,
    TC_WAITING,
    Way,
)

pytestmark = pytest.mark.ranks

# By the prefixes of their names: threads of executors that live for one save. torch shuts its own
# down from the save's future, so the thread can still be there when the save is known to be over.
ENDING_WITH_ITS_SAVE = ("ThreadPoolExecutor", "AsyncCheckpointExecutor")


class Growing:
    """State that changes its structure from save to save, and afterwards in place."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"rows": [1], "table": torch.zeros(2, 3)}

    def grow(self, step: int) -> None:
        self.values["rows"].append([step, {"deep": step}])
        self.values[f"key {step}"] = torch.full((step,), float(step), dtype=torch.bfloat16)
        self.values["table"] = torch.zeros(step, 3)

    def spoil(self) -> None:
        self.values["rows"].append("too late")
        self.values["table"].fill_(-1.0)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


def contents_of_dcp(checkpoint: Path) -> tuple[dict[str, Any], Any]:
    """Everything in a checkpoint by its flat name, and how its index describes it."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    state: dict[str, Any] = {
        name: (
            torch.empty(entry.size, dtype=entry.properties.dtype)
            if hasattr(entry, "size")
            else None
        )
        for name, entry in index.state_dict_metadata.items()
    }
    dcp_load(state, checkpoint_id=str(checkpoint), no_dist=True)
    described = {
        name: getattr(entry, "chunks", None) for name, entry in index.state_dict_metadata.items()
    }
    return {name: plain(value) for name, value in state.items()}, (index.planner_data, described)


def contents_of_tc(checkpoint: Path) -> tuple[dict[str, Any], Any]:
    """Everything in the files of each rank, and what the index says of it."""
    state: dict[str, Any] = {}
    for file in sorted(checkpoint.glob("*.pt")):
        item = torch.load(file, weights_only=False)
        state |= {f"{file.name} {nested}": plain(leaf) for nested, leaf in leaves(item)}
    return state, read_metadata(str(checkpoint))


def plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return str(value.placements), plain(value.to_local())
    return (str(value.dtype), value.tolist()) if torch.is_tensor(value) else value


def in_use() -> dict[str, int]:
    """What this process holds; threads of an executor end a moment after its last future."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(ENDING_WITH_ITS_SAVE):
            thread.join(10)
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(children()),
        "shared memory": sum("/memfd:" in line or "/dev/shm/" in line for line in mappings),
    }


def private_memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} is gone")


def reference_manager(run: Run, folder: Path, way: Way) -> Any:
    """Saves the same objects in the training thread, in the same format."""
    waiting = DISABLED if way == PINNED else TC_WAITING
    states = run.manager.states
    parts = {key: states[key] for key in ("optimizer", "lr_scheduler", "dataloader")}
    config = waiting.manager.Config(enable=True, interval=1, keep_latest_k=0, **waiting.options)
    return config.build(
        dataloader=parts["dataloader"],
        model_parts=states["model"].model,
        optimizers=parts["optimizer"],
        lr_schedulers=parts["lr_scheduler"],
        states={key: states[key] for key in states if key not in (*parts, "model")},
        sd_adapter=None,
        base_folder=str(folder),
    )


def spoil(run: Run, growing: Growing) -> None:
    """Change everything as early as a run may: buffers and plain values at once, the rest later."""
    growing.spoil()
    run.dataloader.values["row"] = run.progress.values["step"] = -1
    with torch.no_grad():
        run.model.get_buffer("seen").fill_(-1)
    run.manager.maybe_wait_for_staging()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(-1.0)
        for optimizer in run.optimizers:
            for state in optimizer.state.values():
                state["exp_avg"].fill_(-1.0)


def save_what_changes(folder: Path, way: Way) -> Any:
    """Two saves of a state that grows, each made a second time in the training thread before it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    run = build_run(folder / "staged", keep_latest_k=0, **way.settings)
    growing = Growing()
    run.manager.states["extra"] = growing
    reference = reference_manager(run, folder / "reference", way)
    run.manager.interval = 100
    run.train(2)
    pid = writer_pid(run)  # started on a step without a save
    run.manager.interval = 1
    for step in (4, 6):
        run.train(step, save=False)
        growing.grow(step)
        if step == 6:
            many = {f"tensor {number}": torch.tensor([number, -number]) for number in range(1500)}
            growing.values["many"] = many
        values = dict(run.dataloader.values), dict(run.progress.values)
        reference.save(step)
        run.manager.save(step)
        spoil(run, growing)
        run.dataloader.values, run.progress.values = values
        growing.values["rows"].pop()
        assert writer_pid(run) == pid
    run.manager.close()
    return pid


def save_in_a_row(folder: Path, way: Way) -> Any:
    """15 saves after one to warm up, each with an all-reduce at once on training's own group."""
    run = build_run(folder, keep_latest_k=2, **way.settings)
    run.manager.states["ballast"] = torch.zeros(2 * 2**20)  # 8 MiB
    built = in_use()
    sums, used, memory, snapshot = [], [], [], {}
    for step in range(1, 17):
        run.train(step)
        value = torch.full((1000,), float(step + dist.get_rank()))
        dist.all_reduce(value)
        sums.append(float(value[0]))
        if step in (3, 16):
            run.manager.maybe_wait_for_saving()
            used.append(in_use())
            if way.has_writer:
                memory.append(private_memory(writer_pid(run)))
    snapshot = run.snapshot()
    run.manager.close()
    return sums, built, used, in_use(), memory, snapshot


def fork_that_keeps_the_connection(run: Run) -> int:
    """A child as data workers are: with it alive, the writer cannot see its socket end."""
    stager = stager_of(run.manager)
    assert stager is not None and stager._process is not None
    kept = stager._process._connection.fileno()
    if pid := os.fork():
        return pid
    os.closerange(0, kept)
    os.closerange(kept + 1, 4096)
    while True:
        signal.pause()


def be_killed(folder: Path, way: Way) -> None:
    steering = Steering(way)
    run = build_run(folder, **steering.settings)
    rank = dist.get_rank()
    run.train(1)
    run.manager.maybe_wait_for_saving()
    if rank == 0:
        steering.set(COMMIT, Hold(folder, "commit").stop_here)
    run.train(2)
    (folder / f"fork-{rank}").write_text(str(fork_that_keeps_the_connection(run)))
    (folder / f"pid-{rank}").write_text(str(writer_pid(run)))
    (folder / f"ready-{rank}").open("w").close()  # the test opens it once the writer is held
    os.kill(os.getpid(), signal.SIGKILL)


def end_as(folder: Path, way: Way) -> str:
    """Four runs of one rank each, which end in four ways with a save in flight."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    steering = Steering(way)
    run = build_run(folder / str(rank), **steering.settings)
    hold = Hold(folder, f"rank-{rank}").make()
    steering.set(BEFORE_DATA, hold.stop_here)
    run.train(1)
    hold.await_reached()
    pid = writer_pid(run)
    (folder / f"pid-{rank}").write_text(str(pid))
    if rank == 0:
        hold.let_go()
        return "without closing"
    if rank == 1:
        raise RuntimeError("an exception that nobody catches")
    with StopSignals():
        try:
            os.kill(os.getpid(), {2: signal.SIGTERM, 3: signal.SIGINT}[rank])
            threading.Event().wait(30)
        except StopRequested as stop:
            os.kill(pid, stop.signal_number)
            hold.let_go()
            run.manager.close()
    return "closed"


@over(PINNED, TC)
def test_a_checkpoint_is_the_one_that_a_save_in_the_training_thread_makes(
    tmp_path: Path, way: Way
) -> None:
    pids = run_on_ranks(2, save_what_changes, tmp_path, way, **PATIENCE)
    assert None not in pids and len(set(pids)) == 2
    contents = contents_of_dcp if way is PINNED else contents_of_tc
    for step in (4, 6):
        staged, index = contents(tmp_path / f"staged/checkpoint/step-{step}")
        reference, expected = contents(tmp_path / f"reference/checkpoint/step-{step}")
        assert len(staged) > 40
        assert staged == reference
        assert index == expected
    assert len(staged) > 1500


@over(ASYNC, PINNED, TC)
def test_saves_in_a_row_never_meet_training_s_collectives_and_use_up_nothing(
    tmp_path: Path, way: Way
) -> None:
    ends = run_on_ranks(2, save_in_a_row, tmp_path, way, **PATIENCE)
    for sums, built, used, closed, memory, _ in ends:
        assert sums == [2.0 * step + 1 for step in range(1, 17)]
        assert used[0] == used[1]
        assert closed["processes"] == built["processes"] and closed["threads"] <= built["threads"]
        assert closed["shared memory"] == built["shared memory"]
        if way.has_writer:
            assert used[0]["processes"] == built["processes"] + 1
            assert used[0]["shared memory"] == built["shared memory"] + 1
            assert closed["descriptors"] <= built["descriptors"]
            assert memory[1] - memory[0] < 24 * 2**20
    assert names(tmp_path) == ["step-15", "step-16"]
    for step, snapshot in run_on_ranks(2, load_newest, tmp_path, way):
        assert step == 16 and snapshot == ends[0][5]


@over(PINNED, TC)
def test_a_writer_dies_with_its_killed_trainer_and_commits_nothing(
    tmp_path: Path, way: Way
) -> None:
    hold = Hold(tmp_path, "commit").make()
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"ready-{rank}")
    ends: list[Any] = []
    runs = threading.Thread(
        target=lambda: ends.extend(
            end_of_ranks(2, be_killed, tmp_path, way, settle_seconds=30, **PATIENCE)
        )
    )
    runs.start()
    hold.await_reached()
    for rank in (0, 1):
        (tmp_path / f"ready-{rank}").open("r").close()
    runs.join()
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 2, [end.log for end in ends]
    try:
        await_end([int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)])
    finally:
        for rank in (0, 1):
            os.kill(int((tmp_path / f"fork-{rank}").read_text()), signal.SIGKILL)
    assert names(tmp_path) == sorted(["step-1", way.unfinished(2)])
    files = {path.name for path in (tmp_path / "checkpoint" / way.unfinished(2)).iterdir()}
    if way is PINNED:
        assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata.tmp"}
    else:
        assert {"metadata.pkl", "model_0.pt", "model_1.pt"} < files
    assert way.complete(tmp_path) == ["step-1"]


@over(PINNED, TC)
def test_no_ending_leaves_a_writer_behind_and_orderly_ones_finish_the_save(
    tmp_path: Path, way: Way
) -> None:
    ends = end_of_ranks(4, end_as, tmp_path, way, init=False, settle_seconds=240, **PATIENCE)
    values = [end.value or end.detail.splitlines()[-1] for end in ends]
    assert values[0] == "without closing" and "nobody catches" in values[1]
    assert values[2:] == ["closed", "closed"], [end.log for end in ends]
    await_end([int((tmp_path / f"pid-{rank}").read_text()) for rank in range(4)])
    complete = [way.complete(tmp_path / str(rank)) for rank in range(4)]
    # Python itself waits for the thread of a save that nobody closed.
    assert complete == [["step-1"], [], ["step-1"], ["step-1"]]
