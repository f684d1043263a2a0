"""Devices and model shapes: what is known before anything runs, each number with its source."""

from __future__ import annotations

from edge_runtime.profiles.detect import Board, Clock, detect
from edge_runtime.profiles.load import device, device_names, shape, shape_names
from edge_runtime.profiles.schema import DeviceProfile, KnownShape, Measured, Mode

__all__ = [
    "Board",
    "Clock",
    "DeviceProfile",
    "KnownShape",
    "Measured",
    "Mode",
    "detect",
    "device",
    "device_names",
    "shape",
    "shape_names",
]
