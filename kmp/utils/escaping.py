"""Makes text from a file or a model safe to show."""

import re

# Invisible characters that Python counts as printable. Source: Unicode's property Default_Ignorable_Code_Point.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def printable(text: str) -> str:
    r"""Returns a text with every character escaped that a reader cannot see, such as `\x1b` or `\u202e`.

    These are control characters, escape sequences of terminals, direction marks, characters of zero width, line breaks,
    spaces other than the ASCII space, and lone surrogates, which no file can hold.

    Example:
    >>> printable("dense\x1b[2J/kernel"), printable("dense/kernel")
    ('dense\\x1b[2J/kernel', 'dense/kernel')
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(character if _is_visible(character) else _escaped(character) for character in text)


def _is_visible(character: str) -> bool:
    return character.isprintable() and not _INVISIBLE.match(character)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
