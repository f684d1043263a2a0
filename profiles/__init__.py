"""What is known of devices and of model shapes before anything runs, each number with its source."""

from __future__ import annotations

from edge_runtime.profiles.schema import DeviceProfile, KnownShape, Measured, Mode

__all__ = ["DeviceProfile", "KnownShape", "Measured", "Mode"]
