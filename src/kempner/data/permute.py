"""A seeded shuffle of 0..n-1 in O(1) memory: sample number -> place in the data set.

A Feistel network over pairs (left < a, right < b), a * b just above n, and cycle walking for the
few values that land at n or above (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002). Additions modulo a and b make it a bijection for any a and b.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kempner.data.source import Int64

FEISTEL_ROUNDS = 8
MASK = 2**64 - 1


def permute(index: Int64, n: int, seed: int) -> Int64:
    """Map `index` ([N], each in 0..n-1) by the bijection of (n, seed)."""
    assert 0 < n <= 2**62, n
    assert index.size == 0 or (index.min() >= 0 and index.max() < n), "index outside 0..n-1"
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = [_mix(_mix(seed) + i) for i in range(FEISTEL_ROUNDS)]
    result = _encrypt(index.astype(np.int64), a, b, keys)
    while (outside := result >= n).any():
        result[outside] = _encrypt(result[outside], a, b, keys)
    return result


def shuffled_indices(numbers: Int64, n: int, seed: int) -> Int64:
    """Map running numbers to places in a data set of `n` samples: each epoch of n numbers is
    a separate shuffle."""
    epochs, index = np.divmod(numbers, n)
    result = np.empty_like(index)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        result[inside] = permute(index[inside], n, epoch_seed(seed, int(epoch)))
    return result


def epoch_seed(seed: int, epoch: int) -> int:
    """Derive a seed for each epoch of a run."""
    return _mix(_mix(seed) ^ epoch)


def _encrypt(value: Int64, a: int, b: int, keys: list[int]) -> Int64:
    left, right = np.divmod(value, b)
    for i, key in enumerate(keys):
        if i % 2:
            right = (right + _hash(left, key) % np.uint64(b)).astype(np.int64) % b
        else:
            left = (left + _hash(right, key) % np.uint64(a)).astype(np.int64) % a
    return left * b + right


def _hash(value: Int64, key: int) -> NDArray[np.uint64]:
    """Apply splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014) to value
    + key, elementwise."""
    # Arrays of uint64 wrap around without a warning, as the hash requires.
    x = value.astype(np.uint64) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix(value: int) -> int:
    """Apply splitmix64 to one Python integer."""
    x = (value + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)
