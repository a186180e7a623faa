"""Small data for the programs: pictures of one blob, and noise around patterns of a class."""

import numpy as np


def blobs(count, size=16):
    """Returns pictures of shape (count, size, size, 1) with values between 0 and 1."""
    centers = np.random.default_rng(0).uniform(size * 0.3, size * 0.7, (count, 2, 1, 1))
    rows, columns = np.mgrid[:size, :size]
    distances = (rows - centers[:, 0]) ** 2 + (columns - centers[:, 1]) ** 2
    return np.exp(-distances / size)[..., None].astype("float32")


def tiles(labels, size=16, noise=0.1):
    """Returns pictures of shape (count, size, size, 3); those of a class have the same colors."""
    random = np.random.default_rng(0)
    patterns = random.uniform(0.2, 0.8, (labels.max() + 1, 4, 4, 3))
    pictures = patterns[labels].repeat(size // 4, axis=1).repeat(size // 4, axis=2)
    return (pictures + random.normal(scale=noise, size=pictures.shape)).astype("float32")
