"""Models that ``--module`` knows by their short name."""

_supported_models: frozenset[str] = frozenset({"llama3"})
