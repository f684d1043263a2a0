"""Programmatic dependent launch: a kernel is started while the one before it ends.

Invariant: before `wait_for_launch` a kernel touches nothing that any launch writes; weights may be
read. PDL is set by `launch.Jit` on compute capability 9.0 or more (an Orin has none of it), and
then every program waits, so that an order of launches stays an order of results.
Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _control(INSTRUCTION: tl.constexpr):
    """What `tl.extra.cuda` has for it is broken in Triton 3.4."""
    tl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_launch(PDL: tl.constexpr):
    """Wait until what the launch before wrote can be read."""
    if PDL:
        _control("griddepcontrol.wait; // $0")


@triton.jit
def start_next_launch(PDL: tl.constexpr):
    """Let programs of the next launch take the place of programs of this one that have ended; it
    happens once all of this launch have begun."""
    if PDL:
        _control("griddepcontrol.launch_dependents; // $0")
