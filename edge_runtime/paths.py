"""Where this program keeps files of its own.

Invariant: nothing is written outside these folders unless the user named a path.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Folder for things that can be fetched or computed again; `BITNEST_CACHE` overrides it.

    The folder is not created here.
    """
    override = os.environ.get("BITNEST_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    return platformdirs.user_cache_path("bitnest-edge", appauthor=False)
