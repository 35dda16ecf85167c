"""Choose or make the environment of this repository and print its interpreter.

The interpreter that runs this file is used as it is when it holds every pinned package. Otherwise
``.venv`` in the repository is made and kept up to date. ``.venv/setup_state.json`` tells what was
installed there and whether an installation was cut short: pip leaves half-unpacked packages that
it later takes for good ones, so a ``.venv`` that was cut short is made again.

    run_train.sh, run_tests.sh -> setup_env.sh (finds a Python) -> here -> path on stdout
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG_TAIL_LINES = 15
PIP_UNPACKS = "Installing collected packages"


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    """One call of pip."""

    key: str
    """Name under which the state file remembers the step."""
    what: str
    """The line that the user reads."""
    fingerprint: str
    """Hash of all that decides the outcome; an equal one is not installed again."""
    arguments: list[str]
    """What follows ``pip install``."""


def say(line: str) -> None:
    # stdout carries the path of the interpreter and nothing else.
    print(f"[set-up] {line}", file=sys.stderr, flush=True)


def read_pins(path: Path) -> dict[str, str]:
    """The ``name==version`` lines of a requirements file."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def requirement_files(group: str) -> list[str]:
    return ["requirements.txt"] + (["requirements-dev.txt"] if group == "dev" else [])


def unmet_pins(pins: Mapping[str, str]) -> list[str]:
    """The pins that the running interpreter does not fulfil, as ``name==version``."""
    unmet = []
    for name, wanted in pins.items():
        try:
            # A local label such as 2.13.0+cpu tells the build, not the release.
            found = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != wanted:
            unmet.append(f"{name}=={wanted}")
    return unmet


