"""Correlated inputs and random weights for the quantiser's tests."""

import math

import torch

from edge_runtime.convert import quantize as qz

G = 32


def make_hessian(K: int, *, samples: int = 600, seed: int = 0, mix: float = 3.0) -> torch.Tensor:
    """XᵀX / samples of correlated inputs."""
    rng = torch.Generator().manual_seed(seed)
    mixing = torch.eye(K) + mix * torch.randn(K, K, generator=rng) / math.sqrt(K)
    X = torch.randn(samples, K, generator=rng) @ mixing
    return X.T @ X / samples


def make_weights(N: int, K: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02


def draft(W: torch.Tensor, q4: torch.Tensor, scales: qz.Scales, group: int = G) -> torch.Tensor:
    return qz.dequantize(16 * q4.short(), *scales, group, W.shape[1])


def target(
    W: torch.Tensor, q4: torch.Tensor, qr: torch.Tensor, scales: qz.Scales, group: int = G
) -> torch.Tensor:
    return qz.dequantize(16 * q4.short() + qr, *scales, group, W.shape[1])
