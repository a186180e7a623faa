import re
import runpy
import shlex
import sys
import types
import warnings
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import exhaustive_unless, sequential, without_replays

import kmp
from kmp_cli import main

DOCS = Path(__file__).parent.parent / "docs"
COMING_FROM = (DOCS / "coming-from.md").read_text(encoding="utf-8")
GUIDE_PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (*sorted(DOCS.glob("guide*.md")), *sorted((DOCS / "guide").glob("*.md")))
}


def lines_of_kmp():
    """What stands between backticks in the last column of the tables, once each."""
    lines = [
        line
        for line in COMING_FROM.splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]
    rows = [line.strip("| ").split(" | ") for line in lines]
    cells = [row[-1] for row in rows if row[-1] != "kmp"]
    return sorted(
        {code for cell in cells for code in re.findall(r"`([^`]+)`", cell)} - {"fit", "unscale_"}
    )


@pytest.fixture
def names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers = keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer, variables = kmp.wrap(keras.optimizers.SGD(0.1)), model.trainable_variables
    optimizer.build(variables)
    with tf.GradientTape() as tape:
        loss = keras.ops.mean(
            model(np.random.default_rng(0).normal(size=(4, 8)), training=True) - 1
        )
        scaled_loss = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled_loss, variables)
    yield {
        **{
            "keras": keras,
            "kmp": kmp,
            "tf": tf,
            "model": model,
            "variables": variables,
            "optimizer": optimizer,
        },
        **{"loss": loss, "gradients": gradients},
    }
    kmp.graph_rewrite(False)


def test_tables_have_lines_for_what_is_there():
    found = lines_of_kmp()
    assert len(found) > 40
    assert {
        "kmp.enable()",
        "optimizer.apply(gradients, variables)",
        "kmp.enable(hysteresis=2)",
    } <= set(found)


@pytest.mark.parametrize("code", lines_of_kmp())
def test_each_line_of_the_tables_runs_as_it_is_written(code, names):
    before = [np.array(variable) for variable in names["variables"]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFlow's float16 pass does nothing without a GPU")
        exec(code, names)
    if code.startswith("optimizer.apply"):
        assert any(
            np.any(was != np.array(now))
            for was, now in zip(before, names["variables"], strict=True)
        )
    if code.startswith("model = kmp.convert"):
        assert "float16" in {layer.compute_dtype for layer in names["model"].layers}
    if code.startswith("kmp.enable("):
        dtypes = ("float32",) if "float32" in code else ("float16", "bfloat16")
        assert keras.config.dtype_policy().compute_dtype in dtypes


def test_commands_of_the_guide_run_as_they_are_written(
    tmp_path, monkeypatch, capsys, without_figures
):
    monkeypatch.chdir(tmp_path)
    model = sequential(
        keras.layers.Dense(1), shape=(2,), optimizer=kmp.wrap("sgd"), run_eagerly=True
    )
    model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=without_replays("runs/first"), verbose=0)
    model.save("model.keras")
    blocks = [
        block
        for page in GUIDE_PAGES.values()
        for block in re.findall(r"(?s)```bash\n(.*?)\n```", page)
    ]
    commands = sorted({command for block in blocks for command in block.splitlines()})
    ours = [command for command in commands if command.startswith("kmp ")]
    assert ours == ["kmp audit model.keras", "kmp report runs/first"]
    # See test_trainer_fixes.py.
    assert commands == [ours[0], ours[1], "python notebooks/several_workers.py runs/workers"]
    assert [main(shlex.split(command)[1:]) for command in ours] == [0, 0]
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert "dense" in capsys.readouterr().out


def small_network(weights, input_shape, classes=1000, include_top=True, pooling="avg"):
    convolution = [keras.layers.Conv2D(4, 3, strides=4), keras.layers.BatchNormalization()]
    pooled = [*convolution, keras.layers.GlobalAveragePooling2D()]
    head = [keras.layers.Dense(classes, "softmax")] if include_top else []
    return keras.Sequential([keras.Input(input_shape), *pooled, *head])


class Task(keras.Model):
    """In the place of the classes of keras-hub, whose presets are downloads."""

    @classmethod
    def from_preset(cls, name, num_classes):
        inputs = keras.Input((8,))
        backbone = keras.Model(inputs, keras.layers.Dense(4)(inputs))
        task = cls(inputs, keras.layers.Dense(num_classes)(backbone(inputs)))
        task.backbone = backbone
        return task

    def fit(self, x, y, **options):
        """Trains with numbers in the place of texts and images."""
        numbers = np.random.default_rng(0).normal(size=(len(x), 8))
        return super().fit(numbers, y, **options)


def python_blocks(text):
    return re.findall(r"(?s)```python\n(.*?)```", text)


