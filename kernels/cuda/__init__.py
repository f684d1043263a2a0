"""CUDA kernels in Triton, tuned for Orin (sm_87); bits are those of `kernels/reference`.

`launch.py` runs them: through Triton, or as machine code that was saved before. Importing this
package needs neither Triton nor a GPU; `require_triton` and `require_gpu` say what is missing.
"""

from __future__ import annotations

import importlib
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
    """Raise BackendUnavailable unless there are torch, a way to launch kernels (`launch.way`) and a
    GPU that torch can use."""
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable("the CUDA kernels need torch, which is not installed", TORCH_HINT)
    from edge_runtime.kernels.cuda import launch

    if launch.folder() is None:
        require_triton()
    launch.way()
    import torch

    if not torch.cuda.is_available():
        found = "finds none" if torch.version.cuda else "is a CPU build"
        raise BackendUnavailable(
            f"the CUDA kernels need a GPU that torch can use: torch {torch.__version__} {found}",
            "`bitnest-edge doctor` says what was found; on a Jetson torch has to be NVIDIA's build",
        )


def found() -> str:
    """Say which GPU, versions and kernels the backend has. Raises BackendUnavailable where it has
    none, or where the code is of a newer chip than the GPU."""
    require_gpu()
    import torch

    from edge_runtime.kernels.cuda import launch

    way, device = launch.way(), torch.device("cuda", torch.cuda.current_device())
    if isinstance(way, launch.Jit):
        try:
            importlib.import_module("triton")
        except ImportError as error:
            raise BackendUnavailable(
                f"Triton cannot be imported: {error}", INSTALL_TRITON
            ) from error
    elif launch.capability(device) < way.arch(device):
        raise BackendUnavailable(
            f"{way.why}: this GPU is an sm_{launch.capability(device)}",
            "make the folder again with --arch of this GPU: bitnest-edge kernels save",
        )
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {way.why}"
