"""Logits that stay on the device: what is chosen comes to the host, they themselves if asked for.

Invariant: logits are valid as long as someone holds them. A pass writes into the same room as the
one before, so what is still held then moves to memory of its own first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import head, sampling
from edge_runtime.kernels.sampling import Parameters

Fetch = Callable[[Tensor], NDArray[Any]]
"""Copies a small tensor to the host, waiting for all that was launched before."""


@dataclass(frozen=True, slots=True)
class Room:
    """values: fp32 [rows, stride]; found: int32 [2, rows], the best id of each row and whether the
    row is finite; partial, flags: of `head.Choice`."""

    values: Tensor
    found: Tensor
    partial: Tensor
    flags: Tensor

    @classmethod
    def new(cls, rows: int, stride: int, num_tokens: int, device: torch.device) -> Room:
        """Allocate one."""
        made = head.new_choice(rows, num_tokens, device)
        return cls(
            torch.empty(rows, stride, device=device),
            torch.empty(2, rows, dtype=torch.int32, device=device),
            made.partial,
            made.flags,
        )

    def part(self, rows: slice) -> tuple[Tensor, head.Choice]:
        """Return the views of some rows that the head and its argmax write."""
        index, finite = self.found[0, rows], self.found[1, rows]
        return self.values[rows], head.Choice(index, finite, self.partial[rows], self.flags[rows])

    def copy(self, rows: int) -> Room:
        """Return a copy of the first rows."""
        parts = (self.values[:rows], self.found[:, :rows], self.partial[:rows], self.flags[:rows])
        return Room(*(part.clone(memory_format=torch.contiguous_format) for part in parts))


class CudaLogits:
    """fp32 [rows, V]; the best id of each row is found by the pass itself."""

    def __init__(self, room: Room, rows: int, num_tokens: int, sampler: Sampler) -> None:
        self._room, self._rows, self._num_tokens = room, rows, num_tokens
        self._sampler = sampler
        self._best: list[int] | None = None
        self._finite = True

    def keep(self, room: Room) -> None:
        """Move to memory of its own, if it lies in `room`."""
        if self._room is room:
            self._room = room.copy(self._rows)

    def wait(self) -> None:
        """Wait for the pass."""
        if self._best is None:
            found = self._sampler.fetch(self._room.found)[:, : self._rows]
            self._best, self._finite = found[0].tolist(), bool(found[1].all())

    def argmax(self, allowed: Sequence[int] | ops.I64 | None = None) -> list[int]:
        """Return the lowest winning id per row."""
        best = self._checked()
        if allowed is None:
            return list(best)
        values, _ = self._room.part(slice(self._rows))
        return self._sampler.argmax(values, self._num_tokens, np.asarray(allowed, np.int64))

    def sample(
        self,
        row: int,
        position: int,
        prompt: Sequence[int],
        answer: Sequence[int],
        parameters: Parameters,
        allowed: ops.I64 | None = None,
    ) -> int:
        """Choose a token from one row."""
        self._checked()
        values = self._room.values[row : row + 1]
        seen = _seen(self._num_tokens, prompt, answer, parameters)
        return self._sampler.sample(
            values, self._num_tokens, position, parameters, seen=seen, allowed=allowed
        )

    def numpy(self) -> ops.F32:
        """Return a copy of the logits."""
        self._checked()
        return np.array(self._room.values[: self._rows, : self._num_tokens].cpu().numpy())

    def _checked(self) -> list[int]:
        self.wait()
        if not self._finite:
            raise ops.not_finite()
        assert self._best is not None
        return self._best


class Sampler:
    """Choices that a pass does not make itself; its room is made on first use and kept."""

    def __init__(self, device: torch.device, fetch: Fetch) -> None:
        self.fetch = fetch
        self._device = device
        self._rooms: dict[bool, sampling.Room] = {}

    def release(self) -> None:
        """Give the room back."""
        self._rooms.clear()

    def argmax(self, values: Tensor, num_tokens: int, allowed: ops.I64) -> list[int]:
        """Return the lowest winning id per row among `allowed`."""
        bits = self._send(_bits(allowed, num_tokens))
        best: list[int] = self.fetch(head.argmax(values, num_tokens, bits).index).tolist()
        return best

    def sample(
        self,
        values: Tensor,
        num_tokens: int,
        position: int,
        parameters: Parameters,
        *,
        seen: NDArray[np.uint8] | None,
        allowed: ops.I64 | None,
    ) -> int:
        """Choose from one row; seen: uint8 [1, V], bits of `sampling`, or None."""
        truncate = parameters.top_k > 0 or parameters.top_p < 1
        if truncate not in self._rooms:
            self._rooms[truncate] = sampling.new_room(
                1, num_tokens, self._device, truncate=truncate
            )
        room = sampling.sample(
            values,
            num_tokens,
            sampling.Settings.of([parameters], [position], self._device),
            truncate=truncate,
            seen=None if seen is None else self._send(seen),
            allowed=None if allowed is None else self._send(_bits(allowed, num_tokens)),
            out=self._rooms[truncate],
        )
        return int(self.fetch(room.index)[0])

    def _send(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _bits(ids: ops.I64, num_tokens: int) -> NDArray[np.int32]:
    """Words of 32 bits, set for each id."""
    bits = np.zeros(-(-num_tokens // 32) * 32, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _seen(
    num_tokens: int, prompt: Sequence[int], answer: Sequence[int], parameters: Parameters
) -> NDArray[np.uint8] | None:
    """Bits of the tokens that penalties meet; None without penalties."""
    if parameters.repetition_penalty == 1 and parameters.presence_penalty == 0:
        return None
    seen = np.zeros((1, num_tokens), np.uint8)
    own = np.array(answer, np.int64)
    if parameters.repetition_penalty != 1:  # a long prompt is not copied for one that is off
        ids = np.array([*prompt, *answer], np.int64)
        seen[0, ids[(ids >= 0) & (ids < num_tokens)]] = sampling.PENALISED_SEEN
    seen[0, own] |= sampling.PENALISED_OWN
    return seen