# Their trainings take long, and repeat what has tests of its own: conversion/, several devices in
# each folder, saved and resumed trainings in optimizer/test_saving.py, loops and GANs in
# `test_loop_trains_and_options_are_parsed`, callbacks/test_custom_loops.py and
# callbacks/test_several_optimizers.py. The code of the Chinese guide is in the English pages: see
# test_readme.py.
LONG_PAGES = {"devices", "guide.zh-CN", "loops", "pretrained", "resume"}
RUNNING_PAGES = [
    page for page, text in GUIDE_PAGES.items() if python_blocks(text) and page != "questions"
]


@pytest.mark.parametrize("page", exhaustive_unless({*RUNNING_PAGES} - LONG_PAGES, RUNNING_PAGES))
def test_python_blocks_of_the_guide_run_from_top_to_bottom(
    page, tmp_path, monkeypatch, two_replicas
):
    monkeypatch.chdir(tmp_path)
    # See its docstring.
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: two_replicas)
    # test_readme.py trains with replays, which take most of the time
    monkeypatch.setattr(kmp.callbacks, "defaults", partial(kmp.callbacks.defaults, replay=False))
    # benchmarks/test_applications.py converts networks of that size
    monkeypatch.setattr(keras.applications, "MobileNetV3Small", small_network)
    hub = types.ModuleType("keras_hub")
    hub.models = types.SimpleNamespace(BertTextClassifier=Task, ImageClassifier=Task)
    monkeypatch.setitem(sys.modules, "keras_hub", hub)
    names = {"__name__": page}
    for block in python_blocks(GUIDE_PAGES[page]):
        code = block.replace("4096", "64")  # fewer examples, to train in less time
        if not re.search("import (wandb|mlflow)", code):  # mlflow: see callbacks/test_mlflow.py
            exec(compile(code, page, "exec"), names)
    if page == "loops":
        assert [sample.step for sample in kmp.load_run("run").samples] == [11, 12, 14]
        trained, resumed = names["gan"], names["Gan"](*names["networks"]())
        resumed.compile(kmp.wrap("adam"), kmp.wrap("adam"))
        trained.save_weights("gan.weights.h5")
        resumed.load_weights("gan.weights.h5")
        assert resumed.g_optimizer.snapshot().step == trained.g_optimizer.snapshot().step > 0
    if page == "export":
        assert names["outputs"].shape == (2, 4)
    if page == "pretrained":
        dtypes = [
            {layer.compute_dtype for layer in names[each].layers[1:]}
            for each in ("model", "base", "bert", "resnet")
        ]
        assert dtypes == [{"float16", "float32"}, *[{"float16"}] * 3]


def test_conversion_of_the_guide_keeps_the_weights(monkeypatch):
    monkeypatch.setattr(keras.applications, "MobileNetV3Small", small_network)
    names = {}
    exec(python_blocks(GUIDE_PAGES["convert"])[0], names)
    images = np.random.default_rng(0).uniform(0, 255, (2, 64, 64, 3))
    np.testing.assert_array_equal(names["in_float32"](images), names["network"](images))
    np.testing.assert_allclose(names["mixed"](images), names["network"](images), atol=1e-2)
    assert {layer.compute_dtype for layer in names["mixed"].layers} == {"float16", "float32"}


@pytest.mark.parametrize("page", ["convert", "guide.zh-CN"])
def test_audit_of_the_guide_names_the_line_of_a_custom_layer(page, tmp_path, capsys):
    text = GUIDE_PAGES[page]
    code = next(block for block in python_blocks(text) if "class Similarity" in block)
    program = tmp_path / "attention.py"
    program.write_text(code, encoding="utf-8")
    runpy.run_path(str(program))
    printed = capsys.readouterr().out
    assert f"```text\n{printed}```" in text
    assert code.splitlines()[int(re.search(r":(\d+):", printed)[1]) - 1].endswith("/ 0.07)")


def test_blocks_of_the_questions_run_and_name_what_made_the_loss_nan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in python_blocks(GUIDE_PAGES["questions"]):
        exec(block, names)
    printed = capsys.readouterr().out
    assert "The batch's y contains NaN or Inf." in printed
    assert printed.endswith("True False\nTrue\n")


# One of the errors of the page.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_blocks_of_the_page_on_errors_print_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "".join(python_blocks((DOCS / "errors.md").read_text(encoding="utf-8")))
    lines = [line for line in code.splitlines() if line.startswith(("print", "# "))]
    expected = [text for line in lines for text in re.findall(r"(?:^|\)  )# (.*)$", line)]
    exec(compile(code, "errors.md", "exec"), {"__name__": "errors"})
    assert capsys.readouterr().out.splitlines() == expected


def test_loop_trains_and_options_are_parsed(names):
    loop, two_optimizers, options = python_blocks(COMING_FROM)
    exec(loop, names)
    x, y = np.random.default_rng(0).normal(size=(64, 64)).astype("float32"), np.arange(64) % 10
    losses = [float(names["step"](x, y)) for _ in range(20)]
    assert losses[-1] < losses[0]
    exec(two_optimizers, names)
    losses += [float(names["step_of_both"](x, y)) for _ in range(20)]
    assert losses[-1] < losses[20]
    exec(options, names)
    assert kmp.wrap("sgd").rule.initial_scale == 128.0
