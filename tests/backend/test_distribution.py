import pytest

from kmp.backend import distribution


@pytest.mark.parametrize("number", [0, 5, 4097, 2**24 + 1, 2**63 - 1, -1])
def test_gathered_numbers_are_exact(two_replicas, monkeypatch, number):
    monkeypatch.setattr(distribution, "has_several_workers", lambda strategy: True)
    assert distribution.gather_from_replicas(two_replicas, number) == [number, number]


def test_single_worker_gathers_its_own_number(two_replicas):
    assert distribution.gather_from_replicas(two_replicas, 7) == [7]
