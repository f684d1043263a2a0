"""A device that no machine has: what is meant for a GPU runs on it without one.

Invariant: its tensors are computed on by the CPU, and an operation that mixes them with tensors of
the host fails, as on a GPU; only copies and numbers cross. Memory that its tensors hold is counted,
without what a library takes inside of one operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")  # the name that it goes by: torch knows no other that is never there
_CROSSING = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class There(torch.Tensor):
    """A tensor of the device."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> There:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held
        self.dropped: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.dropped is not None:
            self.dropped()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of OtherDevice")


class OtherDevice(TorchDispatchMode):
    """While it is entered there is the device; `peak_bytes` is the most that it held."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._live = 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        there: dict[int, There] = {}
        here: list[torch.Tensor] = []

        def held(value: Any) -> Any:
            if isinstance(value, There):
                there[id(value.held)] = value
                return value.held
            if isinstance(value, torch.Tensor):
                here.append(value)
            return value

        args, kwargs = _mapped(held, args), {k: _mapped(held, v) for k, v in kwargs.items()}
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        if there and func not in _CROSSING:
            assert all(t.dim() == 0 for t in here), f"{func} mixes devices"
        if target == DEVICE:
            kwargs["device"] = torch.device("cpu")
        result = func(*args, **kwargs)
        stays = target == DEVICE if target is not None else bool(there)
        if func is torch.ops.aten.copy_.default:
            stays = id(args[0]) in there
        return _mapped(lambda t: self._wrapped(t, there), result) if stays else result

    def _wrapped(self, value: Any, there: dict[int, There]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in there:
            return there[id(value)]
        made = There(value)
        storage = value.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key:
            if not self._holders[key]:
                self._live += size
                self.peak_bytes = max(self.peak_bytes, self._live)
            self._holders[key] += 1
            made.dropped = lambda: self._dropped(key, size)
        return made

    def _dropped(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self._live -= size


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_mapped(change, v) for v in value)
    return change(value)
