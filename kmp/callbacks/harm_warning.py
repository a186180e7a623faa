"""Warns of harm that no repair has ended."""

from kmp.advice.diagnose import advice_of, finding_of
from kmp.callbacks.recorder import Recorder
from kmp.diagnosis import Observations, cure_of, incurable_cause_of, thresholds
from kmp.diagnosis.wording import capitalized
from kmp.utils import user_messages


class HarmWarning:
    """Warns once in a training of harm of 16 bits that its records prove, and nobody repairs.

    Args:
        recorder: The records of the training.
        has_warned: Whether the training continues one in which it has warned.

    Attributes:
        has_warned: Whether it has warned.
    """

    def __init__(self, recorder: Recorder, *, has_warned: bool) -> None:
        self._recorder = recorder
        self._examined = len(recorder.run.rows)
        self.has_warned = has_warned

    def look(self, obstacle: str = "") -> None:
        """Warns if new records show harm.

        Args:
            obstacle: Why the code of the user does not run with the last cure of the records.
        """
        run = self._recorder.run
        if self.has_warned or len(run.rows) == self._examined:
            return
        self._examined = len(run.rows)
        seen = Observations(run)
        cause, why = incurable_cause_of(seen), ""
        cure = cure_of(seen) if obstacle else None
        if cure is not None:
            cause, why = cure.cause, f" kmp cannot repair it while the training runs: {obstacle}."
        finding = finding_of(cause) if cause else None
        if finding is None and self._skips_in_16_bits():
            skipped = self._recorder.previous.nonfinite_losses_in_a_row
            finding = next(iter(advice_of(seen).problems), None)
            why = f" The last {skipped} steps were skipped, and kmp found no few layers to repair."
        if finding is None:
            return
        self.has_warned = True
        user_messages.warn(
            f"{finding.title} {capitalized(finding.evidence)}.{why} What to change:\n "
            f" {finding.change or finding.note}"
        )

    def _skips_in_16_bits(self) -> bool:
        """Whether steps are skipped in a row because of 16 bits, and a search found no layers."""
        replays = self._recorder.run.replays
        replay = replays[-1][1] if replays else None
        if replay is None or replay.search is None or replay.search.is_found:
            return False
        is_of_16_bits = not replay.is_finite and replay.is_finite_in_float32
        skipped = self._recorder.previous.nonfinite_losses_in_a_row
        return is_of_16_bits and skipped >= thresholds.STUCK_AFTER
