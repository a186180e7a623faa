"""Names of variables and runs: selected by pattern, made unique, and safe to show."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_MOST_LISTED = 20
# Invisible characters that Python counts as printable. Source: Unicode's property
# Default_Ignorable_Code_Point.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def matching_indices(patterns: str | Sequence[str], names: Sequence[str]) -> list[int]:
    """Returns the indices of the names that equal or match a pattern, in order.

    A pattern has `*`, `?` and `[...]`; upper and lower case differ.

    Raises:
        ValueError: If a pattern matches no name. The message lists the names.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    matched: set[int] = set()
    for pattern in patterns:
        # A name may contain wildcards too.
        indices = [
            index
            for index, name in enumerate(names)
            if name == pattern or fnmatchcase(name, pattern)
        ]
        if not indices:
            raise ValueError(f"No variable matches {pattern!r}. The names are: {listed(names)}")
        matched.update(indices)
    return sorted(matched)


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


def path_and_parents(path: str) -> list[str]:
    """Returns a path and the paths that contain it, the longest first.

    Example:
    >>> from kmp.utils.names import path_and_parents
    >>> path_and_parents("model/block/dense")
    ['model/block/dense', 'model/block', 'model']
    """
    names = path.split("/")
    return ["/".join(names[:count]) for count in range(len(names), 0, -1)]


def listed(names: Sequence[str]) -> str:
    """Returns names as a list for a message. Of many names, only the first are listed."""
    shown = ", ".join(map(printable, names[:_MOST_LISTED])) or "(none)"
    omitted = len(names) - _MOST_LISTED
    return f"{shown} and {omitted} more" if omitted > 0 else shown


def printable(text: str) -> str:
    r"""Returns a text with invisible characters escaped, such as `\x1b` or `\u202e`.

    These are control characters, escape sequences of terminals, direction marks, characters of zero
    width, line breaks, spaces other than the ASCII space, and lone surrogates, which no file can
    hold.

    Example:
    >>> from kmp.utils.names import printable
    >>> printable("dense\x1b[2J/kernel"), printable("dense/kernel")
    ('dense\\x1b[2J/kernel', 'dense/kernel')
    """

    def is_visible(part: str) -> bool:
        return part.isprintable() and not _INVISIBLE.search(part)

    if is_visible(text):
        return text
    return "".join(
        each if is_visible(each) else each.encode("unicode_escape").decode("ascii") for each in text
    )
