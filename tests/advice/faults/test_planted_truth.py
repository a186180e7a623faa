"""Trains the programs for bfloat16 and float32 without kmp: what is known of them is true."""

import pytest
from running import is_cured, scores_in_keras
from truth import BFLOAT16, SUSPICIOUS

# A fault may cause a warning of NumPy.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", BFLOAT16)
def test_fault_is_of_bfloat16_alone_and_the_known_change_cures_it(name, tmp_path):
    truth = BFLOAT16[name]
    scores = scores_in_keras(name, tmp_path, truth.cure)
    assert is_cured(scores.float32, truth.case.sound), scores
    assert not is_cured(scores.as_written, truth.case.sound), scores
    assert is_cured(scores.cured, truth.case.sound), scores


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_healthy_program_trains_as_in_float32(name, tmp_path):
    scores = scores_in_keras(name, tmp_path, cure=())
    assert is_cured(scores.as_written, scores.float32), scores
