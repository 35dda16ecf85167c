from tests.unit_tests.observability.fixtures import fresh_structured_logger

__all__ = ["fresh_structured_logger"]
