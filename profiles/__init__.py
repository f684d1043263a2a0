"""What is known about a device: memory, bandwidth, compute, rails, each number with its source.

Holds nothing yet. It will have one file per board and the detection of the board it runs on.
"""

from __future__ import annotations

__all__: list[str] = []
