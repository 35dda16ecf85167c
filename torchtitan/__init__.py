"""torchtitan: train PyTorch models from one command, and never lose work."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("torchtitan")
except PackageNotFoundError:
    # A source tree that was never installed still has to import.
    __version__ = "0.0.0+unknown"
