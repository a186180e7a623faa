"""From a recorded run to what to change, each finding with its evidence. Knows numbers, no Keras."""

from kmp.advice.causes import CAUSES
from kmp.advice.finding import Advice, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import as_power, validation

_MANY_ZEROS = 0.75
_SKIPPED_UNDISTURBED = 0.05


def advise(run: Run) -> Advice:
    """Tells what float16 costs a run, why, and what to change.

    Args:
        run: Readings of `kmp.callbacks.defaults()`; without samples of gradients only overflows are known.

    Returns:
        Ranked findings, and a verdict. What the run holds no evidence for is not found.

    Raises:
        TypeError: If `run` is no `kmp.records.Run`.

    Example:
    >>> advise(Run([{"step": 500, "overflow_count": 0, "loss_scale": 32768.0}])).verdict
    'No step of 500 was skipped. No gradients were sampled, so underflow is not known.'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    evidence = RunMetrics(run)
    found = [finding for find in CAUSES if (finding := find(evidence))]
    return Advice(tuple(found), _verdict(evidence, found))


def _verdict(evidence: RunMetrics, found: list[Finding]) -> str:
    if not evidence.steps:
        return "The run is empty: nothing was read."
    if found:
        return found[0].title
    skipped = {0: "No step", 1: "One step"}.get(evidence.overflows, f"{evidence.overflows} steps")
    count = f"{skipped} of {evidence.steps} {'was' if evidence.overflows <= 1 else 'were'} skipped"
    if evidence.curve is None or not evidence.finite:
        sampled = "No sampled step was finite" if evidence.samples else "No gradients were sampled"
        return f"{count}. {sampled}, so underflow is not known."
    if not evidence.is_float16:
        return f"{count}. The run computed in {evidence.dtypes}, where gradients need no loss scale."
    zero = evidence.all_zero
    is_doubtful = evidence.flushed is None and (evidence.zero_share > _MANY_ZEROS or bool(zero))
    begin = "Nothing shows that float16 costs anything here" if is_doubtful else "float16 costs nothing here"
    if evidence.overflows > _SKIPPED_UNDISTURBED * evidence.steps:
        begin = "float16 costs little here beyond the skipped steps"
    whose = zero[0] if len(zero) == 1 else f"{len(zero)} variables"
    among = f", all those of {whose} among them" if zero else ""
    doubt = f" {evidence.zero_share:.1%} are exactly zero{among}; only a float32 reference tells whether all would be."
    return (
        f"{begin}: {count[0].lower()}{count[1:]}, and at the loss scale in use, {as_power(evidence.scale)}, "
        f"{evidence.subnormal:.1%} of the gradient elements that are not zero are subnormal in float16 and "
        f"{evidence.too_small:.1%} too small for it.{doubt * is_doubtful}"
    )
