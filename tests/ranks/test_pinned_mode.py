"""The mode async_with_pinned_mem on real ranks: what it saves, what it leaves, how it ends."""

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
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.tools.signals import StopRequested, StopSignals

from tests.ranks.held_writer import DATA, Hold, hold_next_save, INDEX
from tests.ranks.pinned_runs import await_end, children, load_newest, PATIENCE, PINNED, writer_pid
from tests.ranks.pool import end_of_ranks, run_on_ranks
from tests.unit_tests.components.checkpointer.runs import build_run, names, Run

pytestmark = pytest.mark.ranks


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


def contents(checkpoint: Path) -> tuple[dict[str, Any], Any]:
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
    assert len(state) > 40
    plain = {
        name: (str(value.dtype), value.tolist()) if torch.is_tensor(value) else value
        for name, value in state.items()
    }
    return plain, index


def in_use() -> dict[str, int]:
    """What this process holds; threads of an executor end a moment after its last future."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
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


def reference_manager(run: Run, folder: Path) -> CheckpointManager:
    """Saves the same objects in the training thread."""
    states = run.manager.states
    parts = {key: states[key] for key in ("optimizer", "lr_scheduler", "dataloader")}
    return CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0).build(
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


def save_what_changes(folder: Path) -> Any:
    """Two saves of a state that grows, each made a second time in the training thread before it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    run, growing = build_run(folder / "pinned", async_mode=PINNED, keep_latest_k=0), Growing()
    run.manager.states["extra"] = growing
    reference = reference_manager(run, folder / "reference")
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


def save_in_a_row(folder: Path, mode: str) -> Any:
    """15 saves after one to warm up, each with an all-reduce at once on training's own group."""
    run = build_run(folder, async_mode=mode, keep_latest_k=2)
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
            if mode == PINNED:
                memory.append(private_memory(writer_pid(run)))
    snapshot = run.snapshot()
    run.manager.close()
    return sums, built, used, in_use(), memory, snapshot


def fork_that_keeps_the_connection(run: Run) -> int:
    """A child as data workers are: with it alive, the writer cannot see its socket end."""
    stager = run.manager.stager
    assert stager is not None and stager._process is not None
    kept = stager._process._connection.fileno()
    if pid := os.fork():
        return pid
    os.closerange(0, kept)
    os.closerange(kept + 1, 4096)
    while True:
        signal.pause()


def be_killed(folder: Path) -> None:
    run = build_run(folder, async_mode=PINNED)
    rank = dist.get_rank()
    run.train(1)
    run.manager.maybe_wait_for_saving()
    if rank == 0:
        hold_next_save(Hold(folder, "index"), INDEX)
    run.train(2)
    (folder / f"fork-{rank}").write_text(str(fork_that_keeps_the_connection(run)))
    (folder / f"pid-{rank}").write_text(str(writer_pid(run)))
    (folder / f"ready-{rank}").open("w").close()  # the test opens it once the writer is held
    os.kill(os.getpid(), signal.SIGKILL)


def end_as(folder: Path) -> str:
    """Four runs of one rank each, which end in four ways with a save in flight."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = build_run(folder / str(rank), async_mode=PINNED)
    hold = Hold(folder, f"rank-{rank}").make()
    hold_next_save(hold, DATA)
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


def test_a_checkpoint_is_the_one_that_a_save_in_the_training_thread_makes(tmp_path: Path) -> None:
    pids = run_on_ranks(2, save_what_changes, tmp_path, **PATIENCE)
    assert None not in pids and len(set(pids)) == 2
    for step in (4, 6):
        pinned, index = contents(tmp_path / f"pinned/checkpoint/step-{step}")
        reference, expected = contents(tmp_path / f"reference/checkpoint/step-{step}")
        assert pinned == reference
        assert index.planner_data == expected.planner_data
        for name, entry in expected.state_dict_metadata.items():
            found = index.state_dict_metadata[name]
            assert getattr(found, "chunks", None) == getattr(entry, "chunks", None)
    assert len(pinned) > 1500


@pytest.mark.parametrize("mode", ["async", PINNED])
def test_saves_in_a_row_never_meet_training_s_collectives_and_use_up_nothing(
    tmp_path: Path, mode: str
) -> None:
    ends = run_on_ranks(2, save_in_a_row, tmp_path, mode, **PATIENCE)
    for sums, built, used, closed, memory, _ in ends:
        assert sums == [2.0 * step + 1 for step in range(1, 17)]
        assert used[0] == used[1]
        assert closed["processes"] == built["processes"] and closed["threads"] <= built["threads"]
        assert closed["shared memory"] == built["shared memory"]
        if mode == PINNED:
            assert used[0]["processes"] == built["processes"] + 1
            assert used[0]["shared memory"] == built["shared memory"] + 1
            assert closed["descriptors"] == built["descriptors"]
            assert memory[1] - memory[0] < 24 * 2**20
    assert names(tmp_path) == ["step-15", "step-16"]
    for step, snapshot in run_on_ranks(2, load_newest, tmp_path):
        assert step == 16 and snapshot == ends[0][5]


def test_a_writer_dies_with_its_killed_trainer_and_commits_nothing(tmp_path: Path) -> None:
    hold = Hold(tmp_path, "index").make()
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"ready-{rank}")
    ends: list[Any] = []
    runs = threading.Thread(
        target=lambda: ends.extend(
            end_of_ranks(2, be_killed, tmp_path, settle_seconds=30, **PATIENCE)
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
    files = {path.name for path in (tmp_path / "checkpoint/step-2").iterdir()}
    assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata.tmp"}
    assert (tmp_path / "checkpoint/step-1/.metadata").exists()


def test_no_ending_leaves_a_writer_behind_and_orderly_ones_finish_the_save(tmp_path: Path) -> None:
    ends = end_of_ranks(4, end_as, tmp_path, init=False, settle_seconds=240, **PATIENCE)
    values = [end.value or end.detail.splitlines()[-1] for end in ends]
    assert values[0] == "without closing" and "nobody catches" in values[1]
    assert values[2:] == ["closed", "closed"], [end.log for end in ends]
    await_end([int((tmp_path / f"pid-{rank}").read_text()) for rank in range(4)])
    complete = [(tmp_path / f"{rank}/checkpoint/step-1/.metadata").exists() for rank in range(4)]
    # Python itself waits for the thread of a save that nobody closed.
    assert complete == [True, False, True, True]
