"""bitnest-edge: one copy of the weights, a 4-bit draft inside an 8-bit target, exact decoding.

    from edge_runtime import Engine

    with Engine.open("DIR") as engine:
        for token in engine.generate([{"role": "user", "content": "Hello"}]):
            print(token.text, end="", flush=True)

Public names are imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine
    from edge_runtime.decode.generation import Generation
    from edge_runtime.decode.request import Result, Token
    from edge_runtime.decode.sampling import Sampling
    from edge_runtime.decode.session import Session
    from edge_runtime.errors import BitnestError

__version__ = "0.1.0"
__all__ = ["BitnestError", "Engine", "Generation", "Result", "Sampling", "Session", "Token"]

_HOME = {
    "BitnestError": "errors",
    "Engine": "decode.engine",
    "Generation": "decode.generation",
    "Result": "decode.request",
    "Sampling": "decode.sampling",
    "Session": "decode.session",
    "Token": "decode.request",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*globals(), *__all__])
