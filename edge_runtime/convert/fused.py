"""Small elementwise steps as one kernel of a GPU, by torch's compiler.

Invariant: on the CPU, and where the compiler is missing, fails or computes something else, the
steps run as they are written. A compiled product and sum may be rounded once instead of twice, so
that a value in the middle between two codes may go the other way.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)
DEVICES = ("cuda",)  # where launching is what small steps cost
_MOST_DIFFERENT = 1e-3  # of the values of the first call

Steps = Callable[..., None]


class Fused:
    """Steps that write to their last arguments and change no other; a decorator."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._kernel: Steps | None = None

    def __call__(self, *args: torch.Tensor | float) -> None:
        """Do the steps. The first call on a GPU compiles them, which takes some seconds."""
        first = args[0]
        assert isinstance(first, torch.Tensor)
        if first.device.type not in DEVICES:
            self._steps(*args)
            return
        if self._kernel is None:
            self._kernel = self._compiled(args)
        self._kernel(*args)

    def _compiled(self, args: tuple[torch.Tensor | float, ...]) -> Steps:
        from torch._inductor import config

        try:
            with warnings.catch_warnings(), config.patch(compile_threads=1):
                warnings.simplefilter("ignore")
                kernel: Steps = torch.compile(self._steps, dynamic=True)
                kernel(*args)
            found = [a.clone() for a in args if isinstance(a, torch.Tensor)]
            self._steps(*args)
            wanted = [a for a in args if isinstance(a, torch.Tensor)]
            different = max(
                float((a != b).double().mean()) for a, b in zip(found, wanted, strict=True)
            )
            if different <= _MOST_DIFFERENT:
                return kernel
            why = f"{different:.2%} of its values differ"
        except Exception as error:  # whatever the compiler meets: the steps are there
            why = (str(error) or repr(error)).splitlines()[0]
        log.debug("steps of the solver are launched one by one: the compiled kernel: %s", why)
        return self._steps
