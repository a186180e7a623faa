"""Dynamic loss scaling in plain Python, from the published papers, without kmp."""

import struct


def as_float32(x):
    return struct.unpack("f", struct.pack("f", x))[0] if abs(x) < 3.4e38 else float("inf")


class ReferenceRule:
    def __init__(
        self,
        initial_scale,
        growth_interval=2000,
        growth_factor=2.0,
        backoff_factor=0.5,
        hysteresis=1,
        min_scale=2.0**-14,
        max_scale=2.0**127,
    ):
        self.scale, self.clean, self.in_a_row = initial_scale, 0, 0
        self.interval, self.growth, self.backoff = growth_interval, growth_factor, backoff_factor
        self.hysteresis, self.low, self.high = hysteresis, min_scale, max_scale

    def step(self, overflowed, loss_was_finite=True):
        if overflowed:
            self.in_a_row += 1
            if loss_was_finite:
                self.clean = 0
                if self.in_a_row >= self.hysteresis:
                    self.scale = max(as_float32(self.scale * as_float32(self.backoff)), self.low)
        else:
            self.in_a_row = 0
            self.clean += 1
            if self.clean == self.interval:
                self.clean = 0
                self.scale = min(as_float32(self.scale * as_float32(self.growth)), self.high)
        return self.scale, self.clean, self.in_a_row
