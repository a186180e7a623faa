"""Programs with the methods of published examples train under kmp as in float32.

They have own layers, losses, loops and `train_step`s, in which float16 meets float32, and none has
a cast for kmp. A `train_step` calls `scale_loss`, as with Keras' own optimizers.
"""

import importlib

import numpy as np
import pytest

import kmp

# A loss of each program, and how far its mean of the last three epochs may be from the one in
# float32: about what it differs by between three seeds in float32, because random operations of a
# graph draw other numbers if the graph has other operations.
LOSSES = [
    ("actor_critic", "loss", 0.4),
    ("ddim", "noise_loss", 0.02),
    ("decision_forest", "loss", 0.02),
    ("metric_learning", "loss", 0.09),
    ("nerf", "loss", 0.01),
    ("nnclr", "contrastive_loss", 0.2),
    ("real_nvp", "loss", 0.05),
    ("speech_transformer", "loss", 0.25),
    ("traffic_forecasting", "loss", 0.013),
    ("vq_vae", "reconstruction_loss", 0.1),
    ("wgan_gp", "critic_loss", 1.7),
]


@pytest.mark.slow
# What kmp says of the actor's softmax, and of the absolute error of the diffusion model.
@pytest.mark.filterwarnings("ignore:.* the softmax of output layer")
@pytest.mark.filterwarnings("ignore:The loss was computed in float16")
@pytest.mark.parametrize(("program", "loss", "tolerance"), LOSSES)
def test_program_trains_as_in_float32(program, loss, tolerance):
    train = importlib.import_module(program).train
    expected = train()
    with kmp.enable("mixed_float16"):
        callbacks = kmp.callbacks.defaults()
        history = train(callbacks)
    for name in expected:
        assert np.isfinite(history[name]).all(), name
    last = np.mean(history[loss][-3:])
    assert last == pytest.approx(np.mean(expected[loss][-3:]), abs=tolerance)
    assert last < history[loss][0]
    run = callbacks[0].run
    assert run.last("overflow_count") < run.last("step") / 2
