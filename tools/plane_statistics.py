"""What the planes of a converted model look like: what `convert --synthetic` draws from.

    python tools/plane_statistics.py DIR

Prints how often each nibble comes (of 256), quantiles of |m|, of S over its median, of the
embedding's codes and scales, and the gain rms(W) · √K of each kind of matrix over the layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from edge_runtime.format.reader import Checkpoint
from edge_runtime.kernels import pack
from edge_runtime.plan.footprint import linear_shapes

AT = (0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1)


def quantiles(values: list[np.ndarray], digits: int = 3) -> str:
    """Return the quantiles AT of all values."""
    return str(np.round(np.quantile(np.concatenate([v.ravel() for v in values]), AT), digits))


def main() -> None:
    """Command line."""
    checkpoint = Checkpoint(Path(sys.argv[1]))
    G = checkpoint.manifest.group_size
    counts = np.zeros((2, 16))
    sizes: list[np.ndarray] = []
    scales: list[np.ndarray] = []
    gains: dict[str, list[float]] = {}
    for name, (_, K) in linear_shapes(checkpoint.manifest.spec).items():
        base, refine, mult, scale = (
            checkpoint.plane(f"{name}.{p}") for p in ("base", "refine", "mult", "scale")
        )
        q4, qr = pack.unpack_base(base, G), pack.unpack_refine(refine, G)
        counts += [np.bincount(codes.ravel() + 8, minlength=16) for codes in (q4, qr)]
        W = (16.0 * q4 + qr) * np.repeat(mult.astype(float), G, axis=1) * scale[:, None]
        gains.setdefault(name.rsplit(".", 1)[-1], []).append(float(W.std()) * K**0.5)
        sizes.append(np.abs(mult.astype(float)))
        scales.append(scale / np.median(scale))
    shares = 256 * counts / counts.sum(1, keepdims=True)
    print("base nibbles -8 … 7 of 256      ", np.round(shares[0], 1))
    print("refinement nibbles -8 … 7 of 256", np.round(shares[1], 1))
    print("quantiles at", AT)
    print("|m|            ", quantiles(sizes, 0))
    print("S / median     ", quantiles(scales))
    codes, scale = checkpoint.plane("embed.codes"), checkpoint.plane("embed.scale")
    print("embedding codes", quantiles([codes], 0))
    print("scales / median", quantiles([scale / np.median(scale)]), "median", np.median(scale))
    for kind, values in gains.items():
        low, middle, high = np.quantile(values, (0, 0.5, 1))
        print(f"gain of {kind:<8} {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
