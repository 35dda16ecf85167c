"""A repository with our set-up scripts and packages so small that setting it up takes seconds.

pip is the real one. It finds its wheels in a folder, needs no network, and builds with a backend
that lies in the repository itself. When there is a named pipe ``gate``, the backend writes to it
and then waits for good, so that a test can kill a set-up at a known moment.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.unit_tests.structure.sources import ROOT

BACKEND = """
import pathlib, signal, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    root = pathlib.Path(__file__).parent
    if (root / "gate").exists():
        (root / "gate").write_text("reached")
        signal.pause()
    name = "torchtitan-0.1.0"
    with zipfile.ZipFile(f"{wheel_directory}/{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torchtitan_link.pth", str(root))
        wheel.writestr(f"{name}.dist-info/METADATA",
                       "Metadata-Version: 2.1\\nName: torchtitan\\nVersion: 0.1.0\\n")
        wheel.writestr(f"{name}.dist-info/WHEEL",
                       "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    return f"{name}-py3-none-any.whl"
"""

PYPROJECT = """
[build-system]
requires = []
build-backend = "small_backend"
backend-path = ["."]

[project]
name = "torchtitan"
version = "0.1.0"
"""


class SmallRepository:
    """Folder with ``scripts/setup_env.*``, two requirements files and the wheels they name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gate = folder / "gate"
        # pip splits this setting at spaces, and the repository may have one in its name.
        self._wheels = folder.parent / "wheels"
        self._wheels.mkdir()
        for name in ("scripts", "assets"):
            (folder / name).mkdir(parents=True)
        for name in ("setup_env.sh", "setup_env.py"):
            shutil.copy(ROOT / "scripts" / name, folder / "scripts")
        (folder / "assets" / "version.txt").write_text("0.1.0\n")
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "small_backend.py").write_text(BACKEND)
        (folder / "requirements.txt").write_text("# why\ntorch==2.13.0\nsmall-dep==1.0\n")
        (folder / "requirements-dev.txt").write_text("small-tool==3.1\n")
        for name, version in (("torch", "2.13.0"), ("small_dep", "1.0"), ("small_tool", "3.1")):
            self.add_wheel(name, version)

    def add_wheel(self, name: str, version: str) -> None:
        path = self._wheels / f"{name}-{version}-py3-none-any.whl"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", f'__version__ = "{version}"\n')
            wheel.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
            wheel.writestr(f"{name}-{version}.dist-info/WHEEL", tags)
            wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")

    def start(self, group: str = "runtime", **environment: str) -> subprocess.Popen[str]:
        """``setup_env.sh`` in a process group of its own, to be killed with its children."""
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self._wheels)}
        # Settings of the machine's own pip must not reach past the folder of wheels.
        offline |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
        return subprocess.Popen(
            ["bash", str(self.folder / "scripts" / "setup_env.sh"), group],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHON": sys.executable, **offline, **environment},
        )

    def run(self, group: str = "runtime", **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of one start."""
        process = self.start(group, **environment)
        out, err = process.communicate(timeout=120)
        return process.returncode, out.strip(), err

    def version_in_venv(self, package: str) -> str:
        command = [
            self.folder / ".venv/bin/python",
            "-c",
            f"print(__import__('{package}').__version__)",
        ]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            command, cwd="/", check=True, capture_output=True, text=True, env=environment
        ).stdout.strip()
