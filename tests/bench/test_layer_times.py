from kmp.backend import xla
from kmp_bench.layer_times import FUSED, KERAS, OURS, measure_layers


def test_each_layer_is_measured_in_keras_code_and_in_kmps_ways():
    with xla.traced_for_gpu():
        measured = list(measure_layers(((32, 16),), (2, 4, 4, 8), calls=1, rounds=2))
    ways = {
        results[0].case.split(",")[0]: [each.variant for each in results] for results in measured
    }
    assert ways == {
        "LayerNormalization": [KERAS, OURS, FUSED],
        "gelu": [KERAS, OURS],
        "softmax": [KERAS, OURS],
        "BatchNormalization": [KERAS, OURS, FUSED],
    }
    assert all(each.value > 0 and each.unit == "s" for results in measured for each in results)
