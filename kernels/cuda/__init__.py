"""CUDA kernels in Triton, tuned for Orin (sm_87); bits are those of `kernels/reference`.

Importing this package needs neither Triton nor a GPU; `require_triton` says what is missing.
"""

from __future__ import annotations

import importlib.util

from edge_runtime.errors import BackendUnavailable

INSTALL_TRITON = "pip install triton (on a Jetson the build that matches its torch)"


def require_triton() -> None:
    """Raise BackendUnavailable where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable(
            "the CUDA kernels need Triton, which is not installed", INSTALL_TRITON
        )
