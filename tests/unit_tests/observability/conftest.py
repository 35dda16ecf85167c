"""Every test here starts with an untouched logger if it asks for one."""

from tests.unit_tests.observability.fixtures import fresh_structured_logger

__all__ = ["fresh_structured_logger"]
