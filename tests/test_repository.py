"""The files beside the package: workflows, `.ci/run`, nox, the citation, the container."""

import ast
import itertools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import kmp

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCRIPT = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
PARTS = set(re.findall(r"(?m)^part_(\w+)\(\)", SCRIPT))
OTHER_COMMANDS = {
    "python -m pip install nox",
    'gh release create "$GITHUB_REF_NAME" dist/* --verify-tag --generate-notes',
}


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs():
    """All jobs of all workflows."""
    return [job for path in WORKFLOWS for job in load(path)["jobs"].values()]


def variants_of(job):
    """The values of `matrix` in each of the jobs that it makes."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    included = matrix.pop("include", [])
    if not matrix:
        return included or [{}]
    products = itertools.product(*matrix.values())
    return [dict(zip(matrix, values, strict=True)) for values in products] + included


def commands_of(job):
    """What a job runs, for each variant of its matrix, with the values of the variant."""
    runs = [step["run"] for step in job.get("steps", []) if "run" in step]
    for variant, run in itertools.product(variants_of(job), runs):
        command = run
        for name, value in variant.items():
            command = command.replace(f"${{{{ matrix.{name} }}}}", value)
        yield variant, command


def commands(prefix=""):
    pairs = [pair for job in jobs() for pair in commands_of(job)]
    return [(variant, line) for variant, line in pairs if line.startswith(prefix)]


def sessions():
    """The sessions of noxfile.py, each with its Python; `None` if any will do."""
    found = {}
    for function in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
            continue
        settings = getattr(function.decorator_list[0], "keywords", [])
        python = {item.arg: ast.literal_eval(item.value) for item in settings}.get("python")
        if isinstance(python, list):
            found |= {f"{function.name}-{version}": version for version in python}
        else:
            found[function.name] = python
    return found


def test_each_part_of_ci_is_a_job_and_each_job_a_part():
    lines = [line.split() for _, line in commands(".ci/run ")]
    assert {line[1] for line in lines} == PARTS - {"all"}
    shares = [line[2] for line in lines if line[1] == "slow"]
    assert shares == [f"{index + 1}/{len(shares)}" for index in range(len(shares))]


def test_each_session_of_nox_is_a_job_with_its_python():
    variants = [variant for variant, _ in commands("nox ")]
    assert [variant["session"] for variant in variants] == list(sessions())
    for variant in variants:
        assert sessions()[variant["session"]] in (None, variant["python"])


def test_workflows_run_nothing_else():
    others = {line for _, line in commands() if not line.startswith((".ci/run ", "nox -s "))}
    assert others == OTHER_COMMANDS


def test_quick_tests_run_on_each_supported_python():
    tested = {variant["python"] for variant, _ in commands(".ci/run quick")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, end = re.findall(r"3\.(\d+)", project["requires-python"])
    assert tested == {f"3.{minor}" for minor in range(int(oldest), int(end))}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_only_reads_unless_a_job_says_more(path):
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        for step in job.get("steps", []):
            assert re.search(r"@(release/)?v\d+$", step.get("uses", "@v1")), step


def test_only_the_job_that_publishes_may_ask_the_index_for_a_token():
    release = load(GITHUB / "workflows" / "release.yml")["jobs"]
    allowed = {name: job["permissions"] for name, job in release.items() if "permissions" in job}
    assert allowed == {"publish": {"id-token": "write"}, "attach": {"contents": "write"}}
    actions = [step["uses"].partition("@")[0] for step in release["publish"]["steps"]]
    assert actions == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]


def shell(script):
    command = ["bash", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.split(), done.stderr


def test_shares_of_the_slow_tests_are_all_test_files_once():
    function = re.search(r"(?ms)^files_of\(\) \{.*?^\}", SCRIPT)[0]
    _, files, _ = shell(f"{function}; for share in 1/3 2/3 3/3; do files_of $share; done")
    found = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(files) == sorted(found)


def test_unknown_part_is_an_error_that_lists_the_parts():
    status, _, error = shell(".ci/run nosuch")
    assert status == 2
    assert set(error.partition("Parts: ")[2].split()) == PARTS


def test_citation_and_changelog_have_the_version_of_the_package_and_one_date():
    citation = load(ROOT / "CITATION.cff")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.search(r"(?m)^## (\d\S*) - (\S+)$", changelog).groups()
    assert version == citation["version"] == kmp.__version__
    assert date == citation["date-released"].isoformat()


def test_forms_of_issues_have_fields_with_labels_and_a_bug_needs_the_output_of_doctor():
    forms = {path.stem: load(path) for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml")}
    assert forms.keys() == {"bug_report", "feature_request"}
    for form in forms.values():
        assert form["name"]
        assert form["description"]
        assert all(field["attributes"]["label"] for field in form["body"])
    doctor = {field["id"]: field for field in forms["bug_report"]["body"]}["doctor"]
    assert "`kmp doctor --json -`" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]


def test_container_gets_the_files_of_the_package_and_extras_that_exist():
    container = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"(?m)^COPY (.*) \S+$", container)
    sources = " ".join(copied).split()
    kept = re.findall(r"(?m)^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"))
    assert sorted(sources) == sorted(kept)
    assert [name for name in sources if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r'"\.\[(.*)\]"', container)[1].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()
