"""A run whose logs and metrics find no room trains and saves as if nothing was, and says so once for each."""

from pathlib import Path

import pytest

from tests.integration_tests.small_run import complete_steps, LLAMA, main_on_ranks, SETTINGS, Story
from tests.unit_tests.small_disk import fill, small_disk

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_a_full_disk_under_all_that_a_run_tells_ends_nothing(tmp_path: Path) -> None:
    arguments = [*LLAMA, *SETTINGS, "--training.steps=6", "--checkpoint.interval=3"]
    with small_disk(tmp_path / "dump", 64) as dump:
        fill(dump)
        told = [
            f"--dump_folder={dump}",
            f"--checkpoint.folder={tmp_path / 'checkpoint'}",
            "--checkpoint.no-last-save-model-only",
            "--metrics.enable-tensorboard",
            "--debug.save_config_file=config.json",
            "--profiler.enable-profiling",
            "--profiler.profile_freq=2",
            "--profiler.profiler_warmup=1",
        ]
        (end,) = main_on_ranks(1, [*arguments, *told], cache=tmp_path / "cache")
    assert end.how == "returned", end
    assert complete_steps(tmp_path) == [3, 6]
    story = Story(end.log)
    assert sorted(story.losses()) == [1, 2, 3, 4, 5, 6]
    for once in (
        "the structured log",
        "Could not write the config to",
        "metrics_run.json: ",
        "TensorBoardLogger could not write the metrics of step 1:",
        "Could not write the trace",
    ):
        assert end.log.count(once) == 1, once
    assert end.log.count("No space left on device") == 5
    assert "Traceback" not in end.log
