"""Ends of a run that need no launcher: a full disk, a signal while a save is in flight, a seed."""

from pathlib import Path

import pytest

from tests.integration_tests.small_run import (
    complete_steps,
    FAULTY,
    LLAMA,
    main_on_ranks,
    SETTINGS,
    Story,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_a_failing_background_save_ends_the_run_and_names_step_and_path(
    tmp_path: Path, cache: Path
) -> None:
    fault = ["--fault.kind=full_disk", "--fault.rank=1", "--fault.after_steps=3"]
    schedule = ["--training.steps=9", "--checkpoint.interval=2"]
    arguments = [*FAULTY, f"--dump_folder={tmp_path}", *SETTINGS, *schedule, *fault]
    ends = main_on_ranks(2, arguments, cache=cache)
    path = tmp_path / "checkpoint" / "step-4"
    for end in ends:
        assert end.how == "raised", end
        assert f"Saving the checkpoint of step 4 to {path} failed" in end.log
    assert "CheckpointSaveError" in ends[1].detail
    assert complete_steps(tmp_path) == [2]
    assert f"Newest checkpoint: {tmp_path}/checkpoint/step-2." in ends[0].log
    # The older one is intact, and the command that failed goes on from it.
    ends = main_on_ranks(2, [*arguments, "--fault.kind=none"], cache=cache)
    assert [end.how for end in ends] == ["returned"] * 2, ends
    assert Story(ends[0].log).loaded_steps() == [2]
    assert complete_steps(tmp_path) == [2, 4, 6, 8, 9]


def test_a_save_in_flight_is_finished_after_a_signal(tmp_path: Path, cache: Path) -> None:
    fault = ["--fault.kind=terminate", "--fault.rank=-1", "--fault.after_steps=3"]
    schedule = ["--training.steps=9", "--checkpoint.interval=3"]
    arguments = [*FAULTY, f"--dump_folder={tmp_path}", *SETTINGS, *schedule, *fault]
    ends = main_on_ranks(2, arguments, cache=cache)
    for end in ends:
        assert end.how == "raised" and end.detail.rstrip().endswith("SystemExit: 143"), end
        assert "Traceback" not in end.log
        assert "failed" not in end.log
    assert complete_steps(tmp_path) == [3]
    log = ends[0].log
    stopped, saved = log.index("planted fault: terminate"), log.index("Saved checkpoint of step 3")
    assert stopped < saved, "the save was over before the signal came, so this shows nothing"
    assert f"Newest checkpoint: {tmp_path}/checkpoint/step-3." in Story(log).last_line()


def test_a_run_that_went_back_is_sent_back_again_until_it_has_saved(
    tmp_path: Path, cache: Path
) -> None:
    arguments = [*FAULTY, f"--dump_folder={tmp_path}", *SETTINGS]
    schedule = ["--training.steps=4", "--checkpoint.interval=2"]
    ends = main_on_ranks(1, [*arguments, *schedule], cache=cache)
    assert complete_steps(tmp_path) == [2, 4], ends
    back = ["--checkpoint.load_step=2", "--training.steps=7", "--checkpoint.interval=3"]
    stop = ["--fault.kind=terminate", "--fault.rank=-1"]
    (end,) = main_on_ranks(1, [*arguments, *back, *stop, "--fault.after_steps=0"], cache=cache)
    last_line = Story(end.log).last_line()
    assert "No full checkpoint was saved since this run was told to go back to step 2." in last_line
    assert "To do that again: torchrun " in last_line and "--checkpoint.load_step=2" in last_line
    assert complete_steps(tmp_path) == [2, 4], "the way back is still open in both directions"
    (end,) = main_on_ranks(1, [*arguments, *back, *stop, "--fault.after_steps=1"], cache=cache)
    assert Story(end.log).loaded_steps() == [2] and complete_steps(tmp_path) == [2, 3]
    last_line = Story(end.log).last_line()
    assert f"Newest checkpoint: {tmp_path}/checkpoint/step-3." in last_line
    assert "load_step" not in last_line


def test_runs_in_other_layouts_begin_from_a_seed_checkpoint(tmp_path: Path, cache: Path) -> None:
    arguments = [*LLAMA, f"--dump_folder={tmp_path}", *SETTINGS, "--training.steps=2"]
    seed = ["--checkpoint.create_seed_checkpoint", "--debug.seed=8"]
    (made,) = main_on_ranks(1, [*arguments, *seed], cache=cache)
    assert made.how == "returned", made
    assert "Created seed checkpoint" in made.log
    last_line = Story(made.log).last_line()
    assert "To begin from the seed checkpoint: torchrun ... -m torchtitan.train" in last_line
    assert "--training.steps" in last_line and "create_seed_checkpoint" not in last_line
    assert complete_steps(tmp_path) == [0]
    ends = main_on_ranks(2, arguments, cache=cache)
    assert [end.how for end in ends] == ["returned"] * 2, ends
    story = Story(ends[0].log)
    assert story.loaded_steps() == [0]
    assert "Resuming" not in story.output
    assert sorted(story.losses()) == [1, 2]
    assert complete_steps(tmp_path) == [0, 2]
    # Other weights than its own seed would give it.
    elsewhere = f"--dump_folder={tmp_path / 'fresh'}"
    fresh = main_on_ranks(2, [*arguments, elsewhere, "--checkpoint.no-enable"], cache=cache)
    assert Story(fresh[0].log).losses()[1] != story.losses()[1]
