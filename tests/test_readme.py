import importlib.util
import inspect
import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import sequential, without_replays

import kmp
from kmp import callbacks
from kmp.scaling import settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE_README = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
CHINESE_GUIDE = (ROOT / "docs" / "guide.zh-CN.md").read_text(encoding="utf-8")
ADVICE = (ROOT / "docs" / "advice.md").read_text(encoding="utf-8")
SPEED = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
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


def test_example_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(code.replace("epochs=5", "epochs=1"), names)
    assert isinstance(names["model"].optimizer, kmp.LossScaleOptimizer)
    assert kmp.load_run("runs/first").series("loss_scale")[0].size


def test_figures_in_the_text_are_those_that_were_measured():
    def results(gpu, **wanted):
        rows = json.loads((ROOT / "benchmarks" / f"{gpu}.json").read_text())["results"]
        return [row for row in rows if wanted.items() <= row.items()]

    [speed, memory] = results("h100", case="BERT-base, 32 of 128", variant="mixed_float16, kmp")[:2]
    assert f"{speed['ratio']:.2f} times as fast in float16" in README
    assert f"with {memory['ratio']:.2f} of the memory" in README
    block = {"section": "training", "case": "transformer block, 128 x 64 x 2048"}
    for variant in ("float16", "bfloat16"):
        [row] = results("h100", variant=variant, **block)
        assert f"{row['ratio']:.2f} times" in README
    steps = {row["variant"]: np.median(row["seconds_of_a_step"]) for row in results("h200")}
    slower = steps["float32"] / steps["mixed_float16, kmp"]
    assert f"ResNet-50 ran at {slower:.2f} of float32's speed" in README.replace("\n", " ")
    kernels = re.search(r"\| ResNet-50, 64 \|.*\| [\d,]+; ([\d,]+); ([\d,]+) \|", SPEED)
    assert f"{kernels[2]} kernels instead of Keras' {kernels[1]}" in README
    programs = re.findall(r"Of (\d+) that float16 alone causes, kmp repairs (\d+)", ADVICE)
    (causes, repairs), (held_out, repaired) = np.array(programs, int)
    words = " ".join(README.split())
    assert f"Of {causes + held_out} test programs" in words
    assert f"kmp repairs {repairs + repaired}. It was developed on {causes}" in words
    assert f"of the other {held_out} it repairs {repaired} (" in words


def load_figure():
    path = ROOT / "docs" / "figures" / "speed_and_repair.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_figure_shows_a_run_that_keras_loses_and_that_repairs_itself(tmp_path):
    figure = load_figure()
    results = figure.measure(epochs=2, seeds=1)
    (tmp_path / "results.json").write_text(json.dumps(results))
    figure.draw(tmp_path / "figure.png", tmp_path / "results.json")
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    float32, keras_run, kmp_run = results["runs"]
    assert keras_run["updates"] == 0
    assert kmp_run["repair"] == {"step": 1, "layers": ["digits/attention"]}
    last = kmp_run["validation_accuracy"][-1]
    assert last > 2 * keras_run["validation_accuracy"][-1]
    assert last == pytest.approx(float32["validation_accuracy"][-1], abs=0.1)


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


def code_of(text):
    """The blocks of a page without comments and drawings, whose words may be translated."""
    blocks = re.findall(r"(?s)```\w+(\n.*?\n)```", text)
    return [re.sub(r"\s*#.*", "", block) for block in blocks if "│" not in block]


def prose_of(text):
    """The text outside the blocks, with the English page in place of each Chinese one."""
    return re.sub(r"(?s)```.*?```", "", text).replace(".zh-CN", "")


def links_of(text):
    return set(re.findall(r"\]\(([^)]+)\)", prose_of(text)))


def facts_of(text):
    """What a translation keeps: code, targets of links, and numbers."""
    return sorted(re.findall(r"`[^`]+`|\]\([^)]+\)|\d[\d.,]*\d|\d", text.replace(".zh-CN", "")))


def test_chinese_readme_has_the_same_code_tables_numbers_and_links():
    def rows(text):
        return [facts_of(line) for line in text.splitlines() if line.startswith("|")]

    def names(text):
        return set(re.findall(r"`[^`]+`", prose_of(text)))

    def numbers(text):
        return sorted(re.findall(r"\d[\d.,]*\d|\d", re.sub(r"\]\([^)]*\)", "", text)))

    assert code_of(CHINESE_README) == code_of(README)
    assert rows(CHINESE_README) == rows(README)
    assert names(CHINESE_README) == names(README)
    assert numbers(CHINESE_README) == numbers(README)
    assert links_of(CHINESE_README) == links_of(README)
    assert CHINESE_README.count("\n## ") == README.count("\n## ")


def test_code_of_the_chinese_guide_is_that_of_the_english_pages():
    english = [
        block
        for page in DOCS
        if page.name != "guide.zh-CN.md"
        for block in code_of(page.read_text(encoding="utf-8"))
    ]
    assert [
        part for part in code_of(CHINESE_GUIDE) if not any(part in block for block in english)
    ] == []


def test_chinese_guide_links_what_the_english_one_links():
    assert links_of(FIRST_PAGE) - links_of(CHINESE_GUIDE) == set()


@pytest.mark.parametrize("page", ["README.zh-CN.md", "docs/guide.zh-CN.md"])
def test_chinese_pages_link_the_chinese_page_where_there_is_one(page):
    text = (ROOT / page).read_text(encoding="utf-8").split("简体中文", 1)[1]
    files = re.findall(r"\]\((?!http)([^)#]+?)\.md[)#]", text)
    folder = (ROOT / page).parent
    assert [file for file in files if (folder / f"{file}.zh-CN.md").exists()] == []


@pytest.mark.parametrize(
    ("page", "heading", "chinese_heading"),
    [
        ("guide", "# Guide", "# 指南"),
        ("guide/command-line", "## Demo", "## 演示"),
        ("coming-from", "## Compared with other tools", "## 与其他工具对比"),
    ],
)
def test_chinese_guide_has_the_same_table(page, heading, chinese_heading):
    english = rows_of(heading, (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    chinese = rows_of(chinese_heading, CHINESE_GUIDE)
    facts = [[facts_of(cell) for cell in row] for row in english]
    assert [[facts_of(cell) for cell in row] for row in chinese] == facts


def test_errors_of_the_chinese_guide_are_in_the_english_table():
    def section(row):
        return re.search(r"#([\w-]+)\)", row[-1])[1]

    errors = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    english = rows_of("Look up the symptom.", errors)
    for row in rows_of("## 常见的初次错误", CHINESE_GUIDE):
        [symptom] = [each[0] for each in english if f"#{section(row)})" in each[-1]]
        assert set(facts_of(row[0])) <= set(facts_of(symptom)), row


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
