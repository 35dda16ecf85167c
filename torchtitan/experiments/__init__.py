"""Experiments may import anything; nothing imports them."""

_supported_experiments: frozenset[str] = frozenset()
