"""The entry point: how a run ends, and what it says last. Trainers are stand-ins."""

import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan import train
from torchtitan.distributed.failure import RankFailure
from torchtitan.tools.signals import StopRequested

from tests.unit_tests.components.checkpointer.fakes import BareManager


@dataclass
class Config:
    training: Any = field(default_factory=lambda: SimpleNamespace(steps=10))
    checkpoint: Any = field(
        default_factory=lambda: SimpleNamespace(load_step=-1, exclude_from_loading=[])
    )
    activation_checkpoint: Any = None


class StandIn:
    """A trainer of which each part can be told to fail."""

    def __init__(self, *, step: int = 10, **errors: BaseException) -> None:
        self.step = step
        self.errors = errors
        self.calls: list[str] = []
        self.config = Config()
        self.saved = {"/run/checkpoint/step-8"}
        self.checkpointer = SimpleNamespace(
            enable=True,
            newest_checkpoint=lambda: "/run/checkpoint/step-8",
            exported_checkpoint=lambda: None,
            has_saved=lambda path: path in self.saved,
            save=self._save,
        )
        self.first_failure: RankFailure | None = None
        self.peers = SimpleNamespace(
            close=lambda: self.calls.append("peers"), first_failure=lambda: self.first_failure
        )

    def train(self) -> None:
        self._call("train")

    def close(self) -> None:
        self._call("close")

    def _save(self, **options: Any) -> None:
        self._call(f"save {options}")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.errors:
            raise self.errors[name]


