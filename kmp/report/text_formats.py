"""Numbers and code as a report shows them."""

import math

from kmp.utils import as_power

MISSING, UNKNOWN = "-", "unknown"


def share(value: float | None) -> str:
    """Returns a share in percent. Small and large shares are not rounded to 0 % or 100 %."""
    if value is None or math.isnan(value):
        return MISSING
    if 0 < value < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= value < 1 else f"{value:.1%}".replace(".0%", "%")


def number(value: float | None) -> str:
    """Returns a number with three significant digits."""
    return MISSING if value is None else f"{value:.3g}"


def scale(value: float) -> str:
    """Returns a loss scale, as a power of two if it is one."""
    return UNKNOWN if math.isnan(value) else as_power(value)


def code_lines(change: str) -> tuple[str, ...]:
    """Returns lines of code, with a trailing comment as a line of its own, so that they fit a narrow screen."""
    return tuple(change.replace("  # ", "\n# ").splitlines())
