"""Take an error to another process: to the other ranks, from a worker, to a writer process and back."""

import pickle


def portable(error: BaseException, origin: str = "") -> BaseException:
    """``error`` itself if it survives pickling, else a RuntimeError with its type, ``origin`` and text."""
    try:
        # Both ways: many an error can be written and cannot be made again from its arguments.
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the error's own class raises
        where = f" {origin}" if origin else ""
        return RuntimeError(f"{type(error).__name__}{where}: {error}")
    return error
