import inspect
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import sequential, without_replays

import kmp
from kmp import callbacks
from kmp.scaling import settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_PAGE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
GUIDE_PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "guide").glob("*.md"))
}
GUIDE = "".join([FIRST_PAGE, *GUIDE_PAGES.values()])
DOCS = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guide").glob("*.md"))]
PAGES = ["README.md", "README.zh-CN.md", *(page.relative_to(ROOT).as_posix() for page in DOCS)]


def rows_of(heading, text):
    """The cells of the first table after a heading or sentence, without its header."""
    table = text.split(heading, 1)[1].split("\n|", 1)[1].split("\n\n", 1)[0]
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]
    ]


def small_network(weights, input_shape, classes):
    convolution = [keras.layers.Conv2D(4, 3, strides=4), keras.layers.BatchNormalization()]
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(classes, "softmax")]
    return keras.Sequential([keras.Input(input_shape), *convolution, *head])


def test_example_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # benchmarks/test_applications.py converts networks of that size
    monkeypatch.setattr(keras.applications, "MobileNetV3Small", small_network)
    code, loop, conversion = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    random = np.random.default_rng(0)
    names = {"x": random.normal(size=(64, 64)).astype("float32"), "y": random.integers(0, 10, 64)}
    exec(code.replace("epochs=5", "epochs=1"), names)
    assert isinstance(names["model"].optimizer, kmp.LossScaleOptimizer)
    assert kmp.load_run("runs/first").series("loss_scale")[0].size
    names |= {"tf": tf, "loss_function": keras.losses.SparseCategoricalCrossentropy()}
    exec(loop, names)
    before = names["model"].get_weights()[0]
    names["step"](names["x"], names["y"])
    assert names["optimizer"].snapshot().step == 1
    assert np.abs(names["model"].get_weights()[0] - before).max() > 0
    kmp.disable()
    assert conversion in GUIDE
    exec(conversion, names)
    images = random.uniform(0, 255, (2, 64, 64, 3))
    np.testing.assert_array_equal(names["in_float32"](images), names["network"](images))
    np.testing.assert_allclose(names["mixed"](images), names["network"](images), atol=1e-2)
    assert {layer.compute_dtype for layer in names["mixed"].layers} == {"float16", "float32"}


@pytest.mark.parametrize(
    ("page", "heading", "function"),
    [
        ("loss-scale", "## Arguments", kmp.LossScaleOptimizer),
        ("callbacks", "# Callbacks and logs", callbacks.defaults),
        ("callbacks", "share these arguments:", callbacks.LossScaleLogger),
    ],
)
def test_table_of_arguments_has_those_of_the_signature_and_their_defaults(page, heading, function):
    defaults = {
        name: value.default for name, value in inspect.signature(function).parameters.items()
    }
    names = set(defaults)
    if function is kmp.LossScaleOptimizer:  # others are those of Keras
        names = {*settings.LossScaleSettings.__annotations__, "jit_compile"} - {
            "dynamic_growth_steps"
        }
    documented = {
        name.strip("`"): text.strip("`") for name, text, *_ in rows_of(heading, GUIDE_PAGES[page])
    }
    assert set(documented) == names
    for name, text in documented.items():
        assert defaults[name] == (
            None if text == "the model's" else eval(text.replace("^", "**"))
        ), name


def test_table_of_log_keys_is_what_the_callbacks_log(enabled):
    model = sequential(keras.layers.Dense(1), shape=(2,), run_eagerly=True)
    history = model.fit(
        np.ones((8, 2)), np.ones((8, 1)), callbacks=without_replays(), verbose=0
    ).history
    documented = {
        cells[0].strip("`") for cells in rows_of("## Keys in `logs`", GUIDE_PAGES["callbacks"])
    }
    assert documented == set(history) - {"loss"}


def test_every_fault_in_the_table_is_a_test_that_exists():
    faults = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    for *_, name in rows_of("# Faults", faults):
        file, test = name.strip("`").split("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), name


def test_every_public_name_is_documented():
    names = [
        f"kmp.{name}("
        for name in ("enable", "disable", "wrap", "guard", "gpus", "LossScaleOptimizer")
    ]
    names += [f"kmp.layers.{name}" for name in ("Float32", "Softmax", "BatchNormalization")]
    names += [
        "LossScaleLogger",
        "OverflowCounter",
        "GradientHistogram",
        "Monitor",
        "kmp.callbacks.defaults(",
    ]
    assert [name for name in names if name not in GUIDE] == []


def test_first_page_of_the_guide_links_to_each_page():
    linked = re.findall(r"\(guide/([^)]*)\.md\)", FIRST_PAGE)
    assert sorted(linked) == sorted(GUIDE_PAGES)


@pytest.mark.parametrize("name", [*sorted(GUIDE_PAGES.keys() - {"questions"}), "errors"])
def test_page_of_the_guide_starts_with_the_code_to_copy(name):
    page = GUIDE_PAGES.get(name) or (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert "```" in page.split("\n## ")[0].split("\n| ")[0]


def test_chinese_page_has_the_same_code_tables_and_links():
    def without_comments(text):
        return [
            re.sub(r"\s*#.*", "", block)
            for block in re.findall(r"```(?:python|bash)\n.*?```", text, re.DOTALL)
        ]

    def shape(text):
        return [line.count(" | ") for line in text.splitlines() if line.startswith("|")]

    def numbers(text):
        return [
            re.findall(r"\d[\d.%]*", line)
            for line in text.splitlines()
            if re.match(r"\| .*\d", line)
        ]

    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    assert without_comments(chinese) == without_comments(README)
    assert shape(chinese) == shape(README)
    assert numbers(chinese) == numbers(README)
    assert chinese.count("\n## ") == README.count("\n## ")
    links = [
        re.findall(r"\]\(([^)#]+)\)", text.replace(".zh-CN", ""))[1:] for text in (chinese, README)
    ]
    assert sorted(links[0]) == sorted(links[1])


def anchor(heading):
    """What a heading is linked by: lower case, dashes for blanks, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    prose = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\((?!http)([^)]+)\)", prose):
        file, _, fragment = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        if fragment:
            headings = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
            assert fragment in map(anchor, headings), target
