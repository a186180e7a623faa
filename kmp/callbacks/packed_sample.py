"""A gradient sample in compact form, for the records that a training keeps in memory."""

import json
import zlib
from collections.abc import ItemsView, Iterator, Mapping
from typing import Any


class PackedSample(Mapping[str, Any]):
    """The `sample` or `reference` of a record, compressed: as a dictionary it takes ten times the memory.

    Args:
        sample: The sample, as `GradientSample.to_dict` returns it.
    """

    def __init__(self, sample: Mapping[str, Any]) -> None:
        self._compressed = zlib.compress(json.dumps(sample).encode())

    def __getitem__(self, key: str) -> Any:
        return self._unpacked()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unpacked())

    def __len__(self) -> int:
        return len(self._unpacked())

    def items(self) -> ItemsView[str, Any]:
        return self._unpacked().items()

    def __repr__(self) -> str:
        return repr(self._unpacked())

    def _unpacked(self) -> dict[str, Any]:
        return json.loads(zlib.decompress(self._compressed))


def packed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with its samples in compact form."""
    samples = {key: PackedSample(record[key]) for key in ("sample", "reference") if key in record}
    return {**record, **samples}
