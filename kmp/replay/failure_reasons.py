"""Why something is not possible in a replay, in a few words."""

import re
import textwrap

import tensorflow as tf

from kmp.utils.float_formats import DTYPES_16_BIT

_MOST_CHARACTERS = 200
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*m")
# Keras adds the layer before an error of its call, and the arguments after it.
_OF_LAYER = re.compile(
    r"Exception encountered when calling (?P<layer>.+?)\.call\(\)\.(?P<message>.*?)"
    r"(?:Arguments received by|\Z)",
    re.DOTALL,
)
_NAME_OF_OPERATION = re.compile(r"\{\{function_node \S*\}\} ?|\[Op:\w*\]|\bname: *(?=\s|$)")
_WITHOUT_KERNEL = re.compile(r"\{\{node .*?\}\} = (?P<operation>\w+)\[.*?DT_(?P<dtype>\w+)")
_UNREGISTERED = re.compile(
    r"No OpKernel was registered to support Op '(?P<operation>\w+)'.*?DT_(?P<dtype>\w+)", re.DOTALL
)
_DTYPES = dict(zip(("BFLOAT16", "HALF"), sorted(DTYPES_16_BIT), strict=True))

# What autograph writes before a message: the lines of a traceback, and the class of the error.
_IN_USER_CODE = re.compile(r"in user code:\n.*?\n    \w+: (?P<message>.*)", re.DOTALL)


def reason_of(error: Exception) -> str:
    """Returns why an error was raised, without control codes and tensors, on one line."""
    text = _TERMINAL_CODE.sub("", str(error))
    if (found := _IN_USER_CODE.match(text)) is not None:
        text = found["message"]
    layer = ""
    while (found := _OF_LAYER.search(text)) is not None:
        layer, text = found["layer"], found["message"]
    without_kernel = _WITHOUT_KERNEL.search(text) or _UNREGISTERED.search(text)
    if isinstance(error, tf.errors.NotFoundError | tf.errors.InvalidArgumentError) and (
        without_kernel
    ):
        dtype = _DTYPES.get(without_kernel["dtype"], without_kernel["dtype"].lower())
        return (
            f"TensorFlow has no kernel of {without_kernel['operation']} for {dtype} outside of XLA"
            " on this device"
        )
    message = _NAME_OF_OPERATION.sub("", text)
    name = f"{type(error).__name__} in {layer}" if layer else type(error).__name__
    message = textwrap.shorten(message, _MOST_CHARACTERS, placeholder=" ...").rstrip(" .:")
    return f"{name}: {message}" if message else name
