"""The console shows what is news to a user, and nothing is kept from other listeners."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchtitan.tools.logging import init_logger, logger

LIBRARY = "torch_checkpointing"


@pytest.fixture(autouse=True)
def _root_as_before() -> Iterator[None]:
    handlers, level = [*logger.handlers], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def log(name: str, text: str, *, level: int = logging.INFO, path: str = "/x/module.py") -> None:
    init_logger()  # here: before a test runs, stdout is another one
    record = logging.LogRecord(name, level, path, 1, text, (), None)
    logging.getLogger(None if name == "root" else name).handle(record)


def test_the_library_tells_below_warning_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (LIBRARY, f"{LIBRARY}.checkpoint_writer", f"{LIBRARY}.storage.filesystem"):
        log(name, "one of dozens")
    log("root", "one of dozens", path=f"/site-packages/{LIBRARY}/barriers.py")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("root", "/x/torchtitan/components/checkpointer/torch_checkpointing.py"),
        ("root", f"/home/me/{LIBRARY}/torchtitan/trainer.py"),
        (f"{LIBRARY}_of_mine", "/x/module.py"),
        ("mine.torch_checkpointing", "/x/module.py"),
    ],
)
def test_others_are_shown(name: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    log(name, "news", path=path)
    assert "INFO news" in capsys.readouterr().out


def test_warnings_and_errors_of_the_library_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log(f"{LIBRARY}.storage.filesystem", "disk trouble", level=logging.WARNING)
    log(f"{LIBRARY}.default_resharder", "Loading 1 aliased", level=logging.WARNING)
    log(f"{LIBRARY}.default_resharder", "Found a wall", level=logging.ERROR)
    lines = capsys.readouterr().out.splitlines()
    shown = ("WARNING disk trouble", "WARNING Loading 1 aliased", "ERROR Found a wall")
    assert [line.endswith(end) for line, end in zip(lines, shown, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{LIBRARY}.default_resharder", "Found %s plain tensors in checkpoint item %r; treating"),
        (f"{LIBRARY}.default_resharder", "Missing source metadata for path: ('a',)"),
        (f"{LIBRARY}.checkpoint_reader", "Missing 3 keys from checkpoint: []"),
        (
            "torch.distributed.device_mesh",
            "It seems like pickling/unpickling of the DeviceMesh occ",
        ),
    ],
)
def test_warnings_that_help_nobody_are_not_shown_where_they_come_from(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log(name, text, level=logging.WARNING)
    assert capsys.readouterr().out == ""
    log("somebody.else", text, level=logging.WARNING)
    assert text in capsys.readouterr().out


def test_the_file_of_a_library_listener_gets_what_the_console_leaves_out(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "all.log")
    logger.addHandler(handler)
    log(f"{LIBRARY}.checkpoint_writer", "one of dozens")
    handler.close()
    assert (tmp_path / "all.log").read_text() == "one of dozens\n"
