"""The metrics of one demo run, for the report's tests."""

from typing import Any

import pytest
from report_pages import example_metrics


@pytest.fixture
def metrics() -> dict[str, Any]:
    return example_metrics()
