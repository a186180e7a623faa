"""Two workers on this machine. Every run has a timeout, so that no test hangs."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import kmp

TESTS = Path(__file__).parent.parent
EXAMPLE = TESTS.parent / "notebooks" / "several_workers.py"
TIMEOUT = 180  # seconds


def free_addresses(count):
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    return addresses


@pytest.fixture(scope="module")
def results():
    """What two workers saw: a list of two values by the name of each check in `one_worker.py`."""
    addresses = free_addresses(2)
    workers = []
    for index in (0, 1):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = os.environ | {"TF_CONFIG": json.dumps(config)}
        command = [sys.executable, TESTS / "one_worker.py"]
        workers.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [worker.communicate(timeout=TIMEOUT) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    matches = [re.search(r"^saw: (.*)$", out, re.MULTILINE) for out, _ in outputs]
    assert all(matches), outputs
    first, second = (json.loads(match.group(1)) for match in matches)
    return {name: (first[name], second[name]) for name in first}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["loop", "compiled_loop"])
def test_overflow_on_any_worker_skips_the_step_on_all_workers(results, loop):
    first, second = results[loop]
    assert [step["shared"] for step in first] == [step["shared"] for step in second]
    for steps in (first, second):
        changed = [a["shared"][:4] != b["shared"][:4] for a, b in itertools.pairwise(steps)]
        assert changed == [False, False, False, True, False, False, True]
        statistics_changed = [a["own"] != b["own"] for a, b in itertools.pairwise(steps)]
        assert statistics_changed == changed
        assert [step["overflows"] for step in steps] == [0, 1, 2, 3, 3, 4, 5, 5]
        assert [step["from the loss"] for step in steps] == [0, 0, 0, 0, 0, 1, 2, 2]
        assert [step["scale"] for step in steps] == [
            2.0**k for k in (15, 14, 13, 12, 12, 12, 12, 12)
        ]
        assert {name.split("/")[-2] for name in steps[3]["by variable"]} == {"before"}
    assert (
        first[0]["own"] != second[0]["own"]
    )  # Keras' BatchNormalization has separate statistics on each worker


@pytest.mark.slow
def test_fit_evaluate_and_predict_work_and_snapshots_need_no_other_worker(results):
    first, second = results["fit"]
    assert first == second
    steps, _, nonfinite_losses = first["counts"]
    assert (steps, nonfinite_losses) == (16, 2)
    assert first["finite"]
    assert first["reported"] == [[1.0, 3.0], [5, 5]]
    assert first["predicted"] == [[32, 1], True]
    assert first["keras is as it was"]
    assert all(0 < loss < 100 for loss in first["history"]["loss"])


@pytest.mark.slow
def test_inner_optimizer_options_train_equally_on_all_workers(results):
    first, second = results["options"]
    assert first == second
    assert len(first) == 4
    for options, result in first.items():
        assert result[:4] == [6, 2, 1024.0, True], options


@pytest.mark.slow
def test_fit_of_keras_still_fails_on_several_workers(results):
    """If this test fails, Keras has fixed `fit`: remove kmp/backend/trainer_fixes.py."""
    assert all("PerReplica" in error for error in results["stock"])


@pytest.mark.slow
def test_example_trains_alike_on_each_worker(tmp_path):
    command = [sys.executable, EXAMPLE, tmp_path, "--epochs", "2"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    lines = sorted(line for line in finished.stdout.splitlines() if line.startswith("worker "))
    assert [line.split(":")[0] for line in lines] == ["worker 0", "worker 1"]
    assert len({line.split(":")[1] for line in lines}) == 1
    run = kmp.load_run(tmp_path / "log")
    assert run.settings.replicas == 2
    steps = run.series("loss_scale")[0].tolist()
    assert steps == sorted(set(steps))
    assert steps[-1] == 48
    assert keras.models.load_model(tmp_path / "model.keras").optimizer.snapshot().step == 48
