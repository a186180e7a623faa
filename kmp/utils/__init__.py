"""Argument validation, atomic files, float formats, names and messages, for all packages.

Does not import Keras.
"""
