"""The one error class that ends a program with a sentence instead of a traceback."""


class RefusedError(RuntimeError):
    """What was asked for cannot be done here; the message says why, and what to do."""
