"""The reference backend.

Importing this package comes before torch is loaded and asks OpenMP's threads to sleep while they
wait: spinning, as is its default, a thread that lost its core to another program stalls every
small op (measured on two cores with one busy: first token after 27 s instead of 1). A setting of
the user's own stays.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
