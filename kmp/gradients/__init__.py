"""Gradients on the device: unscaling, flags, exponents, norms, and the effects of updates."""
