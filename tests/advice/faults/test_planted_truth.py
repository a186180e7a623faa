"""Trains the programs of `benchmarks/float16_faults` in Keras: what is known of them is true.

That changes with the programs, Keras and TensorFlow, and not with kmp.
"""

import pytest
from float16_faults.editing import edited
from float16_faults.in_keras import in_float32
from float16_faults.running import score_of, source_of
from float16_faults.truth import (
    BFLOAT16,
    FAULTS,
    FLOAT32,
    HEALTHY_BFLOAT16,
    HEALTHY_FLOAT32,
    is_sound,
)

# A fault may cause a warning of NumPy.
pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]


def scores_in_keras(name, folder):
    """Returns the scores of a program in float32, and as it is written."""
    source = source_of(name, uses_kmp=False)
    return (
        score_of(name, in_float32(source), folder / "float32"),
        score_of(name, source, folder / "as_written"),
    )


@pytest.mark.parametrize("name", BFLOAT16 | FLOAT32)
def test_fault_ruins_the_training_and_the_known_change_cures_it(name, tmp_path):
    fault = FAULTS[name]
    float32, as_written = scores_in_keras(name, tmp_path)
    assert is_sound(float32, fault.sound) == (name in BFLOAT16), float32
    assert not is_sound(as_written, fault.sound), as_written
    changed = edited(source_of(name, uses_kmp=False), fault.cure)
    cured = score_of(name, changed, tmp_path / "cured")
    assert is_sound(cured, fault.sound), cured


@pytest.mark.parametrize("name", HEALTHY_BFLOAT16 | HEALTHY_FLOAT32)
def test_healthy_program_trains_as_in_float32(name, tmp_path):
    float32, as_written = scores_in_keras(name, tmp_path)
    assert is_sound(as_written, float32), (as_written, float32)
