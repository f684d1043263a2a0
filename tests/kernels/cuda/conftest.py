"""Without a GPU the kernels run in Triton's interpreter (tests/conftest.py): in numpy, which warns
where IEEE arithmetic is meant to overflow or to make NaN.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
