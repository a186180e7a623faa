"""Keras models in open files. Publicly, Keras takes the path of a file and lets HDF5 write to it.

HDF5 ends the process if a write fails, as on a full disk or at a quota. Keras checks the end of a path's name by `str`,
and passes an object of `io` on to h5py or `zipfile`; therefore such an object that `str` gives a name is accepted.
"""

import io
from typing import BinaryIO

import keras


class _Image(io.BytesIO):
    """A file in memory, of which `str` returns a name. With an attribute `name`, Keras would write a second file."""

    file_name = ""

    def __str__(self) -> str:
        return self.file_name


def write_model(model: keras.Model, file: BinaryIO, weights_only: bool) -> None:
    """Writes what `model.save` or `model.save_weights` does to a file. The content is held in host memory first."""
    image = _Image()
    image.file_name = "image.weights.h5" if weights_only else "image.keras"
    (model.save_weights if weights_only else model.save)(image)
    file.write(image.getbuffer())
