from collections.abc import Callable
from pathlib import Path

import pytest
from torchtitan.config.violations import EXIT_CODE
from torchtitan.models.llama3.config_registry import llama3_jargon
from torchtitan.preflight import parse_or_exit
from torchtitan.trainer import Trainer

RESTARTS = ("TORCHELASTIC_MAX_RESTARTS", "TORCHRUN_ARGS")
RECIPE = ["--module", "llama3", "--config", "llama3_jargon"]

Refusal = Callable[[str | list[str]], list[str]]


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "NGPU", "NNODES", "RANK", "LOCAL_RANK", *RESTARTS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Trainer.Config:
    """The main recipe, writing below ``tmp_path``."""
    made = llama3_jargon()
    made.dump_folder = str(tmp_path / "outputs")
    return made


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refusal:
    """Parses flags of the main recipe, which must be refused; gives the messages, one each."""

    def refused(flags: str | list[str]) -> list[str]:
        given = flags.split() if isinstance(flags, str) else flags
        with pytest.raises(SystemExit) as stop:
            parse_or_exit([*RECIPE, f"--dump_folder={tmp_path / 'outputs'}", *given])
        assert stop.value.code == EXIT_CODE
        headline, *lines = capsys.readouterr().err.rstrip("\n").split("\n  - ")
        count = "1 setting" if len(lines) == 1 else f"{len(lines)} settings"
        assert headline.splitlines()[-1] == f"{count} cannot be used:"
        return lines

    return refused
