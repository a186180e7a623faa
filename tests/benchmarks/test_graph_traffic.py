import json

import graph_traffic
import keras
import tensorflow as tf
from packaging.version import Version


def test_step_of_the_small_model_costs_this_much():
    def cost(policy, scaling):
        traffic = graph_traffic.count("small", policy, scaling, batch=32).traffic
        transposed, compiled = traffic.transposed.kernels, traffic.compiled.kernels
        counts = traffic.kernels, transposed, compiled, traffic.host_decisions
        sizes = traffic.bytes, traffic.float32_bytes, traffic.kept_bytes
        return *counts, *(round(size / 1e6, 1) for size in sizes)

    # Kernels, of these transposes and those under XLA, host decisions; then megabytes: moved, of
    # these float32, kept for the backward pass. A change that raises a number needs a reason.
    bare = (287, 20, 0, 0, 363.8, 363.8, 12.6)
    ours = (309, 10, 0, 5, 105.9, 26.6, 6.5)
    # A compiled BatchNormalization has no transposes inside, and more kernels.
    compiled = (113, 0, 57, 0, 90.6, 25.8, 6.5)
    if Version(tf.__version__) >= Version("2.22.0rc0"):
        bare = (319, 28, 0, 0, 420.5, 420.5, 18.9)  # `tf.nn.moments` reads its inputs once more
    if Version(keras.__version__) >= Version("3.16.dev0"):  # compiles means of float16
        ours = (304, 10, 2, 5, 80.7, 1.4, 6.5)
        compiled = (108, 0, 59, 0, 65.4, 0.6, 6.5)
    assert cost("float32", "bare") == bare
    assert cost("mixed_float16", "kmp") == ours
    assert cost("mixed_float16", "compiled") == compiled


def test_short_run_prints_a_table_and_writes_the_results(tmp_path, capsys):
    file = tmp_path / "results.json"
    graph_traffic.main(["--quick", "--scaling", "bare", "--types", "1", "--json", str(file)])
    results = json.loads(file.read_text())["results"]
    assert [(result["model"], result["scaling"]) for result in results] == [("small", "bare")]
    output = capsys.readouterr().out
    assert f"{results[0]['traffic']['kernels']:,}" in output
    assert next(iter(results[0]["traffic"]["by_type"])) in output
