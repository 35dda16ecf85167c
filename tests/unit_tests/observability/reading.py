"""Read the structured log of a test back."""

import json
from pathlib import Path
from typing import Any


def records_below(folder: Path) -> list[dict[str, Any]]:
    """The records of all files below ``folder``."""
    lines = [line for path in sorted(folder.rglob("*.jsonl")) for line in path.open()]
    return [json.loads(line) for line in lines]
