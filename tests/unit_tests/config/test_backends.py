"""Which class a section of the config is, chosen on the command line."""

import logging
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.config import ConfigManager, Configurable
from torchtitan.config.backends import backend_flag, CHECKPOINT_BACKENDS
from torchtitan.config.manager import EARLY_FLAGS
from torchtitan.config.violations import collecting, EXIT_CODE
from torchtitan.models.llama3.config_registry import llama3_jargon
from torchtitan.preflight import parse_or_exit

from tests.unit_tests.config.sample_runs.config_registry import AsyncSaver, Saver

SAMPLES = "tests.unit_tests.config.sample_runs"
JARGON = ["--module", "llama3", "--config", "llama3_jargon"]


class OtherSaver(Saver):
    """What the flag can exchange the recipe's AsyncSaver for."""

    @dataclass(kw_only=True, slots=True)
    class Config(Saver.Config):
        num_threads: int = 2
        """Only this one has threads."""

        tags: list[str] = field(default_factory=list)
        """What it writes beside the data."""


class StrictSaver(Configurable):
    """Checks itself in a way of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        interval: int = 5
        """Steps between two saves."""

        def __post_init__(self) -> None:
            if self.interval > 5:
                raise ValueError(f"{self.interval} is too much for this one")


class FastSaver(AsyncSaver):
    """The recipe's kind of saver, and more."""

    @dataclass(kw_only=True, slots=True)
    class Config(AsyncSaver.Config):
        speed: int = 1
        """More than one."""

        eager: bool = True
        """Whether it begins early."""


CLASSES = {
    "async": f"{SAMPLES}.config_registry:AsyncSaver",
    "other": f"{__name__}:OtherSaver",
    "strict": f"{__name__}:StrictSaver",
    "planned": "torchtitan.config.no_such_module:Nothing",
    "planned_package": "torchtitan.no_such_package.module:Nothing",
    "broken": "tests.unit_tests.config.broken_runs:Nothing",
}


def parse(*args: str, section: str = "saver", recipe: str = "saving", **options: Any) -> Any:
    flag = backend_flag(section, CLASSES, help="which saver")
    manager = ConfigManager((*EARLY_FLAGS[:2], flag), **options)
    return manager.parse_args(["--module", SAMPLES, "--config", recipe, *args])


def refusal(capsys: pytest.CaptureFixture[str], *args: str, **options: Any) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        parse(*args, **options)
    assert stop.value.code == EXIT_CODE
    headline, *lines = capsys.readouterr().err.splitlines()
    assert "cannot be used:" in headline
    return lines


@pytest.mark.parametrize("typed", [["--saver.backend", "other"], ["--saver.backend=other"]])
def test_the_class_changes_and_the_values_of_the_recipe_stay(typed: list[str]) -> None:
    saver = parse(*typed, "--saver.interval", "9", "--saver.num_threads", "4").saver
    assert saver == OtherSaver.Config(enable=True, interval=9, exclude=["a"], num_threads=4)
    assert type(saver) is OtherSaver.Config
    assert parse("--saver.num-threads", "4", *typed).saver.num_threads == 4


def test_dashes_and_underscores_of_the_section_mean_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for typed in ("--memory_policy.backend", "--memory-policy.backend"):
        (line,) = refusal(capsys, typed, "none", section="memory_policy")
        assert "--memory-policy.backend none is not a back end" in line


def test_values_of_the_recipe_that_the_other_class_lacks_are_dropped_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        parse("--saver.backend", "other")
        (record,) = caplog.records
        assert "--saver.backend other has no async_mode async" in record.getMessage()
        caplog.clear()
        parse("--saver.backend", "other", recipe="small")  # It leaves async_mode at its default.
        monkeypatch.setenv("LOCAL_RANK", "1")
        parse("--saver.backend", "other")
    assert not caplog.records


def test_flags_that_the_other_class_lacks_are_refused_with_everything_else_that_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for typed in (["--saver.async_mode=async"], ["--saver.async-mode", "async"]):
        lines = refusal(
            capsys,
            *("--saver.backend", "other", *typed, "--saver.interval", "0"),
            checks=lambda config: ["checked as well"],
        )
        assert len(lines) == 3
        assert "--saver.backend other was asked for together with --saver.async_mode" in lines[0]
        assert "does not have; leave it out" in lines[0]
        assert "interval" in lines[1] and "checked as well" in lines[2]


