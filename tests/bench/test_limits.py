"""The sentence on what limits a model, from measurements that are made up."""

import pytest

from kmp.traffic import Cost, Traffic
from kmp_bench import Device, Step, StepComparison
from kmp_bench.limits import limit_of

H100 = Device("H100", launch_seconds=4e-6, bytes_per_second=2e12)
GTX = Device("GTX 1660", has_tensor_cores=False, launch_seconds=4e-6, bytes_per_second=2e11)
CPU = Device()
BY_COUNTS = "(by counts, as TensorFlow sees no GPU)"


def traffic(kernels=100, bytes=8_000_000_000, **float32):
    owners = {name: Cost(1, share, share) for name, share in float32.items()}
    in_float32 = sum(float32.values())
    return Traffic(kernels, bytes, in_float32, 0, Cost(), 0, 0, Cost(), {}, owners)


def compared(device=H100, graph=(100, 50), xla=(100, 50), counted=None, **fields):
    """A comparison of float32 and float16, whose steps take so many ms in each mode."""
    steps = []
    for index, policy in enumerate(("float32", "mixed_float16")):
        seconds = {"graph": graph, "XLA": xla}
        for mode, times in seconds.items():
            traffic_of = counted if mode == "graph" else None
            if policy == "float32" and traffic_of:
                traffic_of = traffic(traffic_of.kernels, 2 * traffic_of.bytes)
            in_seconds = (times[index] / 1e3,) if times else ()
            steps.append(Step(policy, mode, in_seconds, traffic=traffic_of))
    return StepComparison("network", "32 x 8 float32", tuple(steps), device, **fields)


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        pytest.param(
            compared(runs_eagerly=True),
            "The model is compiled with run_eagerly=True: Python starts each of its operations, and"
            " the times above are without that.",
            id="eager",
        ),
        pytest.param(
            compared(data_seconds=0.08),
            "Waiting for data: the data set takes 80.0 ms for a batch, a step of mixed_float16 only"
            " 50.0 ms.",
            id="data",
        ),
        pytest.param(
            compared(CPU, data_seconds=0.08, counted=traffic()),
            "Waiting for data: the data set takes 80.0 ms for a batch, a step of"
            " mixed_float16 only 50.0 ms on this CPU.",
            id="data on a CPU",
        ),
        pytest.param(
            compared(xla=(40, 20), xla_off="it is compiled with jit_compile=False"),
            "XLA is off (it is compiled with jit_compile=False): a step of mixed_float16 takes 50.0"
            " ms in graph mode, and 20.0 ms with jit_compile=True.",
            id="XLA off",
        ),
        pytest.param(
            compared(xla=(60, 49), xla_off="it is compiled with jit_compile=False"),
            "Nothing: mixed_float16 is 2.00 times as fast as float32 in graph mode.",
            id="XLA would gain nothing",
        ),
        pytest.param(
            compared(data_seconds=0.01),
            "Nothing: mixed_float16 is 2.00 times as fast as float32 under XLA.",
            id="fast",
        ),
        pytest.param(
            compared(GTX, xla=(100, 90)),
            "The GPU: GTX 1660 has no Tensor Cores, so 16 bits save memory, not time.",
            id="no Tensor Cores",
        ),
        pytest.param(
            compared(xla=(5, 5), counted=traffic(kernels=1000, bytes=2_000_000)),
            "Small batch: launching the 1,000 kernels of a step of mixed_float16 in graph mode"
            " takes about 4.00 ms, moving its 2.00 MB 0.00 ms (measured here: 4.0 µs a launch, 2"
            " TB/s); XLA fuses some of them, and a larger batch has as many.",
            id="launches",
        ),
        pytest.param(
            compared(
                graph=(5, 5),
                xla=None,
                counted=traffic(kernels=1000, bytes=2_000_000),
                xla_off="LSTM does not support it",
            ),
            "XLA is off (LSTM does not support it), and the batch is small: launching the 1,000"
            " kernels of a step of mixed_float16 in graph mode takes about 4.00 ms, moving its 2.00"
            " MB 0.00 ms (measured here: 4.0 µs a launch, 2 TB/s).",
            id="launches without XLA",
        ),
        pytest.param(
            compared(xla=(100, 95), counted=traffic(kernels=1000, bytes=2_000_000)),
            "Nothing that was looked for: mixed_float16 is 1.05 times as fast as float32 under"
            " XLA.",
            id="few launches beside the time of the step",
        ),
        pytest.param(
            compared(CPU, counted=traffic(kernels=1000, bytes=2_000_000)),
            f"Small batch {BY_COUNTS}: launching the 1,000 kernels of a step of mixed_float16 in"
            " graph mode takes about 5.00 ms, moving its 2.00 MB 0.00 ms (assumed: 5.0 µs a launch,"
            " 1 TB/s); XLA fuses some of them, and a larger batch has as many.",
            id="launches on a CPU",
        ),
        pytest.param(
            compared(xla=(100, 90), counted=traffic(Normalizer=4_000_000_000, Dense=800_000_000)),
            "Float32 bytes: 60% of the bytes of a step of mixed_float16 in graph mode are float32,"
            " most of them in Normalizer (50%).",
            id="float32 bytes",
        ),
        pytest.param(
            compared(
                xla=(100, 90),
                counted=traffic(Dense=800_000_000),
                tensor_core_layers=2,
                unaligned={"last": ("units 10 -> 16",)},
            ),
            "Dimensions: 1 of 2 layers with matrix products or convolutions have some that are not"
            " divisible by 8, such as last (units 10 -> 16), so Tensor Cores are slow or not used.",
            id="dimensions",
        ),
        pytest.param(
            compared(
                xla=(100, 90),
                counted=traffic(),
                tensor_core_layers=3,
                unaligned={"last": ("units 10 -> 16",)},
            ),
            "Nothing: mixed_float16 is 1.11 times as fast as float32 under XLA.",
            id="few dimensions",
        ),
        pytest.param(
            compared(CPU, counted=traffic()),
            f"Nothing that can be counted {BY_COUNTS}: mixed_float16 moves 8,000 MB in a step in"
            " graph mode, float32 2.0 times as many, and only a GPU shows how much faster that is.",
            id="nothing on a CPU",
        ),
        pytest.param(
            compared(CPU),
            f"Unknown {BY_COUNTS}: the step cannot be traced to count what it moves.",
            id="not traced",
        ),
    ],
)
def test_limit_is_the_first_that_the_measurements_show(comparison, expected):
    assert limit_of(comparison) == expected


def test_model_that_16_bits_do_not_train_is_reported_with_the_error():
    steps = (
        Step("float32", "graph", (0.1,)),
        Step("mixed_float16", "graph", error="TypeError: no float16"),
    )
    assert limit_of(StepComparison("network", "32 x 8 float32", steps)) == (
        "16 bits do not train this model: TypeError: no float16"
    )


def test_fastest_16_bit_format_is_judged_on_a_gpu():
    steps = [
        Step(policy, "XLA", (seconds,))
        for policy, seconds in (("float32", 0.4), ("mixed_float16", 0.3), ("mixed_bfloat16", 0.1))
    ]
    assert limit_of(StepComparison("network", "32 x 8 float32", tuple(steps), H100)) == (
        "Nothing: mixed_bfloat16 is 4.00 times as fast as float32 under XLA."
    )
