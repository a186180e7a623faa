import pytest

from kmp.utils.names import matching_indices, printable, unique_names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b", "a", "a"], ["a", "b", "a#2", "a#3"]),
        (["a", "a", "a#2"], ["a", "a#2", "a#2#2"]),
        (["a#2", "a", "a"], ["a#2", "a", "a#3"]),
        (["a", "a#2", "a", "a#2"], ["a", "a#2", "a#3", "a#2#2"]),
    ],
)
def test_repeated_names_get_a_number_that_no_name_before_them_has(names, expected):
    assert unique_names(names) == expected
    assert unique_names(expected) == expected
    assert [unique_names(names[:count])[-1] for count in range(1, len(names) + 1)] == expected


def test_pattern_without_a_match_raises_with_the_first_names_in_printable_form():
    names = ["a\x1b[2J", *(f"v{index}" for index in range(100))]
    shown = r"a\\x1b\[2J, v0, v1, .* v18 and 81 more$"
    with pytest.raises(ValueError, match=f"No variable matches 'dense'. The names are: {shown}"):
        matching_indices("dense", names)
    assert matching_indices("a[0]", ["a[0]", "a0", "a1"]) == [0, 1]  # as it is, and as a pattern


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
