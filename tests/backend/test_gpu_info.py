import logging
import re

import pytest
import tensorflow as tf

import kmp
from kmp.backend.gpu_info import Gpu, Hardware

H200, T4, P100 = Gpu("H200", (9, 0)), Gpu("T4", (7, 5)), Gpu("P100", (6, 0))


def test_hardware_is_what_tensorflow_sees(monkeypatch):
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [device] if kind == "GPU" else [])
    details = {"device_name": "NVIDIA H200", "compute_capability": (9, 0)}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details)
    assert kmp.hardware() == Hardware((Gpu("NVIDIA H200", (9, 0)),))


@pytest.mark.parametrize(
    ("gpus", "tensor_cores", "bfloat16"),
    [
        ((), False, False),
        ((P100,), False, False),
        ((T4,), True, False),
        ((H200,), True, True),
        ((H200, P100), False, False),
    ],
    ids=str,
)
def test_features_need_every_gpu_to_have_them(gpus, tensor_cores, bfloat16):
    found = Hardware(gpus)
    assert (found.tensor_cores, found.bfloat16) == (tensor_cores, bfloat16)


@pytest.mark.parametrize(
    ("gpus", "policy", "level", "text"),
    [
        ((), "mixed_float16", logging.WARNING, "no GPU: float16 will be slow"),
        ((P100,), "mixed_float16", logging.WARNING, r"below 7\.0: no Tensor Cores.*P100 \(6\.0\)"),
        ((Gpu("?", None),), "float16", logging.WARNING, "unknown"),
        ((H200,), "mixed_float16", logging.INFO, "mixed_bfloat16"),
        ((T4,), "mixed_bfloat16", logging.WARNING, r"below 8\.0"),
    ],
    ids=str,
)
def test_advice_says_what_the_hardware_means(gpus, policy, level, text):
    found_level, found = Hardware(gpus).advice(policy)
    assert found_level == level
    assert re.search(text, found)


@pytest.mark.parametrize(("gpus", "policy"), [((T4,), "mixed_float16"), ((H200,), "mixed_bfloat16"), ((), "float32")])
def test_no_advice_where_there_is_nothing_to_say(gpus, policy):
    assert Hardware(gpus).advice(policy) is None
