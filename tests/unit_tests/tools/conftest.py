"""The logger fixture for the spans of the tools."""

from tests.unit_tests.observability.fixtures import fresh_structured_logger

__all__ = ["fresh_structured_logger"]
