"""Programs with the methods of published examples train under kmp as in float32.

They have own layers, losses, loops and `train_step`s, in which float16 meets float32, and none has
a cast for kmp. A `train_step` calls `scale_loss`, as with Keras' own optimizers.
"""

import contextlib
import importlib

import numpy as np
import pytest

import kmp

# A loss of each program; how far its mean of the last three epochs may be from the one in float32:
# about what it differs by between three seeds in float32, because random operations of a graph
# draw other numbers if the graph has other operations; and the warning of kmp that is due, if any.
PROGRAMS = [
    ("actor_critic", "loss", 0.25, "the softmax of output layer"),
    ("ddim", "noise_loss", 0.02, "The loss was computed in float16"),
    ("decision_forest", "loss", 0.02, None),
    ("metric_learning", "loss", 0.09, None),
    # The last sample of a ray has a length of 1e10: gradients up to 1.7e7, which ReLU then masks.
    ("nerf", "loss", 0.01, "kmp set the layer .* to float32"),
    ("nnclr", "contrastive_loss", 0.2, None),
    ("real_nvp", "loss", 0.05, None),
    ("speech_transformer", "loss", 0.15, None),
    ("traffic_forecasting", "loss", 0.013, None),
    ("vq_vae", "reconstruction_loss", 0.1, None),
    ("wgan_gp", "critic_loss", 1.7, "The loss was computed in float16"),
]


# The longest ones; the others have an own loop, an own step, a repair, and each warning.
LONGEST = ("nnclr", "speech_transformer", "vq_vae", "wgan_gp")


@pytest.mark.parametrize(
    ("program", "loss", "tolerance", "warning"),
    [
        pytest.param(
            *row,
            id=row[0],
            marks=pytest.mark.exhaustive if row[0] in LONGEST else pytest.mark.slow,
        )
        for row in PROGRAMS
    ],
)
def test_program_trains_as_in_float32(program, loss, tolerance, warning):
    train = importlib.import_module(program).train
    expected = train()
    warns = pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext()
    with kmp.enable("mixed_float16"), warns:
        callbacks = kmp.callbacks.defaults()
        history = train(callbacks)
    for name in expected:
        assert np.isfinite(history[name]).all(), name
    last = np.mean(history[loss][-3:])
    assert last == pytest.approx(np.mean(expected[loss][-3:]), abs=tolerance)
    assert last < history[loss][0]
    runs = callbacks[0].runs.values()
    assert max(run.last("overflow_count") / run.last("step") for run in runs) < 0.5
