"""The pictures of a report, as addresses that hold the whole picture."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass

from kmp.report.run_summary import RunSummary, scale, share

_INCHES = (5.2, 3.6)

# Those that are put side by side where several runs are compared; the others stand with their run.
COMPARED = ("loss_scale", "gradient_exponents", "what_if")


@dataclass(frozen=True)
class Picture:
    """A picture with its words.

    Args:
        kind: What it shows: the name of a function of `kmp.plots`.
        alt: What there is to see, for who cannot see it.
        caption: How to read it, or why there is none.
        source: A `data:` address of an SVG picture; `None` if there is nothing to draw.
    """

    kind: str
    alt: str
    caption: str
    source: str | None


def pictures(facts: RunSummary) -> dict[str, Picture]:
    """Returns all pictures of a run by kind."""
    return {make.kind: make for make in (_picture(kind, facts) for kind in _CAPTIONS)}


def _picture(kind: str, facts: RunSummary) -> Picture:
    if kind == "gradient_exponents" and not facts.evidence.samples:
        return Picture(kind, "", "No picture of gradient magnitudes: no gradients were sampled.", None)
    return Picture(kind, _ALTS[kind](facts), _CAPTIONS[kind], _draw(kind, facts))


def _draw(kind: str, facts: RunSummary) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from kmp import plots

    figure = Figure(figsize=_INCHES, layout="constrained")  # not pyplot's, which keeps figures and chooses a backend
    shown = facts.evidence.samples[-1].histogram if kind == "gradient_exponents" else facts.run
    getattr(plots, kind)(shown, ax=figure.subplots())
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kmp"}):  # the same run gives the same file
        figure.savefig(buffer, format="svg", dpi=200, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


_CAPTIONS = {
    "loss_scale": "The loss scale, with a mark where steps were skipped.",
    "gradient_exponents": "The newest sample: left of float16's normal range bits are lost, right of it is inf.",
    "exponents_over_steps": "How the gradients' magnitudes moved in training.",
    "what_if": "What float16 would lose at every other loss scale.",
    "overflowing_variables": "Which variables overflowed, and which were to blame.",
}


def _alt_of_scale(facts: RunSummary) -> str:
    evidence = facts.evidence
    return (
        f"The loss scale over {evidence.steps} training steps, {scale(evidence.scale)} at the end; "
        f"{evidence.overflows} steps were skipped."
    )


def _alt_of_exponents(facts: RunSummary) -> str:
    histogram = facts.evidence.samples[-1].histogram
    zones, total = histogram.zones, max(1, histogram.total)
    return (
        f"Histogram of the gradients' binary exponents in step {histogram.step}: {share(zones['zero'] / total)} zero, "
        f"{share((zones['subnormal'] + zones['below_subnormal']) / total)} below float16's normal range, "
        f"{share((zones['near_overflow'] + zones['beyond']) / total)} near its end or beyond."
    )


def _alt_of_steps(facts: RunSummary) -> str:
    samples = facts.evidence.samples
    if not samples:
        return "Empty: no gradients were sampled."
    return (
        f"The gradients' binary exponents in {len(samples)} samples, from step {samples[0].step} to {samples[-1].step}."
    )


def _alt_of_what_if(facts: RunSummary) -> str:
    if facts.evidence.curve is None:
        return "Empty: there is no sample of finite gradients."
    return f"The share of gradient elements lost at every loss scale. {facts.other_scales.note}"


def _alt_of_overflows(facts: RunSummary) -> str:
    path, part = facts.evidence.main_overflow_origin
    if not path:
        return "Empty: no variable is known to have overflowed."
    return f"Skipped steps by variable; {path} was to blame in {share(part)} of those with a finite loss."


_ALTS: dict[str, Callable[[RunSummary], str]] = {
    "loss_scale": _alt_of_scale,
    "gradient_exponents": _alt_of_exponents,
    "exponents_over_steps": _alt_of_steps,
    "what_if": _alt_of_what_if,
    "overflowing_variables": _alt_of_overflows,
}
