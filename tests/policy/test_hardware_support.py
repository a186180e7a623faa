import logging
import re

import pytest
import tensorflow as tf

import kmp
from kmp.policy.hardware_support import Gpu, Hardware

H200, T4, P100 = Gpu("H200", (9, 0)), Gpu("T4", (7, 5)), Gpu("P100", (6, 0))


def test_hardware_is_what_tensorflow_reports(monkeypatch):
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda device_type: [device] if device_type == "GPU" else []
    )
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
def test_hardware_has_the_features_of_every_gpu(gpus, tensor_cores, bfloat16):
    hardware = Hardware(gpus)
    assert (hardware.tensor_cores, hardware.bfloat16) == (tensor_cores, bfloat16)


@pytest.mark.parametrize(
    ("gpus", "policy", "level", "text"),
    [
        ((), "mixed_float16", logging.WARNING, "no GPU: float16 will be slow"),
        ((P100,), "mixed_float16", logging.WARNING, r"No Tensor Cores.*P100 \(compute capability 6\.0\)"),
        ((Gpu("?", None),), "float16", logging.WARNING, "unknown"),
        ((H200,), "mixed_float16", logging.INFO, "mixed_bfloat16"),
        ((T4,), "mixed_bfloat16", logging.WARNING, r"No bfloat16 in hardware.*8\.0"),
        ((T4,), "mixed_float16", None, None),
        ((H200,), "mixed_bfloat16", None, None),
        ((), "float32", None, None),
    ],
    ids=str,
)
def test_advice_names_the_missing_or_available_feature_if_any(gpus, policy, level, text):
    actual_level, actual_text = Hardware(gpus).advice(policy) or (None, None)
    assert actual_level == level
    assert actual_text == text or re.search(text, actual_text)
