"""The method of "WGAN-GP overriding Model.train_step".

https://keras.io/examples/generative/wgan_gp/
"""

import keras
import tensorflow as tf
from keras import layers
from synthetic import blobs

LATENT = 8


def critic():
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(8, 5, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(16, 5, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def generator():
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(4 * 4 * 16, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Reshape((4, 4, 16)),
            layers.UpSampling2D(),
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.UpSampling2D(),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ]
    )


class WassersteinGAN(keras.Model):
    def __init__(self, critic_steps=2, penalty_weight=10.0):
        super().__init__()
        self.critic, self.generator = critic(), generator()
        self.critic_steps, self.penalty_weight = critic_steps, penalty_weight

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer

    def penalty(self, real, fake):
        """How far the norm of the critic's gradient is from 1, between real and fake pictures."""
        share = tf.random.normal([tf.shape(real)[0], 1, 1, 1])
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.critic(between, training=True)
        gradient = tape.gradient(score, between)
        norms = tf.sqrt(tf.reduce_sum(tf.square(gradient), axis=[1, 2, 3]))
        return tf.reduce_mean((norms - 1.0) ** 2)

    def train_step(self, real):
        shape = (tf.shape(real)[0], LATENT)
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(tf.random.normal(shape), training=True)
                fake_score = tf.reduce_mean(self.critic(fake, training=True))
                real_score = tf.reduce_mean(self.critic(real, training=True))
                penalty = self.penalty_weight * self.penalty(real, fake)
                critic_loss = fake_score - real_score + penalty
                scaled = self.critic_optimizer.scale_loss(critic_loss)
            weights = self.critic.trainable_variables
            gradients = tape.gradient(scaled, weights)
            self.critic_optimizer.apply_gradients(zip(gradients, weights, strict=True))

        with tf.GradientTape() as tape:
            fake = self.generator(tf.random.normal(shape), training=True)
            generator_loss = -tf.reduce_mean(self.critic(fake, training=True))
            scaled = self.generator_optimizer.scale_loss(generator_loss)
        weights = self.generator.trainable_variables
        gradients = tape.gradient(scaled, weights)
        self.generator_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    model = WassersteinGAN()
    model.compile(
        critic_optimizer=keras.optimizers.Adam(5e-4, beta_1=0.5, beta_2=0.9),
        generator_optimizer=keras.optimizers.Adam(5e-4, beta_1=0.5, beta_2=0.9),
    )
    pictures = 2 * blobs(128) - 1
    return model.fit(pictures, batch_size=16, epochs=6, verbose=0, callbacks=callbacks).history
