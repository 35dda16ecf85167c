"""The environment is made once, shared, healed, and explained when it cannot be made."""

import fcntl
import os
import signal
import sys
from pathlib import Path

import pytest
from scripts import setup_env

from tests.unit_tests.scripts.small_repository import SmallRepository


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> SmallRepository:
    """A repository that a second start set up after it had waited for a first one, which was killed."""
    repository = SmallRepository(tmp_path_factory.mktemp("small") / "repo with space")
    os.mkfifo(repository.gate)
    killed = repository.start()
    try:
        assert repository.gate.read_text() == "reached"
        # Only the script dies; its pip is still writing, so nobody else may start.
        killed.kill()
        killed.wait()
        with (repository.folder / ".setup.lock").open() as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        second = repository.start()
        assert second.stderr is not None
        lines = [second.stderr.readline(), second.stderr.readline()]
        assert "waiting for it" in lines[1], lines
        repository.gate.unlink()
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert "the last set-up was cut short" in err
    assert out.strip() == str(repository.folder / ".venv/bin/python")
    return repository


@pytest.mark.slow
def test_a_start_waits_for_another_and_heals_what_a_kill_left(ready: SmallRepository) -> None:
    assert ready.version_in_venv("torch") == "2.13.0"
    assert ready.version_in_venv("small_dep") == "1.0"


@pytest.mark.slow
def test_nothing_is_installed_twice_and_a_group_adds_only_its_own(ready: SmallRepository) -> None:
    code, out, err = ready.run()
    assert (code, out) == (0, str(ready.folder / ".venv/bin/python"))
    assert "installing" not in err and "making" not in err
    code, _, err = ready.run("dev")
    assert code == 0
    steps = [line for line in err.splitlines() if "..." in line]
    assert steps == ["[set-up] installing the 1 packages of requirements-dev.txt ..."]
    assert ready.version_in_venv("small_tool") == "3.1"
    assert "..." not in ready.run("dev")[2]


@pytest.mark.slow
def test_a_changed_pin_is_installed_and_a_failing_one_explained(ready: SmallRepository) -> None:
    requirements = ready.folder / "requirements.txt"
    before = requirements.read_text()
    ready.add_wheel("small_dep", "1.1")
    requirements.write_text(before.replace("small-dep==1.0", "small-dep==1.1"))
    assert ready.run()[0] == 0
    assert ready.version_in_venv("small_dep") == "1.1"
    requirements.write_text(before.replace("small-dep==1.0", "small-dep==7.0"))
    code, out, err = ready.run()
    assert (code, out) == (1, "")
    assert "small-dep==7.0" in err
    assert "Check the network and the free space" in err
    # Nothing was unpacked, so the environment is still good and only the pin has to be mended.
    requirements.write_text(before)
    code, _, err = ready.run()
    assert code == 0
    assert "making" not in err
    assert ready.version_in_venv("small_dep") == "1.0"


@pytest.fixture
def repository(tmp_path: Path) -> SmallRepository:
    return SmallRepository(tmp_path / "repo")


def test_the_active_interpreter_is_used_when_it_has_every_pin(repository: SmallRepository) -> None:
    version = setup_env.importlib.metadata.version("pytest")
    (repository.folder / "requirements.txt").write_text(f"pytest=={version}\n")
    code, out, err = repository.run()
    assert (code, out) == (0, sys.executable)
    assert "has every pinned package" in err
    assert not (repository.folder / ".venv").exists()


def test_a_venv_of_somebody_else_that_does_not_work_is_left_alone(
    repository: SmallRepository,
) -> None:
    (repository.folder / ".venv").mkdir()
    (repository.folder / ".venv" / "precious").touch()
    code, out, err = repository.run()
    assert (code, out) == (1, "")
    assert "Move it away" in err
    assert (repository.folder / ".venv" / "precious").exists()


@pytest.mark.parametrize("setting", ["too-old", "no-such-python"])
def test_an_interpreter_that_cannot_be_used_is_refused(
    repository: SmallRepository, setting: str
) -> None:
    old = repository.folder / "too-old"
    # Fails the version check and answers the question for its version.
    old.write_text('#!/bin/sh\ncase "$2" in *SystemExit*) exit 1;; *) echo 3.9;; esac\n')
    old.chmod(0o755)
    code, out, err = repository.run(PYTHON=str(repository.folder / setting))
    assert (code, out) == (2, "")
    assert "Python 3.11 or newer is needed" in err
    assert ("too-old=3.9" if setting == "too-old" else "none") in err


def test_pins_that_are_absent_or_of_another_release_are_unmet() -> None:
    version = setup_env.importlib.metadata.version("pytest")
    pins = {"pytest": version, "no-such-package": "1.0", "filelock": "0.0.1"}
    assert setup_env.unmet_pins(pins) == ["no-such-package==1.0", "filelock==0.0.1"]


def test_a_local_label_does_not_make_another_release() -> None:
    label = setup_env.importlib.metadata.version("torch")
    assert setup_env.unmet_pins({"torch": label.split("+")[0]}) == []


def test_torch_is_installed_alone_and_first_and_the_package_last(
    repository: SmallRepository,
) -> None:
    steps = setup_env.plan_steps(repository.folder, "dev")
    assert [step.key for step in steps] == [
        "torch",
        "requirements.txt",
        "requirements-dev.txt",
        "package",
    ]
    assert steps[0].arguments == ["torch==2.13.0"]


def test_a_comment_does_not_cause_an_installation_and_another_pin_does(
    repository: SmallRepository,
) -> None:
    path = repository.folder / "requirements.txt"
    before = {step.key: step.fingerprint for step in setup_env.plan_steps(repository.folder, "dev")}
    path.write_text(path.read_text() + "# more\n")
    assert {s.key: s.fingerprint for s in setup_env.plan_steps(repository.folder, "dev")} == before
    path.write_text(path.read_text() + "another==1.0\n")
    after = {step.key: step.fingerprint for step in setup_env.plan_steps(repository.folder, "dev")}
    assert {key for key in before if before[key] != after[key]} == {"requirements.txt"}
