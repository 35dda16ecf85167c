"""Where the numbers go: every place gets all of them, and none can stop the training."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
)
from torchtitan.observability import structured_logger as sl

from tests.unit_tests.components.metrics.doubles import dims, read_scalars, Recorder
from tests.unit_tests.observability.reading import records_below


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


def test_tensorboard_holds_nothing_back(tmp_path: Path) -> None:
    tensorboard = TensorBoardLogger(str(tmp_path))
    # Whether the file system holds back what is written differs; only the order to write does not.
    with patch.object(tensorboard, "_writer", wraps=tensorboard._writer) as writer:
        tensorboard.log({"a": 1.0, "b": 2.0}, 3)
    assert [name for name, _, _ in writer.mock_calls] == ["add_scalar", "add_scalar", "flush"]
    tensorboard.close()


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
