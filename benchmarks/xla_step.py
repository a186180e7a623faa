"""Writes the HLO of a model's training step, which `xla_gpu.py` compiles for a GPU. Needs no GPU.

python benchmarks/xla_step.py MODEL POLICY SCALING OUT.hlo [--batch N]
python benchmarks/xla_step.py resnet50 mixed_float16 kmp kmp.hlo --batch 64
"""

import argparse
import os
from pathlib import Path
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf
from step_models import BARE, DEFAULT_BATCH, KERAS, MODELS, OURS, REPLICA, UNWATCHED, compiled_step
from tensorflow.python.eager.polymorphic_function import compiler_ir

from kmp.backend import xla

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def hlo_of_step(model: str, policy: str, scaling: str, batch: int) -> bytes:
    """Returns the HLO of a training step, before optimization, as a serialized `HloModuleProto`.

    Args:
        model: One of `MODELS`.
        policy: A dtype policy.
        scaling: `"bare"`, `"keras"`, `"unwatched"`, `"kmp"` or `"replica"`, as in `compiled_step`.
            Of a replica, the forward and backward pass; the update is a function of its own.
        batch: Size of the batch.
    """
    train_step, specs = compiled_step(model, policy, scaling, batch)
    passes = []
    # A first trace creates the variables of the metrics, which a function under XLA cannot.
    with mock.patch.object(
        xla, "check_compilable", lambda function, device: passes.append(function)
    ):
        tf.function(train_step, autograph=False).get_concrete_function(*specs)
    if passes:
        return compiler_ir.from_concrete_function(passes[0])(stage="hlo_serialized")
    step = tf.function(train_step, autograph=False, jit_compile=True)
    return step.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")


def main() -> None:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("policy", choices=POLICIES)
    parser.add_argument("scaling", choices=(BARE, KERAS, UNWATCHED, OURS, REPLICA))
    parser.add_argument("out", type=Path, metavar="OUT.hlo")
    parser.add_argument("--batch", type=int, metavar="N", help="default: as in step_models.py")
    parsed = parser.parse_args()
    batch = parsed.batch or DEFAULT_BATCH[parsed.model]
    parsed.out.write_bytes(hlo_of_step(parsed.model, parsed.policy, parsed.scaling, batch))


if __name__ == "__main__":
    main()
