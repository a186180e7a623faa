"""Trains the programs for bfloat16 and float32 without kmp: what is known of them is true."""

import pytest
from running import is_cured, scores_in_keras
from truth import BFLOAT16, SUSPICIOUS, TRUTHS

# A fault may cause a warning of NumPy.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", TRUTHS)
def test_fault_ruins_the_training_and_the_known_change_cures_it(name, tmp_path):
    truth = TRUTHS[name]
    scores = scores_in_keras(name, tmp_path, truth.cure)
    is_of_bfloat16 = name in BFLOAT16
    assert is_cured(scores.float32, truth.case.sound) == is_of_bfloat16, scores
    assert not is_cured(scores.as_written, truth.case.sound), scores
    assert is_cured(scores.cured, truth.case.sound), scores


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_healthy_program_trains_as_in_float32(name, tmp_path):
    scores = scores_in_keras(name, tmp_path, cure=())
    assert is_cured(scores.as_written, scores.float32), scores
