"""From a source model to a nested checkpoint."""

import edge_runtime.kernels.reference  # noqa: F401  before torch: see there
