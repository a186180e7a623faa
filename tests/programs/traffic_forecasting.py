"""The method of "Traffic forecasting using graph neural networks and LSTM".

https://keras.io/examples/timeseries/timeseries_traffic_forecasting/
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

ROADS, PAST, AHEAD = 6, 12, 3


class GraphConvolution(layers.Layer):
    """Joins the features of each road with the mean of its neighbors', both times a weight.

    The weight is a `tf.Variable`, which Keras does not cast to the compute dtype.
    """

    def __init__(self, units, edges):
        super().__init__()
        self.nodes, self.neighbors = edges
        self.weight = tf.Variable(keras.initializers.GlorotUniform()((1, units)), trainable=True)

    def call(self, features):
        own = tf.matmul(features, self.weight)
        neighbors = tf.gather(features, self.neighbors)
        means = tf.math.unsorted_segment_mean(neighbors, self.nodes, num_segments=ROADS)
        return tf.concat([own, tf.matmul(means, self.weight)], axis=-1)


class Forecast(layers.Layer):
    """Maps (batch, time, roads, 1) to (batch, steps ahead, roads)."""

    def __init__(self, edges):
        super().__init__()
        self.convolution = GraphConvolution(8, edges)
        self.lstm = layers.LSTM(16, activation="relu")
        self.dense = layers.Dense(AHEAD)

    def call(self, inputs):
        by_road = self.convolution(tf.transpose(inputs, [2, 0, 1, 3]))
        roads, batch, time, units = tf.unstack(tf.shape(by_road))
        states = self.lstm(tf.reshape(by_road, (roads * batch, time, units)))
        speeds = tf.reshape(self.dense(states), (roads, batch, AHEAD))
        return tf.transpose(speeds, [1, 2, 0])


def speeds_of_roads(count=400):
    random = np.random.default_rng(0)
    phases = np.linspace(0, 2, ROADS)
    waves = np.sin(np.arange(count)[:, None] / 15 + phases)
    return (waves + 0.1 * random.normal(size=(count, ROADS))).astype("float32")


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    speeds = speeds_of_roads()
    past = keras.utils.timeseries_dataset_from_array(
        speeds[:-AHEAD, :, None], None, sequence_length=PAST, batch_size=32
    )
    future = keras.utils.timeseries_dataset_from_array(
        speeds[PAST:], None, sequence_length=AHEAD, batch_size=32
    )
    nodes = np.arange(ROADS)
    edges = np.tile(nodes, 2).tolist(), np.concatenate([nodes - 1, nodes - 5]).tolist()
    edges = edges[0], [road % ROADS for road in edges[1]]

    inputs = keras.Input((PAST, ROADS, 1))
    model = keras.Model(inputs, Forecast(edges)(inputs))
    model.compile(keras.optimizers.RMSprop(2e-3), keras.losses.MeanSquaredError())
    data = tf.data.Dataset.zip((past, future)).cache()
    return model.fit(data, epochs=8, verbose=0, shuffle=False, callbacks=callbacks).history
