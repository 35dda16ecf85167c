"""The counts behave as the choices are meant to: less memory, more work."""

from benchmarks.activation_checkpoint import CHOICES, measure


def test_what_keeps_less_computes_more() -> None:
    kept, gflop = zip(*(measure(choice) for choice in CHOICES.values()), strict=True)
    assert list(CHOICES) == ["none", "selective", "full"]
    assert kept[0] > kept[1] > kept[2] > 0
    assert 0 < gflop[0] < gflop[1] < gflop[2]
