"""One run, interrupted in every way there is, started again with the same command each time.

    power cut -> launcher killed -> Ctrl-C -> SIGTERM -> a rank raises -> a rank is killed and torchrun
    restarts all -> the end;  beside it the same run without interruptions

Starting ranks costs most of the time here, so all tests look at the same seven starts.
"""

import signal
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
from tests.unit_tests.structure.sources import ROOT

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.slow,
    # The first test pays for all starts.
    pytest.mark.timeout(1200),
]
STEPS, INTERVAL = 64, 4
SCHEDULE = [f"--training.steps={STEPS}", f"--checkpoint.interval={INTERVAL}"]
SAVED = "Saved checkpoint of step"


@dataclass(kw_only=True)
class Start(Story):
    """One start of the run."""

    code: int
    """Exit code of the command, negative for a signal."""
    newest_before: int
    newest_after: int
    """Steps of the newest complete checkpoint; 0 is none."""


@dataclass
class Journey:
    folder: Path
    cache: Path
    starts: dict[str, Start] = field(default_factory=dict)

    def launch(self, *arguments: str, **environment: str) -> Launched:
        command = [ROOT / "run_train.sh", f"--dump_folder={self.folder}", *SETTINGS, *SCHEDULE]
        environment["TORCHTITAN_CACHE_DIR"] = str(self.cache)
        return Launched([*command, *arguments], cwd=ROOT, env=environment)

    def newest(self) -> int:
        return max(complete_steps(self.folder), default=0)

    def interrupt(self, name: str, *arguments: str, **environment: str) -> None:
        """Start the run and wait until it ends as ``name`` says."""
        before = self.newest()
        with self.launch(*arguments, **environment) as run:
            if name in ("power_cut", "launcher_killed", "ctrl_c", "sigterm"):
                run.until(SAVED)
            if name == "power_cut":
                run.kill(*run.processes())
            elif name == "launcher_killed":
                run.kill(run.pid)
            elif name == "ctrl_c":
                run.signal_group(signal.SIGINT)
            elif name == "sigterm":
                run.signal(signal.SIGTERM)
            code = run.finish()
            run.wait_until_all_are_gone()
        after = self.newest()
        self.starts[name] = Start(
            output=run.output, code=code, newest_before=before, newest_after=after
        )


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    base = tmp_path_factory.mktemp("journey")
    journey = Journey(base / "run", base / "cache")
    # However fast the machine and however late the test: no start uses up the steps of the others.
    at_most = [*FAULTY, "--fault.kind=wait", f"--fault.after_steps={3 * INTERVAL}"]
    for name in ("power_cut", "launcher_killed", "ctrl_c", "sigterm"):
        journey.interrupt(name, *at_most)
    raises = [*FAULTY, "--fault.kind=raise", f"--fault.after_steps={INTERVAL + 1}"]
    logs = f"--log-dir {base / 'logs'}"
    journey.interrupt("rank_raises", *raises, TORCHRUN_ARGS=logs)
    # The second save has awaited the first, so that one cannot be lost any more.
    killed = [*FAULTY, "--fault.kind=kill", f"--fault.after_steps={2 * INTERVAL + 1}"]
    once = "--fault.first_attempt_only"
    journey.interrupt("rank_killed", *killed, once, TORCHRUN_ARGS="--max-restarts 1")
    batch = f"--training.num_tokens_per_train_step={8 * CONTEXT}"
    journey.interrupt("fake", batch, COMM_MODE="fake_backend", NGPU="8")
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
    # What the killed launcher did not pass on is missing from its output.
    assert seen >= set(range(journey.starts["ctrl_c"].newest_before + 1, STEPS + 1))


@pytest.mark.parametrize(
    ("name", "number"), [("ctrl_c", signal.SIGINT), ("sigterm", signal.SIGTERM)]
)
def test_a_stopped_run_says_how_to_go_on_and_exits_with_its_signal(
    journey: Journey, name: str, number: signal.Signals
) -> None:
    start = journey.starts[name]
    assert start.code == 128 + number, start.output
    assert "Traceback" not in start.output
    assert f"Stopped by {number.name}." in start.output
    newest = f"Newest checkpoint: {journey.folder}/checkpoint/step-{start.newest_after}."
    command = f"To go on from it: {ROOT}/run_train.sh --dump_folder={journey.folder} "
    assert f"{newest} {command}" in start.last_line()


def test_the_error_of_one_rank_is_in_the_log_of_every_rank(journey: Journey) -> None:
    start = journey.starts["rank_raises"]
    assert start.code not in (0, 2), start.output
    logs = sorted((journey.folder.parent / "logs").glob("*/attempt_0/*/stdout.log"))
    assert [log.parent.name for log in logs] == ["0", "1"]
    step = start.newest_before + INTERVAL + 2
    for log in logs:
        text = log.read_text()
        assert f"rank 1 failed first, at step {step}: Traceback" in text
        assert f"ValueError: row 7 of step {step} is broken" in text
        assert "did not end within" not in text
    assert f"Newest checkpoint: {journey.folder}/checkpoint/step-" in start.output


def test_torchrun_restarts_the_run_after_a_killed_rank(journey: Journey) -> None:
    start = journey.starts["rank_killed"]
    assert start.code == 0, start.output
    first, second = start.loaded_steps()
    assert second > first == start.newest_before
    assert "Training completed" in start.output
    assert start.newest_after == STEPS
    newest = f"Newest checkpoint: {journey.folder}/checkpoint/step-{STEPS}. To go on from it: "
    assert newest + "TORCHRUN_ARGS=--max-restarts\\ 1 " in start.last_line()
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
    assert "dp_shard 8" in start.output
    assert sorted(start.losses()) == [1]
    steps = complete_steps(journey.folder)
    assert 1 not in steps and steps[-1] == STEPS


def _files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}
