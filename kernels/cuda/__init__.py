"""CUDA kernels in Triton, tuned for Orin (sm_87); bits are those of `kernels/reference`.

Importing this package needs neither Triton nor a GPU; `require_triton` and `require_gpu` say what
is missing.
"""

from __future__ import annotations

import importlib.util

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels import TORCH_HINT

INSTALL_TRITON = "pip install triton (on a Jetson the build that matches its torch)"


def require_triton() -> None:
    """Raise BackendUnavailable where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable(
            "the CUDA kernels need Triton, which is not installed", INSTALL_TRITON
        )


def require_gpu() -> None:
    """Raise BackendUnavailable unless torch, Triton and a GPU that torch can use are here."""
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable("the CUDA kernels need torch, which is not installed", TORCH_HINT)
    require_triton()
    import torch

    if not torch.cuda.is_available():
        found = "finds none" if torch.version.cuda else "is a CPU build"
        raise BackendUnavailable(
            f"the CUDA kernels need a GPU that torch can use: torch {torch.__version__} {found}",
            "`bitnest-edge doctor` says what was found; on a Jetson torch has to be NVIDIA's build",
        )


def found() -> str:
    """Say which GPU and versions the backend has. Raises BackendUnavailable where it has none."""
    require_gpu()
    import torch

    try:
        import triton
    except ImportError as error:
        raise BackendUnavailable(f"Triton cannot be imported: {error}", INSTALL_TRITON) from error
    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, Triton {triton.__version__}"
