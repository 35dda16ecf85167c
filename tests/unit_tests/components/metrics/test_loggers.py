"""Where the numbers go: every place gets all of them, and none can stop the training."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter as TorchWriter
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
)
from torchtitan.observability import structured_logger as sl

from tests.unit_tests.components.metrics.doubles import (
    begin,
    dims,
    log_steps,
    read_scalars,
    Recorder,
)
from tests.unit_tests.observability.reading import records_below
from tests.unit_tests.small_disk import fill, small_disk


def test_tensorboard_gets_every_metric_at_once(tmp_path: Path) -> None:
    built = MetricsProcessor.Config(enable_tensorboard=True).build(
        parallel_dims=dims(), dump_folder=str(tmp_path), config_dict={"a": 1}, tag="mine"
    )
    built.log(1, 5.0, 6.0, 1.0)
    # Before close: a killed run must not lose what it logged.
    found = read_scalars(tmp_path)
    assert found["mine/loss_metrics/global_avg_loss"] == [(1, 5.0)]
    built.log_validation(3.0, 1)
    built.close()
    assert read_scalars(tmp_path)["mine/validation_metrics/loss"] == [(1, 3.0)]


def test_tensorboard_goes_on_when_a_full_disk_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        built = MetricsProcessor.Config(enable_tensorboard=True).build(
            parallel_dims=dims(), dump_folder=str(disk)
        )
        log_steps(built, range(1, 3))
        ballast = fill(disk)
        log_steps(built, range(3, 40))
        ballast.unlink()
        log_steps(built, range(40, 42))
        built.close()
        found = [step for step, _ in read_scalars(disk)["grad_norm"]]
    # The page that was begun takes a few more.
    kept = found[2:-2]
    assert found[:2] == [1, 2] and found[-2:] == [40, 41]
    assert kept == list(range(3, 3 + len(kept))) and len(kept) < 37
    told = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert [record.levelname for record in told] == ["WARNING"]
    assert f"TensorBoardLogger could not write the metrics of step {3 + len(kept)}" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_keeps_no_run_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        ballast = fill(disk)
        built = begin(disk, 4, enable_tensorboard=True)
        log_steps(built, range(5, 7))
        ballast.unlink()
        log_steps(built, range(7, 9))
        built.close()
        found = read_scalars(disk)
        assert not list(disk.rglob("*.tmp"))
    assert [step for step, _ in found["grad_norm"]] == [7, 8]
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2 and "metrics_run.json" in told[0] and "of step 5" in told[1]


def test_a_place_that_is_no_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("a file")
    with pytest.raises(FileExistsError):
        TensorBoardLogger(str(tmp_path / "tb"))


def test_the_files_say_what_those_of_torch_say(tmp_path: Path) -> None:
    config, metrics = {"a": {"b": [1, 2]}}, {"loss": 2.5, "tokens": 3, "tensor": torch.tensor(0.5)}
    with TorchWriter(str(tmp_path / "torch"), purge_step=5) as torch_writer:
        text = f"```\n{json.dumps(config, indent=2)}\n```"
        torch_writer.add_text("config", text, global_step=5)
        for name, value in metrics.items():
            torch_writer.add_scalar(f"mine/{name}", value, 7)
    ours = TensorBoardLogger(str(tmp_path / "ours"), "mine", config, purge_step=5)
    ours.log(metrics, 7)
    ours.close()
    assert events_of(tmp_path / "ours") == events_of(tmp_path / "torch")


def events_of(folder: Path) -> list[Any]:
    """The events of the only file in ``folder``, without when and by whom they were written."""
    (file,) = folder.glob("events.*")
    events = list(EventFileLoader(str(file)).Load())
    for event in events:
        event.ClearField("wall_time")
        event.ClearField("source_metadata")
    return events


def test_tensorboard_files_have_their_places(tmp_path: Path) -> None:
    config = MetricsProcessor.Config(
        enable_tensorboard=True, save_tb_folder="here", save_for_all_ranks=True
    )
    built = config.build(
        parallel_dims=dims(), dump_folder=str(tmp_path), ft_enable=True, ft_replica_id=3
    )
    built.start_step = 0
    built.close()
    (file,) = tmp_path.rglob("events.*")
    folder = str(file.parent.relative_to(tmp_path))
    assert re.fullmatch(r"here/\d{8}-\d{4}/replica_3/rank_0", folder)


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    built = MetricsProcessor.Config().build(parallel_dims=dims(), dump_folder=str(tmp_path))
    built.start_step = 0
    built.log(1, 5.0, 6.0, 1.0)
    built.close()
    assert not list(tmp_path.iterdir())


def test_a_container_closes_and_feeds_all_its_loggers() -> None:
    container, recorders = LoggerContainer(), [Recorder(), Recorder()]
    for recorder in recorders:
        container.add_logger(recorder)
    container.log({"a": 1}, 2)
    container.close()
    assert all(r.logged == [(2, {"a": 1})] and r.closed for r in recorders)


class Broken(BaseLogger):
    def log(self, metrics: dict[str, Any], step: int) -> None:
        raise OSError("No space left on device")

    def close(self) -> None:
        raise OSError("still none")


def test_a_logger_that_fails_is_given_up_and_the_others_go_on(caplog) -> None:
    container, recorder = LoggerContainer(), Recorder()
    container.add_logger(Broken())
    container.add_logger(recorder)
    for step in (1, 2):
        container.log({"a": 1}, step)
    assert [step for step, _ in recorder.logged] == [1, 2]
    assert caplog.text.count("No space left on device") == 1
    container.add_logger(Broken())
    container.close()
    assert "still none" in caplog.text


@pytest.mark.usefixtures("fresh_structured_logger")
def test_the_structured_log_has_every_number_once_over_the_ranks(tmp_path: Path) -> None:
    sl.init_structured_logger("training", str(tmp_path), rank=0)
    for rank_dims in (dims(), dims(pp=2, world_size=2)):  # the second does not know the loss here
        built = MetricsProcessor.Config().build(parallel_dims=rank_dims, dump_folder=str(tmp_path))
        built.log(1, 5.0, 6.0, 1.0, {"lr/AdamW": 0.1, "n_tokens_seen": 64})
        built.log_validation(3.0, 1, {"validation_metrics/throughput(tps)": 7.0})
        names = [each["event_name"] for each in records_below(tmp_path)]
        count = 1 if rank_dims.pp == 1 else 2
        of_the_run = ["loss_metrics/global_avg_loss", "lr/AdamW", "validation_metrics/loss"]
        assert [names.count(name) for name in of_the_run] == [1, 1, 1]
        of_the_rank = ["throughput(tps)", "memory/resident(GiB)", "time_metrics/end_to_end(s)"]
        assert [names.count(name) for name in of_the_rank] == [count] * 3
