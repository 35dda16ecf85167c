"""Decide the one name a parameter has on disk, whatever wrapped its module.

Wrappers add a segment of their own to the dotted names of ``named_parameters()``. A checkpoint must
not know of them: a run with activation checkpointing and one without share the same files. This
module imports nothing of the project, so that the optimizer package and the checkpoint managers can
both start from it.
"""

__all__ = ["canonical_fqn"]


def canonical_fqn(name: str, prefixes: tuple[str, ...] = ("_checkpoint_wrapped_module",)) -> str:
    """``name`` without every dotted segment that is one of ``prefixes``."""
    return ".".join(segment for segment in name.split(".") if segment not in prefixes)
