"""Power rails of the machine as one cumulative energy counter with named windows.

Reads tegrastats, INA3221 and INA238 files, jtop, NVML, or a log; a rail that is not there is None,
never 0, and the rail that is the total is named.
"""

from __future__ import annotations

from edge_runtime.power.energy import WindowEnergy
from edge_runtime.power.logfile import PowerLogError
from edge_runtime.power.meter import Meter, open_meter
from edge_runtime.power.source import PowerUnavailable, Sample
from edge_runtime.power.tegrastats import Record, parse_line

__all__ = [
    "Meter",
    "PowerLogError",
    "PowerUnavailable",
    "Record",
    "Sample",
    "WindowEnergy",
    "open_meter",
    "parse_line",
]
