"""From arguments to a config: flags win over the recipe, and all that is wrong is said at once."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchtitan.config import ConfigManager
from torchtitan.config.manager import CommandLineError, EARLY_FLAGS, EarlyFlag

from tests.unit_tests.config.sample_runs.config_registry import (
    AsyncSaver,
    Full,
    MemoryBudget,
    Run,
    Saver,
)

SAMPLE = "tests.unit_tests.config.sample_runs"
REPOSITORY = Path(__file__).resolve().parents[3]


def parse(*args: str, config: str = "small") -> Any:
    return ConfigManager().parse_args(["--module", SAMPLE, "--config", config, *args])


def test_flags_win_over_the_recipe_and_the_recipe_over_the_defaults():
    assert parse().training.steps == 7
    assert parse("--training.steps", "9").training.steps == 9
    assert parse("--training.steps=9").training.steps == 9
    assert parse("--training.max_norm", "inf").training.max_norm == float("inf")


def test_dashes_and_underscores_mean_the_same():
    for flag in ("--training.max-context-length", "--training.max_context_length"):
        assert parse(flag, "64").training.max_context_length == 64


def test_a_switch_is_turned_on_and_off_by_flags():
    assert parse("--saver.enable").saver.enable is True
    for off in ("--saver.no-enable", "--saver.no_enable"):
        assert parse("--saver.enable", off).saver.enable is False
    with pytest.raises(SystemExit) as stop:
        parse("--saver.enable=False")
    assert stop.value.code == 2


def test_a_list_of_strings_is_one_token_with_commas():
    assert parse("--saver.exclude", "optimizer,lr_scheduler").saver.exclude == [
        "optimizer",
        "lr_scheduler",
    ]
    assert parse("--saver.exclude", "").saver.exclude == []
    parts = parse("--parallelism.module_fqns_per_model_part", "tok,layers.0", "norm").parallelism
    assert parts.module_fqns_per_model_part == [["tok", "layers.0"], ["norm"]]


def test_overrides_take_any_number_of_tokens():
    args = ["--override.imports", "a.b.f,c.d.g", 'e.f.h={"size": 1}', "--training.steps", "8"]
    assert parse(*args).override.imports == ["a.b.f", "c.d.g", ("e.f.h", {"size": 1})]


def test_settings_of_a_subclass_are_on_the_command_line():
    saver = parse("--saver.async_mode", "async").saver
    assert type(saver) is AsyncSaver.Config and saver.async_mode == "async"


@pytest.mark.parametrize("section", ["memory-policy", "memory_policy"])
@pytest.mark.parametrize("name", ["memory-budget", "memory_budget"])
def test_a_choice_of_classes_is_a_subcommand(section: str, name: str):
    assert parse(f"{section}:full", f"--{section}.debug").memory_policy == Full.Config(debug=True)
    budget = parse(f"{section}:{name}", f"--{section}.{name}", "0.25").memory_policy
    assert budget == MemoryBudget.Config(memory_budget=0.25)
    assert parse(f"{section}:none").memory_policy is None


def test_the_arguments_of_the_process_are_read_when_none_are_given(
    monkeypatch: pytest.MonkeyPatch,
):
    manager = ConfigManager()
    monkeypatch.setattr(sys, "argv", ["x", f"--module={SAMPLE}", "--config=small"])
    assert manager.parse_args() is manager.config
    assert manager.config.training.steps == 7


def test_of_a_repeated_recipe_flag_the_last_one_counts():
    assert parse("--config", "small", config="broken").training.steps == 7


def test_all_broken_settings_are_reported_in_one_message(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        parse(
            *("--training.steps", "-3", "--saver.interval", "0"),
            *("--parallelism.tensor_parallel_degree", "0"),
        )
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "3 settings cannot be used:"
    assert [line.split()[1] for line in lines[1:]] == [
        "training.steps",
        "parallelism.tensor_parallel_degree",
        "saver.interval",
    ]


def test_a_broken_setting_of_the_recipe_is_reported_and_can_be_mended(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit) as stop:
        parse(config="broken")
    assert stop.value.code == 2
    assert "training.steps is -3" in capsys.readouterr().err
    assert parse("--training.steps", "3", config="broken").training.steps == 3


def test_a_broken_setting_that_has_no_flag_is_reported_too(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(config="broken_inside")
    assert "saver.interval is -1" in capsys.readouterr().err


def test_only_one_process_of_a_machine_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    for args in (["--training.steps", "-3"], ["--training.no-such-flag", "1"]):
        with pytest.raises(SystemExit) as stop:
            parse(*args)
        assert stop.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_a_check_that_raises_by_itself_ends_the_program_as_well(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit) as stop:
        parse("--strict.size", "0")
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "size must be positive" in captured.err + captured.out


def test_an_error_of_the_recipe_itself_passes_through():
    with pytest.raises(ValueError, match="trouble of the recipe's own") as raised:
        parse(config="in_trouble")
    assert not isinstance(raised.value, CommandLineError)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--module"], "--module requires a value"),
        (["--module", "--config", "small"], "--module requires a value"),
        (["--module=", "--config", "small"], "--module requires a value"),
        (["--module", SAMPLE, "--config"], "--config requires a value"),
        ([], "--module is required"),
        (["--config", "small"], "--module is required"),
        (["--module", SAMPLE], "--config is required"),
        (["--module", SAMPLE, "--config", "no_config"], "returned str, not a config"),
    ],
)
def test_recipe_flags_that_lead_nowhere_are_value_errors(args: list[str], text: str):
    with pytest.raises(ValueError, match=text) as raised:
        ConfigManager().parse_args(args)
    assert isinstance(raised.value, CommandLineError)


def test_help_lists_every_flag_with_its_docstring(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    config = Run.Config()
    for section in ("training", "parallelism", "saver"):
        for each in fields(getattr(config, section)):
            assert f"--{section}.{each.name.replace('_', '-')}" in text
    assert "Keys to leave out." in text and "--module" in text
    assert "hidden" not in text


def test_help_without_a_recipe_says_how_to_name_one(capsys: pytest.CaptureFixture[str]):
    for args, expected in (
        (["--help"], ("--module", "--config", "known modules: ", "llama3")),
        (["-h", "--module", SAMPLE], (f"recipes in {SAMPLE}: broken, broken_inside, ", "small")),
    ):
        with pytest.raises(SystemExit) as stop:
            ConfigManager().parse_args(args)
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert all(part in text for part in expected)


def test_another_flag_can_change_the_config_before_the_others_apply():
    def use_plain_saver(config: Run.Config, value: str, args: Sequence[str]) -> Run.Config:
        assert list(args) == ["--saver.exclude", "a"]
        return replace(config, saver=Saver.Config(interval=int(value)))

    flag = EarlyFlag(name="--saver.kind", metavar="N", help="a saver", change=use_plain_saver)
    manager = ConfigManager(early_flags=(*EARLY_FLAGS, flag))
    args = ["--module", SAMPLE, "--config", "small", "--saver.exclude", "a"]
    assert type(manager.parse_args(args).saver) is AsyncSaver.Config
    config = manager.parse_args([*args, "--saver.kind", "4"])
    assert config.saver == Saver.Config(interval=4, exclude=["a"])


def test_a_missing_assets_folder_is_a_warning_and_an_old_tokenizer_file_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        parse("--hf_assets_path", str(tmp_path / "nowhere"))
    assert "does not exist" in caplog.text
    old = tmp_path / "tokenizer.model"
    old.touch()
    with pytest.raises(Exception, match="tokenizer.json"):
        parse("--hf_assets_path", str(old))
    manager = ConfigManager()
    manager.config = SimpleNamespace(other=1)
    manager._validate_config()


def test_merged_configs_take_the_custom_fields_over_the_base():
    @dataclass(kw_only=True, slots=True)
    class Inner:
        left: int = 1

    @dataclass(kw_only=True, slots=True)
    class CustomInner:
        right: int = 2

    @dataclass(kw_only=True, slots=True)
    class Base:
        inner: Inner = field(default_factory=Inner)
        steps: int = 1
        kept: str = "kept"

    @dataclass(kw_only=True, slots=True)
    class Custom:
        inner: CustomInner = field(default_factory=CustomInner)
        steps: int = 2
        extra: list[int] = field(default_factory=list)

    with pytest.warns(DeprecationWarning):
        merged: Any = ConfigManager._merge_configs(Base, Custom)
    config: Any = merged()
    assert merged.__name__ == "MergedBase" and merged.__mro__[1] is Base
    assert (config.steps, config.kept, config.extra) == (2, "kept", [])
    assert (config.inner.left, config.inner.right) == (1, 2)
    assert type(config.inner).__mro__[1] is Inner


def test_the_module_prints_the_resulting_config_and_nothing_else():
    done = _run_module("--module", SAMPLE, "--config", "small", "--saver.interval", "3")
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert printed["saver"] == {
        "enable": False,
        "interval": 3,
        "exclude": [],
        "async_mode": "disabled",
    }


def test_the_module_tells_the_user_what_is_wrong_without_a_traceback():
    done = _run_module("--module", SAMPLE, "--config", "smal")
    assert done.returncode == 2
    assert "Did you mean small?" in done.stderr and "Traceback" not in done.stderr


def _run_module(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    return subprocess.run(
        [sys.executable, "-m", "torchtitan.config.manager", *args],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
        env=environment,
        check=False,
    )