def plan_steps(root: Path, group: str) -> list[Step]:
    """All pip calls that ``group`` needs, in order."""
    pins = read_pins(root / "requirements.txt")
    torch = f"torch=={pins['torch']}"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    package = [project.get("build-system"), project.get("project"), str(root)]
    package.append(project.get("tool", {}).get("setuptools"))
    package.append((root / "assets" / "version.txt").read_text())
    # Torch alone and first: another package must not bring a torch of its choice.
    planned: list[tuple[str, str, object, list[str]]] = [
        ("torch", f"installing {torch} (the largest part)", torch, [torch])
    ]
    for name in requirement_files(group):
        wanted = read_pins(root / name)
        what = f"installing the {len(wanted)} packages of {name}"
        planned.append((name, what, wanted, ["-r", str(root / name)]))
    link = ["--no-deps", "-e", str(root)]
    planned.append(("package", "linking this repository as torchtitan", package, link))
    return [
        Step(key=key, what=what, fingerprint=_hash(content), arguments=arguments)
        for key, what, content, arguments in planned
    ]


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def exclusive(root: Path) -> Generator[int]:
    """Hold the set-up lock of ``root``; a second start waits here and says so.

    Yields the file descriptor. pip inherits it: when this process is killed, the lock stays with
    the pip that is still writing.
    """
    try:
        descriptor = os.open(root / ".setup.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise SetupError(
            f"cannot write in {root}: {error.strerror}. Clone the repository to a folder of yours, "
            "or install requirements.txt into the active interpreter."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this folder is at work; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


class VirtualEnvironment:
    """``.venv`` of one repository and the record of what is in it."""

    def __init__(self, root: Path, lock_descriptor: int) -> None:
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.log = self.folder / "setup.log"
        self._state_path = self.folder / "setup_state.json"
        self._lock_descriptor = lock_descriptor
        self.installed: dict[str, str] = {}
        self.cut_short = False
        self.is_ours = self._state_path.exists()
        if self.is_ours:
            try:
                state = json.loads(self._state_path.read_text())
                self.installed, self.cut_short = state["installed"], state["busy"]
            except (ValueError, KeyError):
                self.cut_short = True

    def works(self) -> bool:
        probe = (
            subprocess.run(
                [self.python, "-c", "import pip"], env=_clean_environment(), capture_output=True
            )
            if self.python.exists()
            else None
        )
        return probe is not None and probe.returncode == 0

    def python_version(self) -> str:
        """Major and minor version it was made with, ``""`` when that cannot be read."""
        config = self.folder / "pyvenv.cfg"
        lines = config.read_text().splitlines() if config.exists() else []
        values = dict(line.split(" = ", 1) for line in lines if " = " in line)
        return ".".join(values.get("version", "").split(".")[:2])

    def create(self, base_python: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.is_symlink() or self.folder.exists():
            raise SetupError(f"cannot remove {self.folder}. Remove it yourself and start again.")
        self.folder.mkdir()
        self.installed = {}
        self._write_state(busy=True)
        self._run("making the virtual environment .venv", [base_python, "-m", "venv", self.folder])
        self._write_state(busy=False)

    def install(self, step: Step) -> None:
        self._write_state(busy=True)
        command = [self.python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        self._run(step.what, [*command, *step.arguments])
        self.installed[step.key] = step.fingerprint
        self._write_state(busy=False)

    def _write_state(self, *, busy: bool) -> None:
        part = self._state_path.with_suffix(".part")
        part.write_text(json.dumps({"busy": busy, "installed": self.installed}))
        part.replace(self._state_path)

    def _run(self, what: str, command: Sequence[str | Path]) -> None:
        say(f"{what} ...")
        started = time.monotonic()
        log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_clean_environment(),
                pass_fds=(self._lock_descriptor,),
            ).returncode
        if code != 0:
            output = self.log.read_bytes()[log_start:].decode(errors="replace")
            if command[0] == self.python and PIP_UNPACKS not in output:
                # pip failed before it touched the environment, which is as good as it was.
                self._write_state(busy=False)
            tail = "\n".join(output.splitlines()[-LOG_TAIL_LINES:])
            free_gb = shutil.disk_usage(self.folder).free / 1e9
            raise SetupError(
                f"{what} failed with exit code {code}; the last lines:\n{tail}\n"
                f"Check the network and the free space ({free_gb:.1f} GB here) and start again: "
                "what was downloaded is kept."
            )
        say(f"done in {time.monotonic() - started:.0f} s")


def _clean_environment() -> dict[str, str]:
    # Both would let pip see packages that .venv does not hold, and take them for installed.
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


def reason_to_remake(venv: VirtualEnvironment, wanted_version: str | None) -> str | None:
    """Why ``.venv`` has to be made from nothing; None when it is good as it stands."""
    if not venv.folder.exists():
        return "there is none yet"
    if venv.cut_short:
        return "the last set-up was cut short"
    works = venv.works()
    if not venv.is_ours and not works:
        raise SetupError(
            f"{venv.folder} was not made by this script and has no working Python with pip. "
            "Move it away and start again."
        )
    if not works:
        return "its Python does not run any more"
    if wanted_version is not None and venv.python_version() != wanted_version:
        return f"PYTHON asks for {wanted_version}, it has {venv.python_version()}"
    return None


def prepare_venv(root: Path, group: str) -> Path:
    """Bring ``.venv`` up to date and return its interpreter."""
    with exclusive(root) as lock_descriptor:
        venv = VirtualEnvironment(root, lock_descriptor)
        named = os.environ.get("PYTHON")
        running = f"{sys.version_info.major}.{sys.version_info.minor}"
        reason = reason_to_remake(venv, running if named else None)
        if reason is not None:
            say(f".venv is made with Python {running} ({reason}); what pip says goes to {venv.log}")
            # The base: the running interpreter may be the very .venv that is about to go.
            venv.create(getattr(sys, "_base_executable", sys.executable))
        for step in plan_steps(root, group):
            if venv.installed.get(step.key) != step.fingerprint:
                venv.install(step)
        return venv.python


def choose_interpreter(root: Path, group: str) -> Path:
    pins: dict[str, str] = {}
    for name in requirement_files(group):
        pins |= read_pins(root / name)
    if Path(sys.prefix) != root / ".venv":
        unmet = unmet_pins(pins)
        if not unmet:
            say(f"using {sys.executable}, which has every pinned package")
            return Path(sys.executable)
        more = f" and {len(unmet) - 1} more" if len(unmet) > 1 else ""
        say(f"{sys.executable} lacks {unmet[0]}{more}; using {root / '.venv'}")
    return prepare_venv(root, group)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", nargs="?", choices=["runtime", "dev"], default="runtime")
    group = parser.parse_args(arguments).group
    try:
        print(choose_interpreter(ROOT, group))
    except SetupError as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"cannot set up {ROOT}: {error}. Check its owner and the free space.")
        return 1
    except KeyboardInterrupt:
        say("stopped; the next start goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