def run(trainer: StandIn, *, seed: bool = False) -> None:
    config: Any = SimpleNamespace(
        build=lambda: trainer, checkpoint=SimpleNamespace(create_seed_checkpoint=seed)
    )
    train.run(config)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the user sees; spans are logged for programs."""
    return [record.getMessage() for record in caplog.records if record.name == "root"]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TORCHTITAN_COMMAND", "NGPU=4 ./run_train.sh --a b")
    caplog.set_level(logging.INFO)


def test_the_last_line_of_a_run_says_where_its_newest_checkpoint_is_and_what_to_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = StandIn(step=4)
    run(trainer)
    assert trainer.calls == ["train", "close", "peers"]
    assert not dist.is_initialized()
    assert said(caplog) == [
        "Process group destroyed",
        "Newest checkpoint: /run/checkpoint/step-8. To go on from it: NGPU=4 ./run_train.sh --a b",
    ]


def test_a_finished_run_goes_on_only_with_more_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(StandIn(step=10))
    assert said(caplog)[-1].endswith("./run_train.sh --a b --training.steps 20")
    subcommand = "activation-checkpoint:full"
    monkeypatch.setenv("TORCHTITAN_COMMAND", f"./run_train.sh --training.steps=10 {subcommand}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run(StandIn(step=10))
    assert said(caplog)[-1].endswith(f"./run_train.sh --training.steps 20 {subcommand}")


def test_ranks_started_by_hand_are_told_their_own_arguments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TORCHTITAN_COMMAND")
    monkeypatch.setattr("sys.argv", ["train.py", "--dump_folder", "two words"])
    run(StandIn(step=1))
    expected = "torchrun ... -m torchtitan.train --dump_folder 'two words'"
    assert said(caplog)[-1].endswith(expected)


def test_an_export_is_not_taken_for_what_a_restart_loads(caplog: pytest.LogCaptureFixture) -> None:
    trainer = StandIn()
    trainer.checkpointer.exported_checkpoint = lambda: "/run/checkpoint/step-10"
    run(trainer)
    assert said(caplog)[-1].startswith("Exported /run/checkpoint/step-10 (weights only")
    assert "Newest checkpoint: /run/checkpoint/step-8." in said(caplog)[-1]


def sent_back(monkeypatch: pytest.MonkeyPatch, *, saved: set[str]) -> StandIn:
    """A run that was told to begin from step 4, in a folder whose newest checkpoint is of step 8."""
    command = "./run_train.sh --checkpoint.load_step 4 --a b"
    monkeypatch.setenv("TORCHTITAN_COMMAND", command)
    trainer = StandIn(step=6, train=StopRequested(signal.SIGINT))
    trainer.config.checkpoint.load_step = 4
    trainer.saved = saved
    return trainer


def test_a_run_that_went_back_and_has_saved_nothing_yet_is_sent_back_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StopRequested):
        run(sent_back(monkeypatch, saved=set()))
    assert said(caplog)[-1] == (
        "No full checkpoint was saved since this run was told to go back to step 4. To do that again: "
        "./run_train.sh --checkpoint.load_step 4 --a b"
    )


def test_a_run_that_went_back_goes_on_from_what_it_has_saved_since(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StopRequested):
        run(sent_back(monkeypatch, saved={"/run/checkpoint/step-8"}))
    assert said(caplog)[-1].startswith("Newest checkpoint: /run/checkpoint/step-8.")
    assert said(caplog)[-1].endswith(": ./run_train.sh --a b")


def test_weights_that_would_be_taken_for_the_end_do_not_undo_a_step_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = sent_back(monkeypatch, saved=set())
    trainer.checkpointer.newest_checkpoint = lambda: "/run/checkpoint/step-4"
    trainer.checkpointer.exported_checkpoint = lambda: "/run/checkpoint/step-10"
    with pytest.raises(StopRequested):
        run(trainer)
    assert said(caplog)[-1].endswith("do that again: ./run_train.sh --checkpoint.load_step 4 --a b")


def test_a_run_whose_last_weights_are_there_goes_on_only_with_more_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = StandIn(step=0)  # it found nothing to do
    trainer.checkpointer.exported_checkpoint = lambda: "/run/checkpoint/step-12"
    run(trainer)
    assert said(caplog)[-1].endswith("./run_train.sh --a b --training.steps 24")


@pytest.mark.parametrize("look", ["newest_checkpoint", "exported_checkpoint"])
def test_a_folder_that_cannot_be_read_does_not_spoil_a_good_end(
    look: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise PermissionError("stale file handle")

    trainer = StandIn()
    setattr(trainer.checkpointer, look, fails)
    run(trainer)
    assert trainer.calls[-1] == "peers" and not dist.is_initialized()
    assert "stale file handle" in caplog.text


class DoesNotFit(BareManager):
    """Its checkpoint is of another model."""

    def _load_what_passes(self, step: int) -> bool:
        raise ValueError("it holds another model")


def test_a_run_that_could_not_load_does_not_offer_the_same_command_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, checkpointer = StandIn(step=4), DoesNotFit()
    setattr(trainer, "train", checkpointer.load)  # noqa: B010 (a method is no field)
    with pytest.raises(ValueError, match="another model"):
        run(trainer)
    assert trainer.calls == ["close"]
    assert said(caplog) == []


def test_a_run_without_a_checkpoint_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer = StandIn()
    trainer.checkpointer.newest_checkpoint = lambda: None
    run(trainer)
    assert said(caplog)[-1] == "No checkpoint was saved."


def test_a_run_that_makes_no_checkpoints_does_not_speak_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = StandIn()
    trainer.checkpointer.enable = False
    run(trainer)
    assert said(caplog) == ["Process group destroyed"]


def test_a_seed_checkpoint_is_saved_instead_of_training() -> None:
    trainer = StandIn()
    run(trainer, seed=True)
    assert trainer.calls == ["save {'curr_step': 0, 'last_step': True}", "close", "peers"]


def test_the_error_of_training_is_raised_although_closing_fails_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = StandIn(step=4, train=ValueError("bad row"), close=OSError("disk full"))
    with pytest.raises(ValueError, match="bad row"):
        run(trainer)
    assert said(caplog)[-2] == "Closing after the error failed as well: disk full"
    assert said(caplog)[-1].startswith("Newest checkpoint: ")


def test_an_error_of_closing_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="disk full"):
        run(StandIn(close=OSError("disk full")))
    assert said(caplog)[-1].startswith("Newest checkpoint: ")


@pytest.mark.parametrize("part", ["train", "close"])
def test_a_signal_closes_the_run_and_is_named_before_the_last_line(
    part: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = StandIn(step=4, **{part: StopRequested(signal.SIGTERM)})
    if part == "close":
        # The signal interrupted the closing; that has to be taken up again.
        trainer._call = _fails_once(trainer)  # type: ignore[method-assign]  # a stand-in's part
    with pytest.raises(StopRequested):
        run(trainer)
    assert trainer.calls[-1] == "close" and trainer.calls.count("close") == 1 + (part == "close")
    assert said(caplog)[-2] == "Stopped by SIGTERM."
    assert said(caplog)[-1].startswith("Newest checkpoint: ")


def test_a_rank_that_felt_the_stop_of_another_names_the_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = StandIn(step=4, train=RuntimeError("Connection closed by peer"))
    trainer.first_failure = RankFailure(rank=1, step=4, reason="SIGINT", traceback="", is_stop=True)
    with pytest.raises(RuntimeError):
        run(trainer)
    assert said(caplog)[-2] == "Stopped by SIGINT."


def _fails_once(trainer: StandIn) -> Any:
    def call(name: str) -> None:
        trainer.calls.append(name)
        if error := trainer.errors.pop(name, None):
            raise error

    return call


@pytest.fixture
def quiet_main(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """``main`` without what lasts beyond it: handlers of the logger, the structured log."""
    config = SimpleNamespace(dump_folder="", debug=SimpleNamespace(enable_structured_logging=False))
    monkeypatch.setattr(train, "parse_or_exit", lambda: config)
    monkeypatch.setattr(train, "init_logger", lambda: None)
    return monkeypatch


@pytest.mark.parametrize(("mode", "writes"), [("default", True), ("fake_backend", False)])
def test_a_process_that_plays_a_rank_leaves_the_logs_of_the_run(
    quiet_main: pytest.MonkeyPatch, mode: str, writes: bool
) -> None:
    config = train.parse_or_exit()
    config.debug.enable_structured_logging = True
    config.comm = SimpleNamespace(mode=mode)  # pyrefly: ignore[bad-assignment]  (stands in)
    given: dict[str, Any] = {}
    quiet_main.setattr(
        train.sl, "init_structured_logger", lambda **keywords: given.update(keywords)
    )
    quiet_main.setattr(train, "run", lambda config: None)
    train.main()
    assert given["enable"] is writes


def test_a_stopped_program_exits_with_the_code_of_its_signal(
    quiet_main: pytest.MonkeyPatch,
) -> None:
    quiet_main.setattr(train, "run", lambda config: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == 130


def test_an_error_that_follows_a_signal_is_no_failure(quiet_main: pytest.MonkeyPatch) -> None:
    def broken_connection(config: Any) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except StopRequested:
            raise RuntimeError("Connection closed by peer") from None

    quiet_main.setattr(train, "run", broken_connection)
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == 143


def test_an_error_is_left_to_python_which_exits_with_1(quiet_main: pytest.MonkeyPatch) -> None:
    def fails(config: Any) -> None:
        raise ValueError("bad row")

    quiet_main.setattr(train, "run", fails)
    with pytest.raises(ValueError, match="bad row"):
        train.main()


def test_settings_that_cannot_be_used_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "init_logger", lambda: None)
    monkeypatch.setattr("sys.argv", ["train.py", "--module", "llama3", "--config", "unheard_of"])
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == 2
    assert "unheard_of" in capsys.readouterr().err
