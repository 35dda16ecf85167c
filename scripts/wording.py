"""How the scripts that tell about a run say numbers. Needs nothing but Python."""


def counted(number: int, noun: str) -> str:
    """``number`` of ``noun``, such as "1 step" or "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