def test_a_broken_value_of_the_recipe_can_be_mended_after_the_exchange(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = ["--saver.backend", "other", "--saver.interval", "-1"]
    (line,) = refusal(capsys, *broken)
    assert "saver.interval is -1" in line
    assert parse(*broken, "--saver.interval", "3").saver.interval == 3


def test_a_class_that_raises_by_itself_is_reported_too(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refusal(capsys, "--saver.backend", "strict")
    assert "--saver.backend strict refuses a value of the recipe: 7 is too much" in line


@pytest.mark.parametrize("name", ["planned", "planned_package", "broken", "no_such"])
def test_what_cannot_be_had_says_what_can(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = refusal(capsys, "--saver.backend", name, "--training.steps", "-3")
    assert len(lines) == 2 and f"--saver.backend {name} " in lines[0] and "steps" in lines[1]
    wanted = {
        "broken": "cannot be loaded: No module named",
        "no_such": "is not a back end; choose one of async, other, strict",
    }
    assert wanted.get(name, "in this version, which has async, other, strict") in lines[0]
    assert "planned" not in lines[0].partition(", which has ")[2]


def test_the_class_that_is_there_already_stays_and_so_does_one_derived_from_it() -> None:
    for saver in (parse().saver, parse("--saver.backend", "async").saver):
        assert saver == AsyncSaver.Config(
            enable=True, interval=7, exclude=["a"], async_mode="async"
        )
    fast = replace(parse(), saver=FastSaver.Config(speed=3))
    assert change(fast, "async") is fast


def change(config: Any, name: str, *args: str) -> Any:
    flag = backend_flag("saver", CLASSES, help="")
    assert flag.change is not None
    return flag.change(config, name, args)


def test_a_switch_that_is_turned_off_was_typed_as_well() -> None:
    fast = replace(parse(), saver=FastSaver.Config())
    for typed in ("--saver.eager", "--saver.no-eager", "--saver.no_eager"):
        with pytest.raises(ValueError, match="together with --saver.eager, which it does not have"):
            change(fast, "other", typed)
    assert type(change(fast, "other", "--saver.interval").saver) is OtherSaver.Config


def test_what_the_recipe_got_wrong_is_not_final_when_the_class_changes() -> None:
    with collecting():
        config = replace(parse(), saver=AsyncSaver.Config(interval=0))
    with collecting() as found:
        assert change(config, "other").saver.interval == 0
    assert found == []


def test_a_config_without_the_section_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refusal(capsys, "--other.backend", "async", section="other")
    assert "--other.backend async" in line and "has no such section; leave the flag out" in line


def test_both_helps_show_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--help"], [*JARGON, "--help"]):
        with pytest.raises(SystemExit):
            ConfigManager().parse_args(args)
        text = capsys.readouterr().out
        assert "--checkpoint.backend {dcp,torch_checkpointing}" in " ".join(text.split())


def test_the_advice_of_a_mistyped_flag_repeats_the_back_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        ConfigManager().parse_args([*JARGON, "--checkpoint.backend", "dcp", "--no.such", "1"])
    assert "--checkpoint.backend dcp" in " ".join(capsys.readouterr().err.split())


def test_the_main_recipe_already_uses_dcp() -> None:
    config = ConfigManager().parse_args([*JARGON, "--checkpoint.backend", "dcp"])
    assert config.checkpoint == llama3_jargon().checkpoint


@pytest.mark.parametrize("name", CHECKPOINT_BACKENDS)
def test_every_back_end_is_a_checkpoint_manager_that_knows_its_name(name: str) -> None:
    config = parse_or_exit([*JARGON, "--checkpoint.no-enable", f"--checkpoint.backend={name}"])
    owner = config.checkpoint._owner
    assert owner is not None and issubclass(owner, BaseCheckpointManager)
    assert type(config.checkpoint) is owner.Config
    assert owner.FORMAT is not None and owner.FORMAT.backend == name
    assert (owner is CheckpointManager) == (name == "dcp")


def test_a_recipe_keeps_what_both_back_ends_have_and_one_line_tells_what_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        config = parse_or_exit([*JARGON, "--checkpoint.backend", "torch_checkpointing"])
    (line,) = [each.getMessage() for each in caplog.records if "backend" in each.getMessage()]
    assert "--checkpoint.backend torch_checkpointing has no async_mode async" in line
    recipe = llama3_jargon().checkpoint
    for each in fields(config.checkpoint):
        assert getattr(config.checkpoint, each.name) == getattr(recipe, each.name)


def test_a_mode_of_dcp_cannot_be_asked_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--checkpoint.backend=torch_checkpointing", "--checkpoint.async_mode=async"]
    with pytest.raises(SystemExit) as stop:
        parse_or_exit([*JARGON, *typed])
    assert stop.value.code == EXIT_CODE
    assert (
        "together with --checkpoint.async_mode, which it does not have" in capsys.readouterr().err
    )
