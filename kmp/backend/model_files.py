"""Keras models in open files. Publicly, Keras takes the path of a file and lets HDF5 write to it.

HDF5 ends the process if a write fails, as on a full disk or at a quota. Keras checks the end of a path's name by `str`,
and passes an object of `io` on to h5py or `zipfile`; therefore such an object that `str` gives a name is accepted.
"""

import io
from typing import BinaryIO

import keras


class _WeightsImage(io.BytesIO):
    """A `.weights.h5` file in memory."""

    def __str__(self) -> str:
        return "image.weights.h5"


class _ModelFile(io.BufferedWriter):
    """A `.keras` file. Keras writes its weights to memory first if it has no path of a folder to write them to."""

    def __str__(self) -> str:
        return "model.keras"


def write_weights(model: keras.Model, file: BinaryIO) -> None:
    """Writes the weights of a model and its optimizer to a file, as `model.save_weights` does.

    The content is held in host memory first, where its size is that of the file.

    Raises:
        OSError: If a write fails.
    """
    image = _WeightsImage()
    model.save_weights(image)
    file.write(image.getbuffer())


def write_model(model: keras.Model, file: BinaryIO) -> None:
    """Writes a model to a file, as `model.save` does.

    The weights are held in host memory first, where their size is that of the file.

    Raises:
        OSError: If a write fails.
    """
    with _ModelFile(io.FileIO(file.fileno(), "wb", closefd=False)) as named:
        model.save(named)
