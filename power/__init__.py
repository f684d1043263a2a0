"""Power rails of the machine as one cumulative energy counter with named windows.

Holds nothing yet. It will read tegrastats, INA3221 and INA238 sysfs files, jtop and NVML; a rail
that is not there is None, never 0.
"""

from __future__ import annotations

__all__: list[str] = []
