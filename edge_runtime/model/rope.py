"""Rotary embedding tables: cos and sin in fp64 on the host, cast to fp32 once, shared by backends.

Invariant: a table depends only on the spec and on the allocated context (dynamic scaling is fixed
at load), never on the sequence. Formulas follow the Hugging Face definitions of each scaling kind;
yarn: Peng et al. 2023, llama3: the Llama 3.1 model card.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edge_runtime.format.spec import ModelSpec, RopeSpec

F64 = npt.NDArray[np.float64]


def rope_tables(
    spec: ModelSpec, context: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return (cos, sin), fp32 [context, D/2]; yarn's attention factor is multiplied in."""
    frequencies, factor = inverse_frequencies(spec, context)
    angles = np.arange(context, dtype=np.float64)[:, None] * frequencies
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(
        np.float32
    )


def inverse_frequencies(spec: ModelSpec, context: int) -> tuple[F64, float]:
    """Return the angle per position, fp64 [D/2], and the factor on cos and sin."""
    r, D = spec.rope, spec.head_dim
    exponents = np.arange(0, D, 2, dtype=np.float64) / D
    if r.kind == "dynamic":
        original = spec.max_position
        theta = r.theta
        if context > original:
            stretch = r.factor * context / original - (r.factor - 1)
            theta = r.theta * stretch ** (D / (D - 2))
        return theta**-exponents, 1.0
    plain = r.theta**-exponents
    if r.kind == "linear":
        return plain / r.factor, 1.0
    if r.kind == "llama3":
        return _llama3(plain, r), 1.0
    if r.kind == "yarn":
        return _yarn(plain, r, D)
    return plain, 1.0


def _llama3(plain: F64, r: RopeSpec) -> F64:
    wavelength = 2 * math.pi / plain
    low, high = (
        r.original_max_position / r.low_freq_factor,
        r.original_max_position / r.high_freq_factor,
    )
    smooth = (r.original_max_position / wavelength - r.low_freq_factor) / (
        r.high_freq_factor - r.low_freq_factor
    )
    mixed = (1 - smooth) * plain / r.factor + smooth * plain
    return np.where(wavelength > low, plain / r.factor, np.where(wavelength < high, plain, mixed))


def _yarn(plain: F64, r: RopeSpec, D: int) -> tuple[F64, float]:
    def dim_of(rotations: float) -> float:
        return (
            D
            * math.log(r.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(r.theta))
        )

    low, high = dim_of(r.beta_fast), dim_of(r.beta_slow)
    if r.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(D // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    return plain / r.factor * ramp + plain * (1 - ramp), _yarn_factor(r)


def _yarn_factor(r: RopeSpec) -> float:
    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if r.attention_factor is not None:
        return r.attention_factor
    if r.mscale and r.mscale_all_dim:
        return mscale(r.factor, r.mscale) / mscale(r.factor, r.mscale_all_dim)
    return mscale(r.factor, 1.0)
