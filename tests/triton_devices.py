"""Where tests of the CUDA kernels run: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu", "cuda"]


def device_of(device: str) -> str:
    """Skip where the form cannot run: the interpreter is chosen for a whole process."""
    if importlib.util.find_spec("triton") is None:  # no kernel exists; the tests' extra has it
        # there is no build of it for some boards, and the extra `cuda` brings it
        pytest.skip("Triton is not installed")
    if device == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no GPU, or the interpreter is on")
    if device == "cpu" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    return device
