"""One run, interrupted in every way there is, started again with the same settings each time.

    power cut -> Ctrl-C -> a rank raises -> a rank is killed and torchrun restarts all -> the end;
    beside it the same run without interruptions, and a simulated one

Starting ranks costs most of the time here, so all tests look at the same few starts, and only those
of which torchrun is a part go through it. test_launch.py has the other ways in which it passes on a stop.
"""

import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration_tests.launched import Launched
from tests.integration_tests.small_run import (
    complete_steps,
    CONTEXT,
    FAULTY,
    LLAMA,
    main_on_ranks,
    SETTINGS,
    Story,
)
from tests.ranks.pool import RankEnd
from tests.unit_tests.structure.sources import ROOT

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.slow,
    # The first test pays for all starts.
    pytest.mark.timeout(1200),
]
STEPS, INTERVAL = 18, 2
SCHEDULE = [f"--training.steps={STEPS}", f"--checkpoint.interval={INTERVAL}"]
SAVED = "Saved checkpoint of step"
TORCHRUN = ["--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
TORCHRUN += ["--tee=3", "--local-ranks-filter=0"]
# As run_train.sh sets them.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(kw_only=True)
class Start(Story):
    """One start of the run."""

    code: int = 0
    """Exit code of the command, if there was one."""
    ends: list[RankEnd] = field(default_factory=list)
    """How each rank ended, where there was no command."""
    newest_before: int
    newest_after: int
    """Steps of the newest complete checkpoint; 0 is none."""


@dataclass
class Journey:
    folder: Path
    cache: Path
    starts: dict[str, Start] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        return [f"--dump_folder={self.folder}", *SETTINGS, *SCHEDULE]

    def newest(self) -> int:
        return max(complete_steps(self.folder), default=0)

    def on_ranks(self, name: str, *arguments: str) -> None:
        """Start the run on two ranks that need no launcher."""
        before = self.newest()
        ends = main_on_ranks(2, [*FAULTY, *self.arguments, *arguments], cache=self.cache)
        self.starts[name] = Start(
            output=ends[0].log, ends=ends, newest_before=before, newest_after=self.newest()
        )

    def by_command(
        self, name: str, command: list[str | Path], number: int | None = None, **environment: str
    ) -> None:
        """Run ``command``; stop it with signal ``number``, if given, once it has saved."""
        before = self.newest()
        environment |= {"TORCHTITAN_CACHE_DIR": str(self.cache), "PYTHON": sys.executable}
        environment |= ENVIRONMENT
        with Launched(command, cwd=ROOT, env=environment) as run:
            if number is not None:
                run.until(SAVED)
                run.signal_group(number)
            code = run.finish()
            run.wait_until_all_are_gone()
        self.starts[name] = Start(
            output=run.output, code=code, newest_before=before, newest_after=self.newest()
        )


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    base = tmp_path_factory.mktemp("journey")
    journey = Journey(base / "run", base / "cache")
    # The second save has awaited the first, so that one cannot be lost any more.
    kill = ["--fault.kind=kill", f"--fault.after_steps={2 * INTERVAL + 1}"]
    journey.on_ranks("power_cut", *kill, "--fault.rank=-1")
    # However fast the machine and however late the test: no start uses up the steps of the others.
    at_most = [*FAULTY, "--fault.kind=wait", f"--fault.after_steps={3 * INTERVAL}"]
    script = [ROOT / "run_train.sh", *journey.arguments, *at_most]
    journey.by_command("ctrl_c", script, signal.SIGINT, NGPU="2")
    raises = ["--fault.kind=raise", f"--fault.after_steps={INTERVAL + 1}"]
    journey.on_ranks("rank_raises", *raises)
    train = ["-m", "torchtitan.train", *FAULTY, *journey.arguments]
    launch = [sys.executable, "-m", "torchtitan.launch", *TORCHRUN, "--max-restarts=1"]
    journey.by_command("rank_killed", [*launch, *train, *kill, "--fault.first_attempt_only"])
    batch = f"--training.num_tokens_per_train_step={8 * CONTEXT}"
    simulated = ["--comm.mode=fake_backend", batch, "--training.steps=1"]
    ranks = {"NGPU": "8", "RANK": "3", "LOCAL_RANK": "0"}
    journey.by_command("fake", [sys.executable, *train, *simulated], **ranks)
    return journey


def test_every_start_goes_on_from_the_newest_complete_checkpoint(journey: Journey) -> None:
    for name, start in journey.starts.items():
        if name not in ("power_cut", "fake"):
            assert start.loaded_steps()[0] == start.newest_before, (name, start.output)
            assert f"Resuming after step {start.newest_before} of {STEPS}" in start.output
            assert min(start.losses()) == start.newest_before + 1
            assert start.newest_after > start.newest_before, "the way forward must never be lost"


def test_the_losses_are_those_of_the_run_that_was_never_interrupted(
    journey: Journey, tmp_path: Path
) -> None:
    arguments = [*LLAMA, f"--dump_folder={tmp_path}", *SETTINGS, *SCHEDULE]
    arguments.append("--checkpoint.no-enable")
    whole = Story(main_on_ranks(2, arguments, cache=journey.cache)[0].log).losses()
    assert sorted(whole) == list(range(1, STEPS + 1))
    seen: set[int] = set()
    for name, start in journey.starts.items():
        if name != "fake":
            # Steps that an interruption undid are done again, and come out the same again.
            losses = start.losses()
            assert losses == {step: whole[step] for step in losses}, name
            seen |= losses.keys()
    assert seen == set(range(1, STEPS + 1))


def test_a_stopped_run_says_how_to_go_on_and_exits_with_its_signal(journey: Journey) -> None:
    start = journey.starts["ctrl_c"]
    assert start.code == 130, start.output
    assert "Traceback" not in start.output
    assert "Stopped by SIGINT." in start.output
    assert start.output.count("Press Ctrl-C again") == 1
    newest = f"Newest checkpoint: {journey.folder}/checkpoint/step-{start.newest_after}."
    command = f"To go on from it: NGPU=2 PYTHON={sys.executable} {ROOT}/run_train.sh "
    command += f"--dump_folder={journey.folder} "
    assert f"{newest} {command}" in start.last_line()


def test_the_error_of_one_rank_is_in_the_log_of_every_rank(journey: Journey) -> None:
    start = journey.starts["rank_raises"]
    step = start.newest_before + INTERVAL + 2
    for end in start.ends:
        assert end.how == "raised", end
        assert f"rank 1 failed first, at step {step}: Traceback" in end.log
        assert f"ValueError: row 7 of step {step} is broken" in end.log
        assert "did not end within" not in end.log
    assert f"Newest checkpoint: {journey.folder}/checkpoint/step-" in start.output


def test_torchrun_restarts_the_run_after_a_killed_rank(journey: Journey) -> None:
    start = journey.starts["rank_killed"]
    assert start.code == 0, start.output
    first, second = start.loaded_steps()
    assert second > first == start.newest_before
    assert "Training completed" in start.output
    assert start.newest_after == STEPS
    newest = f"Newest checkpoint: {journey.folder}/checkpoint/step-{STEPS}. To go on from it: "
    assert newest + "torchrun ... -m torchtitan.train " in start.last_line()
    assert start.last_line().endswith(f"--training.steps {2 * STEPS}")


def test_a_finished_run_that_is_started_again_does_nothing(journey: Journey) -> None:
    before = _files(journey.folder / "checkpoint")
    arguments = [*LLAMA, f"--dump_folder={journey.folder}", *SETTINGS, *SCHEDULE]
    ends = main_on_ranks(2, arguments, cache=journey.cache)
    assert [end.how for end in ends] == ["returned"] * 2, ends
    assert f"Step {STEPS} is the last one already" in ends[0].log
    assert Story(ends[0].log).losses() == {}
    assert f"Newest checkpoint: {journey.folder}/checkpoint/step-{STEPS}." in ends[0].log
    assert _files(journey.folder / "checkpoint") == before


def test_a_simulated_run_neither_reads_nor_writes_checkpoints(journey: Journey) -> None:
    start = journey.starts["fake"]
    assert start.code == 0, start.output
    assert start.loaded_steps() == [] and SAVED not in start.output
    assert "8 ranks = 8 shards" in start.output and "WARNING" not in start.output
    assert "[titan rank 3]" in start.output and "Training completed" in start.output
    steps = complete_steps(journey.folder)
    assert 1 not in steps and steps[-1] == STEPS


def _files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}
