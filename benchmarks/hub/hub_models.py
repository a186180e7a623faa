"""Builds the models of `hub_models.yaml`."""

import importlib
from pathlib import Path

import keras_hub
import numpy as np
import yaml


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_constructor(
    "!tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True))
)
_Loader.add_constructor(
    "!array", lambda loader, node: np.array(loader.construct_sequence(node, deep=True))
)
_FILE = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _Loader)

# Arguments by the name of the model: its class and, after a space, a variant.
MODELS = _FILE["models"] | {
    name: group["arguments"] for group in _FILE["tasks"] for name in group["names"]
}


def build(name):
    """Returns a new model with random weights."""
    class_name, _, variant = name.partition(" ")
    arguments = {"class": class_name, **MODELS[name]}
    backbone_class = getattr(_class_of(class_name), "backbone_cls", None)
    if backbone_class is None:
        return _built(arguments)
    backbone = arguments.get("backbone", f"{backbone_class.__name__} {variant}".strip())
    backbone = build(backbone) if isinstance(backbone, str) else _built(backbone)
    return _built({"preprocessor": None, **arguments, "backbone": backbone})


def _class_of(name):
    module, _, class_name = name.rpartition(".")
    if module:
        return getattr(importlib.import_module(module), class_name)
    return getattr(keras_hub.models, name, None) or getattr(keras_hub.layers, name)


def _built(value):
    """Returns a value of the file with the parts of the model in place of their descriptions."""
    if not isinstance(value, dict):
        return value
    options = {key: _built(item) for key, item in value.items()}
    for key, item in options.pop("sides", {}).items():
        options |= {f"encoder_{key}": item, f"decoder_{key}": item}
    if "architecture" in options:
        builder = importlib.import_module("keras_hub.src.models.mobilenetv5.mobilenetv5_builder")
        options |= builder.convert_arch_def_to_stackwise(options.pop("architecture"))
    if "class" not in options:
        return options
    is_config, arguments = options.pop("config", False), options.pop("arguments", ())
    part = _class_of(options.pop("class"))(*arguments, **options)
    return part.get_config() if is_config else part
