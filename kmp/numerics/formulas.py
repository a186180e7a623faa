"""Functions that NumPy does not have, for float64 arrays."""

import functools
import math
import statistics

import numpy as np

from kmp.numerics.values import INFINITY


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """Returns log(1 + exp(x))."""
    return np.logaddexp(0.0, x)


erf = np.vectorize(math.erf, otypes=["float64"])
erfc = np.vectorize(math.erfc, otypes=["float64"])


def gelu(x: np.ndarray) -> np.ndarray:
    """Returns x times the probability of a normal number below x."""
    return x * erfc(-x / math.sqrt(2.0)) / 2.0


def elu(x: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """Returns x, or `alpha * (exp(x) - 1)` of negative numbers."""
    return np.where(x > 0.0, x, alpha * np.expm1(np.minimum(x, 0.0)))


def tanh_shrink(x: np.ndarray) -> np.ndarray:
    """Returns x - tanh(x)."""
    square = x * x
    near_zero = x * square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * 17.0 / 315.0))
    return np.where(np.abs(x) < 0.01, near_zero, x - np.tanh(x))


def sparse_plus(x: np.ndarray) -> np.ndarray:
    """Returns 0 up to -1, x from 1, and a parabola between them."""
    return np.where(x >= 1.0, x, np.maximum(x + 1.0, 0.0) ** 2 / 4.0)


def squareplus(x: np.ndarray) -> np.ndarray:
    """Returns (x + sqrt(x^2 + 4)) / 2."""
    root = np.hypot(x, 2.0)
    return np.where(x < 0.0, 2.0 / (root - x), (x + root) / 2.0)


def bessel_i0e(x: np.ndarray) -> np.ndarray:
    """Returns the modified Bessel function I0, times exp(-abs(x))."""
    size = np.abs(x)
    large = np.maximum(size, 500.0)
    of_large = (1.0 + 1.0 / (8.0 * large)) / np.sqrt(2.0 * np.pi * large)
    small = np.minimum(size, 500.0)
    return np.where(size < 500.0, np.i0(small) * np.exp(-small), of_large)


def _quantile_of_normal(probability: float) -> float:
    if 0.0 < probability < 1.0:
        return statistics.NormalDist().inv_cdf(probability)
    return {0.0: -INFINITY, 1.0: INFINITY}.get(probability, math.nan)


ndtri = np.vectorize(_quantile_of_normal, otypes=["float64"])


def erfinv(x: np.ndarray) -> np.ndarray:
    """Returns the inverse of the error function."""
    near_zero = math.sqrt(math.pi) / 2.0 * x * (1.0 + math.pi / 12.0 * x**2)
    elsewhere = -ndtri((1.0 - np.abs(x)) / 2.0) / math.sqrt(2.0)
    return np.where(np.abs(x) < 1e-4, near_zero, np.copysign(elsewhere, x))


def _logarithm_of_gamma(x: float) -> float:
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):
        return INFINITY


lgamma = np.vectorize(_logarithm_of_gamma, otypes=["float64"])


@functools.cache
def turns_of_sinc() -> tuple[float, ...]:
    """Returns where sin(pi x) / (pi x) has its extremes: where pi x is its own tangent."""
    near = np.pi * (np.arange(1, 60) + 0.5)
    for _ in range(20):
        near = np.pi * (np.arange(1, 60) + 0.5) - np.arctan(1.0 / near)
    turns = near / np.pi
    return (0.0, *turns, *-turns)
