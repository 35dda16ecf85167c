"""Look at a page in headless Chromium."""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Nothing but the file itself can be reached.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    # Scripts get as much time as they take; the clock of the page does not wait for a loaded machine.
    "--virtual-time-budget=10000",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What the browser made of a page."""

    dom: str
    console: list[str]
    """Lines that scripts wrote to the console of the page, uncaught errors among them."""


def show(page: Path) -> Shown:
    """Open ``page`` and wait until its scripts have run."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if re.search(r":CONSOLE[:(]", line)]
    return Shown(dom=done.stdout, console=console)
