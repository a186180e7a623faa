"""The method of "Actor Critic Method", https://keras.io/examples/rl/actor_critic_cartpole/."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers

DISCOUNT, EPISODES, STEPS = 0.99, 20, 60


class CartPole:
    """A pole on a cart: the state is the cart's position and speed, and the pole's."""

    def __init__(self):
        self.random = np.random.default_rng(0)

    def reset(self):
        self.state = self.random.uniform(-0.05, 0.05, 4)
        return self.state

    def step(self, action):
        """Moves the cart for 0.02 seconds; returns the state and whether the pole has fallen."""
        position, speed, angle, turn = self.state
        sine, cosine = math.sin(angle), math.cos(angle)
        push = ((10 if action else -10) + 0.05 * turn**2 * sine) / 1.1
        torque = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        change = np.array([speed, push - 0.05 * torque * cosine / 1.1, turn, torque])
        self.state = np.array([position, speed, angle, turn]) + 0.02 * change
        return self.state, abs(self.state[2]) > 0.21


def discounted(rewards):
    """Returns the normalized sums of the rewards that follow each step."""
    returns = []
    for reward in reversed(rewards):
        returns.insert(0, reward + DISCOUNT * (returns[0] if returns else 0))
    returns = np.array(returns)
    return ((returns - returns.mean()) / (returns.std() + 1e-7)).tolist()


def play(model, environment):
    """Plays an episode; returns log probabilities of the actions, the critic's values, rewards."""
    log_probabilities, values, rewards = [], [], []
    state, fallen = environment.reset(), False
    while not fallen and len(rewards) < STEPS:
        probabilities, value = model(tf.expand_dims(tf.convert_to_tensor(state), 0))
        action = np.random.choice(2, p=np.squeeze(probabilities))
        log_probabilities.append(tf.math.log(probabilities[0, action]))
        values.append(value[0, 0])
        state, fallen = environment.step(action)
        rewards.append(1.0)
    return log_probabilities, values, rewards


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((4,))
    hidden = layers.Dense(32, activation="relu")(inputs)
    actor, critic = layers.Dense(2, activation="softmax"), layers.Dense(1)
    model = keras.Model(inputs, [actor(hidden), critic(hidden)])
    model.compile(keras.optimizers.Adam(1e-2))
    optimizer, huber, environment = model.optimizer, keras.losses.Huber(), CartPole()

    monitors = keras.callbacks.CallbackList(list(callbacks), model=model)
    monitors.on_train_begin()
    losses = []
    for episode in range(EPISODES):
        monitors.on_epoch_begin(episode)
        monitors.on_train_batch_begin(0)
        with tf.GradientTape() as tape:
            log_probabilities, values, rewards = play(model, environment)
            loss = 0
            for log_probability, value, target in zip(
                log_probabilities, values, discounted(rewards), strict=True
            ):
                loss += -log_probability * (target - value)
                loss += huber(tf.expand_dims(value, 0), tf.expand_dims(target, 0))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss) / len(rewards))
        monitors.on_train_batch_end(0, {"loss": losses[-1]})
        monitors.on_epoch_end(episode, {"loss": losses[-1]})
    monitors.on_train_end()
    return {"loss": losses}
