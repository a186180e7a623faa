import pytest

from kmp.utils import unique_names


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
