import logging
import re

import keras
import pytest
import tensorflow as tf

import kmp
from kmp.enabling import Gpu, gpu_support

H200, T4, P100 = Gpu("H200", (9, 0)), Gpu("T4", (7, 5)), Gpu("P100", (6, 0))


@pytest.fixture
def detect(monkeypatch):
    """Returns a function that makes TensorFlow report these GPUs."""

    def detect(*gpus):
        devices = {
            tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU"): gpu
            for n, gpu in enumerate(gpus)
        }
        details = {
            device: {"device_name": gpu.name, "compute_capability": gpu.compute_capability}
            for device, gpu in devices.items()
        }
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind: list(devices) if kind == "GPU" else []
        )
        monkeypatch.setattr(tf.config.experimental, "get_device_details", details.__getitem__)

    return detect


@pytest.mark.parametrize(
    ("gpus", "policy", "level", "text"),
    [
        ((), "mixed_float16", logging.WARNING, "'float32': TensorFlow sees no GPU"),
        (
            (P100,),
            "mixed_float16",
            logging.WARNING,
            r"memory, not time: P100 \(compute capability 6\.0\)",
        ),
        (
            (H200, P100),
            "mixed_float16",
            logging.WARNING,
            "'float32': not all GPUs have Tensor Cores",
        ),
        ((Gpu("?", None),), "float16", logging.WARNING, "unknown"),
        (
            (H200,),
            "mixed_float16",
            logging.INFO,
            "'mixed_bfloat16': bfloat16 in hardware, which needs no loss scale",
        ),
        (
            (T4,),
            "mixed_bfloat16",
            logging.WARNING,
            "'mixed_float16': Tensor Cores for float16, and not all",
        ),
        ((H200, T4), "mixed_bfloat16", logging.WARNING, "not all GPUs have bfloat16"),
        ((T4,), "float16", None, None),
        ((H200,), "mixed_bfloat16", None, None),
        ((P100,), "float32", None, None),
    ],
    ids=str,
)
def test_enable_logs_once_if_auto_would_choose_another_policy(
    detect, monkeypatch, caplog, gpus, policy, level, text
):
    monkeypatch.setattr(gpu_support, "_logged", set())
    detect(*gpus)
    with caplog.at_level(logging.INFO, "kmp"):
        for _ in range(2):
            kmp.enable(policy)
    assert [(record.name, record.levelno) for record in caplog.records] == (
        [("kmp", level)] if level else []
    )
    assert not text or re.search(text, caplog.text)


@pytest.mark.parametrize(
    ("gpus", "policy", "reason"),
    [
        ((H200,), "mixed_bfloat16", "bfloat16 in hardware, which needs no loss scale: H200"),
        ((H200, T4), "mixed_float16", "Tensor Cores for float16, and not all GPUs have bfloat16"),
        (
            (T4, P100),
            "float32",
            "not all GPUs have Tensor Cores, without which 16 bits save memory, not time: T4",
        ),
        ((), "float32", "TensorFlow sees no GPU"),
    ],
    ids=str,
)
def test_auto_is_the_policy_that_all_gpus_support_and_logs_why(
    detect, caplog, gpus, policy, reason
):
    detect(*gpus)
    with kmp.enable("auto") as handle:
        assert handle.policy == keras.config.dtype_policy().name == policy
    assert f"kmp.enable('auto') uses '{policy}': {reason}" in caplog.text
    assert "kmp.audit(model, batch)" in caplog.text
