"""The method of "3D volumetric rendering with NeRF", https://keras.io/examples/vision/nerf/."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

SIZE, SAMPLES, FREQUENCIES, BATCH = 8, 8, 8, 2


def encode(points):
    """Appends sines and cosines of a point's coordinates."""
    angles = [2.0**power * points for power in range(FREQUENCIES)]
    waves = [wave(angle) for angle in angles for wave in (tf.sin, tf.cos)]
    return tf.concat([points, *waves], axis=-1)


def sample_rays(pose):
    """Returns encoded points on the ray of each pixel, and their distances from the camera."""
    columns, rows = tf.meshgrid(tf.range(SIZE, dtype=tf.float32), tf.range(SIZE, dtype=tf.float32))
    x, y = (columns - SIZE / 2) / SIZE, (rows - SIZE / 2) / SIZE
    directions = tf.stack([x, -y, -tf.ones_like(x)], axis=-1)
    directions = tf.einsum("hwc,rc->hwr", directions, pose[:3, :3])
    near, far = 2.0, 6.0
    distances = tf.linspace(near, far, SAMPLES)
    distances += tf.random.uniform((SIZE, SIZE, SAMPLES)) * (far - near) / SAMPLES
    points = pose[:3, 3] + directions[..., None, :] * distances[..., None]
    return encode(tf.reshape(points, (-1, 3))), distances


def field():
    """A model of color and density from encoded points, with one skip connection."""
    inputs = keras.Input((SIZE * SIZE * SAMPLES, 3 + 6 * FREQUENCIES))
    x = inputs
    for number in range(5):
        x = layers.Dense(32, activation="relu")(x)
        if number == 2:
            x = layers.concatenate([x, inputs])
    return keras.Model(inputs, layers.Dense(4)(x))


def render(model, points, distances):
    """Returns pictures and depth maps: sums of color and distance along each ray."""
    outputs = tf.reshape(model(points), (BATCH, SIZE, SIZE, SAMPLES, 4))
    colors, densities = tf.sigmoid(outputs[..., :3]), tf.nn.relu(outputs[..., 3])
    steps = distances[..., 1:] - distances[..., :-1]
    beyond = tf.broadcast_to([1e10], (BATCH, SIZE, SIZE, 1))
    steps = tf.concat([steps, beyond], axis=-1)
    opacity = 1.0 - tf.exp(-densities * steps)
    light = tf.math.cumprod(1.0 - opacity + 1e-10, axis=-1, exclusive=True)
    weights = opacity * light
    pictures = tf.reduce_sum(weights[..., None] * colors, axis=-2)
    return pictures, tf.reduce_sum(weights * distances, axis=-1)


class NeRF(keras.Model):
    def __init__(self):
        super().__init__()
        self.field = field()

    def compile(self, optimizer, loss_function):
        super().compile()
        self.optimizer = optimizer
        self.loss_function = loss_function
        self.mean_loss = keras.metrics.Mean(name="loss")
        self.noise_ratio = keras.metrics.Mean(name="psnr")

    @property
    def metrics(self):
        return [self.mean_loss, self.noise_ratio]

    def train_step(self, data):
        pictures, (points, distances) = data
        with tf.GradientTape() as tape:
            rendered, _ = render(self.field, points, distances)
            loss = self.loss_function(pictures, rendered)
            scaled = self.optimizer.scale_loss(loss)
        weights = self.field.trainable_variables
        gradients = tape.gradient(scaled, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.mean_loss.update_state(loss)
        self.noise_ratio.update_state(tf.image.psnr(pictures, rendered, max_val=1.0))
        return {metric.name: metric.result() for metric in self.metrics}


def views(count):
    """Returns pictures of a colored ball and the poses of the cameras around it."""
    angles = np.linspace(0, 2 * np.pi, count, endpoint=False)
    sines, cosines = np.sin(angles), np.cos(angles)
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, 0, 0], poses[:, 0, 2], poses[:, 0, 3] = cosines, sines, 4 * sines
    poses[:, 2, 0], poses[:, 2, 2], poses[:, 2, 3] = -sines, cosines, 4 * cosines
    y, x = np.mgrid[-1 : 1 : 1j * SIZE, -1 : 1 : 1j * SIZE]
    colors = np.stack([0.5 + 0.5 * cosines, 0.5 + 0.5 * sines, 0.7 + 0 * sines], axis=-1)
    pictures = np.exp(-3 * (x**2 + y**2))[..., None] * colors[:, None, None]
    return pictures.astype("float32"), poses.astype("float32")


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    pictures, poses = map(tf.data.Dataset.from_tensor_slices, views(16))
    data = tf.data.Dataset.zip((pictures, poses.map(sample_rays))).batch(BATCH, drop_remainder=True)
    model = NeRF()
    model.compile(keras.optimizers.Adam(2e-3), keras.losses.MeanSquaredError())
    return model.fit(data, epochs=15, verbose=0, shuffle=False, callbacks=callbacks).history
