"""A run that is killed and resumed tells one story: in TensorBoard, the summary and the report."""

import re
from pathlib import Path

import pytest
from scripts import report, trace_summary

from tests.integration_tests.small_run import FAULTY, main_on_ranks, SETTINGS, Story
from tests.unit_tests.components.metrics.doubles import read_scalars

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LOSS = "loss_metrics/global_avg_loss"


def test_a_killed_and_resumed_run_tells_one_story(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    fault = ["--fault.kind=kill", "--fault.rank=1", "--fault.after_steps=3"]
    schedule = ["--training.steps=6", "--checkpoint.interval=2", "--metrics.enable_tensorboard"]
    # The save of step 2 has to be there when the kill comes, also on a slow disk.
    schedule += ["--checkpoint.async_mode=disabled"]
    arguments = [*FAULTY, f"--dump_folder={tmp_path}", *SETTINGS, *schedule, *fault]
    ends = main_on_ranks(2, arguments, cache=cache)
    assert ends[1].how == "died", ends
    stories = [Story(ends[0].log)]
    ends = main_on_ranks(2, [*arguments, "--fault.kind=none"], cache=cache)
    assert [end.how for end in ends] == ["returned"] * 2, ends
    stories.append(Story(ends[0].log))
    assert stories[1].loaded_steps() == [2]

    printed = {**stories[0].losses(), **stories[1].losses()}
    losses = {step: float(re.findall(r"loss: (\S+)", text)[0]) for step, text in printed.items()}
    scalars = read_scalars(tmp_path)
    shown = scalars[LOSS]
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6]
    assert dict(shown) == pytest.approx(losses, abs=2e-4)

    # What a run writes without any flag for it is enough for both.
    material = report.collect(tmp_path)
    assert material.source == "the structured logs"
    assert material.curves[LOSS] == pytest.approx(losses, abs=1e-5)
    assert set(material.curves) >= {"lr/AdamW", "throughput(tps)", "memory/resident(GiB)"}
    saves = material.run.saves()
    assert [(save.step, save.failed) for save in saves] == [(2, False), (4, False), (6, False)]
    for save in saves:
        assert save.blocked_seconds is not None and save.durable_seconds is not None
        assert 0 < save.blocked_seconds <= save.durable_seconds and save.size_mebibytes
    # The save after step 4 lies between the lines of steps 4 and 5, and no save before step 4's.
    in_saves = dict(scalars["time_metrics/checkpoint(s)"])
    blocked_seconds = saves[1].blocked_seconds
    assert blocked_seconds is not None
    assert in_saves[5] >= blocked_seconds - 1e-3 and in_saves[4] < blocked_seconds
    assert material.run.lost_steps()[0] == 1
    for start in material.run.starts:
        for log in start.ranks.values():
            assert sum(log.seconds_by_part.values()) == pytest.approx(log.seconds)
            assert log.seconds_by_part["forward and backward"] > 0

    trace_summary.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert "start 1 of 2" in text and "2 ranks, steps 1 to 3" in text
    assert "2 ranks, steps 3 to 6" in text and "closed in order" in text
    assert "1 step lost to restarts" in text and "3 saves: " in text
