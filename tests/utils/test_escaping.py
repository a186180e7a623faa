import pytest

from kmp.utils import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model/dense_1/kernel", "model/dense_1/kernel"),
        ("\u5bc6\u96c6/\u00fcber \U0001f600", "\u5bc6\u96c6/\u00fcber \U0001f600"),
        ("\x1b]0;owned\x1b\\\x1b[2J", "\\x1b]0;owned\\x1b\\\\x1b[2J"),
        ("a\nb\r\tc\0", r"a\nb\r\tc\x00"),
        ("user\u202egnp.exe", r"user\u202egnp.exe"),
        ("a\u200bb\ufeffc\u2028", r"a\u200bb\ufeffc\u2028"),
        ("a\u3164b\ufe0fc\u034f\U000e0100", r"a\u3164b\ufe0fc\u034f\U000e0100"),
        ("a\xa0b\ud800", r"a\xa0b\ud800"),
    ],
)
def test_characters_that_a_reader_cannot_see_are_escaped(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown
