"""Fixtures that suites of several folders share."""

from pathlib import Path

import pytest

from engine.checkpoint import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's folder in the user's cache; fetched and converted on first use."""
    return resolve("smollm2-135m-instruct", Path("~/.cache/headrace/models"))
