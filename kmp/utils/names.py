"""Names of variables and runs: selecting names by pattern, making names unique."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matching_indices(patterns: str | Sequence[str], names: Sequence[str]) -> list[int]:
    """Returns the indices of the names that equal or match at least one pattern, in order.

    Args:
        patterns: A name or shell-style pattern (`*`, `?`, `[...]`, case-sensitive), or several.
        names: The names to select from.

    Raises:
        ValueError: If a pattern matches no name. The message lists the names.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(f"No variable matches {pattern!r}. The names are: {', '.join(names) or '(none)'}")
    return [index for index, name in enumerate(names) if any(_matches(name, pattern) for pattern in patterns)]


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


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
