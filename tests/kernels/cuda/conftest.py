"""Without a GPU the kernels run in Triton's interpreter, which is chosen before they are imported.

The interpreter computes with numpy, which warns where IEEE arithmetic is meant to overflow or to
make NaN.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
