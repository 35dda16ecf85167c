"""A module of recipes that needs something this machine does not have."""

import a_package_that_nobody_has  # noqa: F401  # pyrefly: ignore[missing-import]
