"""Where this program keeps files of its own.

Invariant: nothing of our own is written outside these folders unless the user named a path (Hub
downloads lie in the usual Hugging Face cache).
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
        return Path(os.path.expanduser(override)).absolute()
    return platformdirs.user_cache_path("bitnest-edge", appauthor=False)
