"""What causes in the data share: how grave they are, and the examples to keep."""

from kmp.diagnosis.cause import ERROR, WARNING
from kmp.diagnosis.edits import PrepareData
from kmp.diagnosis.observations import Observations
from kmp.records import Replay


def severity_of_batches(run: Observations) -> str:
    """Returns a warning if such batches are rare: their steps are skipped, and others train."""
    skipped = run.skipped
    count, ends_so = skipped.nonfinite_losses, skipped.ends_nonfinite
    if not count:
        count, ends_so = skipped.count, skipped.is_stuck
    return WARNING if skipped.are_few(count) and not ends_so else ERROR


def keep_examples(array: str, condition: str, replay: Replay) -> PrepareData:
    """Returns the statements that keep the examples with a condition."""
    has_weights = replay.batch.has_sample_weight or array == "sample_weight"
    arrays = "x, y, sample_weight" if has_weights else "x, y"
    return PrepareData(
        f"keep = ({condition}).reshape(len({array}), -1).all(axis=1)\n"
        f"{arrays} = keras.tree.map_structure(lambda a: a[keep], ({arrays}))"
    )
