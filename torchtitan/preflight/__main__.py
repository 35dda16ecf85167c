"""Check the settings of a run and start nothing: ``python -m torchtitan.preflight --module ...``."""

from torchtitan.preflight import parse_or_exit

if __name__ == "__main__":
    parse_or_exit()
