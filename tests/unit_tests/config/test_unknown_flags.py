"""A mistyped flag is answered with the one that was meant, beside everything else that is wrong."""

import pytest
from scripts import flags_page
from torchtitan.config import ConfigManager
from torchtitan.config.early_flags import spelling
from torchtitan.config.unknown_flags import closest, flags_of
from torchtitan.models.llama3.config_registry import llama3_jargon

from tests.unit_tests.config.test_manager import parse

FLAGS = list(flags_of(llama3_jargon()))


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        parse(*args)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--training.step", "--training.steps"),
        ("--training.stpes", "--training.steps"),
        ("--load_step", "--checkpoint.load-step"),
        ("--checkpoint.intervall", "--checkpoint.interval"),
        ("--checkpoint.keep_latest", "--checkpoint.keep-latest-k"),
        ("--checkpoint.no-enabled", "--checkpoint.no-enable"),
        ("--seed", "--debug.seed"),
        ("--dumpfolder", "--dump-folder"),
    ],
)
def test_the_flag_that_was_meant_comes_first(typed: str, meant: str) -> None:
    assert closest(typed, FLAGS)[0] == meant


def test_what_is_like_no_flag_gets_no_guess() -> None:
    assert closest("--qqqq", FLAGS) == []


def test_nothing_is_named_that_is_no_flag() -> None:
    known = {
        spelling(f"--{flag.name}")
        for section in flags_page.all_sections()
        for flag in section.flags
    }
    positive = {flag.replace(".no-", ".") if flag not in known else flag for flag in FLAGS}
    assert len(FLAGS) > 100 and not positive - known


def test_all_mistyped_flags_are_told_with_everything_else_that_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = refusal(
        capsys, "--training.step", "20", "--saver.interval", "0", "--exclud=a", "--training.step=4"
    )
    assert lines[:3] == [
        "3 settings cannot be used:",
        "  - --training.step is no flag of this recipe; did you mean --training.steps?",
        lines[2],
    ]
    assert lines[2].startswith(
        "  - --exclud is no flag of this recipe; did you mean --saver.exclude? `"
    )
    assert lines[2].endswith(" --config small --help` lists all.")
    assert "saver.interval is 0" in lines[3]


def test_the_help_that_is_named_is_that_of_the_script_which_was_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_COMMAND", "./run_train.sh --training.step 20")
    _, line = refusal(capsys, "--training.step", "20")
    assert "`./run_train.sh --module " in line and line.endswith(" --help` lists all.")


def test_a_flag_behind_a_subcommand_is_said_to_stand_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, line = refusal(capsys, "memory-policy:full", "--training.steps", "9")
    assert "--training.steps stands behind memory-policy:full" in line


def test_a_word_that_is_no_flag_is_refused_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert "memory-policy:ful" in " ".join(refusal(capsys, "memory-policy:ful"))


def test_one_flag_in_both_spellings_stays_one() -> None:
    typed = ["--training.max_norm", "2", "--training.max-norm", "3", "--module=llama3"]
    config = ConfigManager().parse_args([*typed, "--config=llama3_jargon"])
    assert config.training.max_norm == 3
