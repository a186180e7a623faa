"""The model, data and options that are tested in every mode and strategy."""

import keras
import numpy as np

import kmp

# Options of Keras' optimizers that exclude each other, with one or more of the others.
OPTIONS = {
    "clipnorm, decay": {"clipnorm": 0.5, "weight_decay": 0.01},
    "clipvalue, fixed scale": {"clipvalue": 0.5, "loss_scale": 1024.0},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "ema, accumulation": {
        "use_ema": True,
        "ema_overwrite_frequency": 2,
        "gradient_accumulation_steps": 2,
    },
}
BATCHES, CORRUPT_BATCHES = 6, (2, 3)


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCHES * 8, 4)).astype("float32")
    y = (x.sum(1) > 0).astype("int32")
    words = random.integers(0, 20, len(x)).astype("int32")
    for batch in CORRUPT_BATCHES:
        x[batch * 8 + 5] = np.nan
    return {"x": x, "words": words}, y


def make_model(option, compiles_step="auto", **mode):
    """Returns a compiled model with an Embedding and Keras' BatchNormalization.

    The gradients of the Embedding are sparse. `compiles_step` is `jit_compile` of the optimizer,
    and `mode` are arguments of `compile`.
    """
    x, words = keras.Input((4,), name="x"), keras.Input((), dtype="int32", name="words")
    joined = keras.layers.Concatenate()([x, keras.layers.Embedding(20, 4)(words)])
    hidden = keras.layers.BatchNormalization()(joined)
    model = keras.Model(
        {"x": x, "words": words}, kmp.layers.Softmax()(keras.layers.Dense(2)(hidden))
    )
    settings = OPTIONS[option]
    scale = (
        {"loss_scale": settings["loss_scale"]}
        if "loss_scale" in settings
        else {"initial_scale": 1024.0}
    )
    inner = keras.optimizers.Adam(
        **{name: value for name, value in settings.items() if name != "loss_scale"}
    )
    optimizer = kmp.LossScaleOptimizer(inner, jit_compile=compiles_step, **scale)
    model.compile(optimizer, "sparse_categorical_crossentropy", **mode)
    return model
