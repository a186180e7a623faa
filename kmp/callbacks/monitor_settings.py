"""The settings of a monitor, as the parts of a training read them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What a `Monitor` was asked to do, checked. See its arguments.

    Attributes:
        callback: The name of the callback's class, for messages.
        recorded: The keys that the callback adds to Keras' `logs`.
    """

    callback: str
    recorded: Collection[str]
    log_dir: Path | None
    every_n_steps: int
    variables: tuple[str, ...] | None
    replay: bool
    repair: bool
    on_nonfinite: str
    patience: int
    log_norms: bool
    report: Path | None
    failing_batch: Path | None
