"""Names of variables and runs: selecting names by pattern, making names unique."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from kmp.utils.escaping import printable

_MOST_LISTED = 20


def matching_indices(patterns: str | Sequence[str], names: Sequence[str]) -> list[int]:
    """Returns the indices of the names that equal or match at least one pattern, in order.

    Args:
        patterns: A name or shell-style pattern (`*`, `?`, `[...]`, case-sensitive), or several.
        names: The names to select from.

    Raises:
        ValueError: If a pattern matches no name. The message lists the names.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    exact, known, wildcards = set(patterns), set(names), [pattern for pattern in patterns if _is_wildcard(pattern)]
    for pattern in patterns:
        if pattern not in known and not (_is_wildcard(pattern) and any(fnmatchcase(name, pattern) for name in names)):
            raise ValueError(f"No variable matches {pattern!r}. The names are: {listed(names)}")
    return [
        index
        for index, name in enumerate(names)
        if name in exact or any(fnmatchcase(name, pattern) for pattern in wildcards)
    ]


def listed(names: Sequence[str]) -> str:
    """Returns names as a list for a message. Of many names, only the first are listed."""
    shown = ", ".join(printable(name) for name in names[:_MOST_LISTED]) or "(none)"
    omitted = len(names) - _MOST_LISTED
    return f"{shown} and {omitted} more" if omitted > 0 else shown


def unique_names(names: Iterable[str]) -> list[str]:
    """Returns the names, with `#2`, `#3`, ... appended to each that equals an earlier result.

    A result depends only on the names before it.
    """
    counts: Counter[str] = Counter()
    results: dict[str, None] = {}  # ordered
    for name in names:
        unique = name
        while unique in results:
            counts[name] += 1
            unique = f"{name}#{counts[name] + 1}"
        results[unique] = None
    return list(results)


def _is_wildcard(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")
