"""Names of variables and runs: choosing by pattern, making them unique."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matching(patterns: str | Sequence[str], names: Sequence[str]) -> list[int]:
    """Returns the places in `names` of those that are, or match, one of the patterns, in order.

    Raises:
        ValueError: If a pattern matches none; the message lists the names.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(f"No variable matches {pattern!r}. The names are: {', '.join(names) or '(none)'}")
    return [index for index, name in enumerate(names) if any(_matches(name, pattern) for pattern in patterns)]


def unique(names: Iterable[str]) -> list[str]:
    """Returns the names; one that was there before gets a number."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
