"""Do the tests notice when the code is wrong? Runs them on 60 faulty copies of kmp, and prints who noticed.

    python tests/mutation.py record [-m "not slow"]     # once: which tests run which line; as long as the tests take
    python tests/mutation.py run [--only ID ...]        # about an hour; needs the extra `dev`
    python tests/mutation.py sample                     # draws the faults anew

A fault, a "mutant", changes one expression or deletes one statement. `tests/mutants.json` fixes which: they stay the
same while the tests change. Each is found by its own lines, so it survives edits elsewhere in its file. A mutant gets
the tests that run its lines, the fastest first, then the other tests of those files, until one fails.
"""

import argparse
import ast
import copy
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coverage

ROOT = Path(__file__).parent.parent
MUTANTS = ROOT / "tests" / "mutants.json"
RECORDED = ROOT / ".mutation"  # ignored by git
PACKAGES, PER_PACKAGE, SEED = ("scaling", "optimizer", "gradients", "policy", "callbacks"), 12, 20
SECONDS = 420  # of tests for one mutant
SWAPPED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Pow: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}


def mutations_of(node):
    """Yields the faulty versions of one syntax node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield changed(node, ops=[SWAPPED[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
        yield changed(node, op=SWAPPED[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield changed(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield changed(node, value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield changed(node, value=node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def changed(node, **fields):
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def without_annotations(tree):
    """Yields the nodes of a syntax tree that are run: no annotation, no f-string, whose parts cannot be replaced."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr):
                yield node
                yield from without_annotations(node)


def mutants_of(path):
    """Yields the mutants of one file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    for node in without_annotations(ast.parse(source)):
        for mutated in mutations_of(node):
            first, last = node.lineno - 1, node.end_lineno
            before = lines[first].encode()[: node.col_offset].decode()
            after = lines[last - 1].encode()[node.end_col_offset :].decode()
            text = ast.unparse(ast.fix_missing_locations(mutated))
            text = text if isinstance(node, ast.stmt | ast.Constant) else f"({text})"
            original = "".join(lines[first:last])
            if before + text + after != original:
                yield {"file": path, "line": first + 1, "original": original, "mutated": before + text + after}


def sample():
    """Draws the mutants: as many from each package, no two on one line."""
    randomizer, drawn = random.Random(SEED), []
    for package in PACKAGES:
        paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kmp" / package).glob("*.py"))
        candidates = [mutant for path in paths for mutant in mutants_of(path)]
        randomizer.shuffle(candidates)
        by_line = {(mutant["file"], mutant["line"]): mutant for mutant in reversed(candidates)}
        order = {id(mutant): number for number, mutant in enumerate(candidates)}
        chosen = sorted(by_line.values(), key=lambda mutant: order[id(mutant)])[:PER_PACKAGE]
        drawn += sorted(chosen, key=lambda mutant: (mutant["file"], mutant["line"]))
    return [{"id": f"{mutant['file'].split('/')[1]}-{i % PER_PACKAGE}", **mutant} for i, mutant in enumerate(drawn)]


def lines_of(mutant, source):
    """Returns the numbers of the lines in a file that a mutant changes: the occurrence nearest to where it was."""
    count = len(mutant["original"].splitlines())
    lines = source.splitlines(keepends=True)
    starts = [i for i in range(len(lines)) if "".join(lines[i : i + count]) == mutant["original"]]
    if not starts:
        raise ValueError(f"{mutant['id']} is no longer in {mutant['file']}:\n{mutant['original']}")
    start = min(starts, key=lambda i: abs(i + 1 - mutant["line"]))
    return range(start + 1, start + 1 + count)


def pytest_runtest_logreport(report):
    """Writes each test's result for `record` and `run`, which name this module to pytest as a plugin."""
    error = report.longrepr.reprcrash.message.partition("\n")[0] if hasattr(report.longrepr, "reprcrash") else ""
    with Path(os.environ["MUTATION_RESULTS"]).open("a", encoding="utf-8") as file:
        result = {"test": report.nodeid, "seconds": report.duration, "failed": report.failed, "error": error}
        file.write(json.dumps(result) + "\n")


def run_pytest(folder, results, arguments, seconds=None):
    """Runs the tests of a copy of the repository. Returns a dict per phase of each test, and whether time ran out."""
    results.unlink(missing_ok=True)
    path = os.pathsep.join([str(folder), str(folder / "tests")])  # goes before kmp as it is installed
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "MUTATION_RESULTS": str(results)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "mutation", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return read(results), True
    return read(results), False


def read(results):
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def record(marker):
    """Runs the tests with a marker on the unchanged code, and records which of them run which line."""
    RECORDED.mkdir(exist_ok=True)
    settings = RECORDED / "coverage.ini"
    settings.write_text(f"[run]\nrelative_files = True\nsource = kmp\ndata_file = {RECORDED / 'coverage'}\n")
    arguments = ["-n", "2", "--dist", "worksteal", "-m", marker, "-o", "filterwarnings=default"]
    arguments += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    run_pytest(ROOT, RECORDED / "results.jsonl", arguments)


def recorded():
    """Returns the seconds of each test that passed, and for each (file, line) of kmp the tests that run it."""
    results = read(RECORDED / "results.jsonl")
    failed = {result["test"] for result in results if result["failed"]}
    seconds, tests = {}, {}
    for result in results:
        if result["test"] not in failed:
            seconds[result["test"]] = seconds.get(result["test"], 0.0) + result["seconds"]
    data = coverage.CoverageData(RECORDED / "coverage")
    data.read()
    for path in data.measured_files():
        for line, contexts in data.contexts_by_lineno(path).items():
            phases = (context.rpartition("|") for context in contexts)
            tests[path, line] = {test for test, _, phase in phases if phase != "teardown"} & seconds.keys()
    return seconds, tests


def tests_for(mutant, source, seconds, tests_by_line):
    """Returns the tests for a mutant in the order to run them."""
    lines = {(mutant["file"], line) for line in lines_of(mutant, source)}
    first = set().union(*(tests_by_line.get(line, ()) for line in lines))
    if not first:  # a line that runs when kmp is imported
        first = set().union(*(tests for (path, _), tests in tests_by_line.items() if path == mutant["file"]))
    files = {test.partition("::")[0] for test in first}
    others = {test for test in seconds if test.partition("::")[0] in files} - first
    return sorted(first, key=seconds.get) + sorted(others, key=seconds.get)


def run(mutant, seconds, tests_by_line):
    """Runs the tests on a copy of the repository with one mutant. Returns the mutant with the test that failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "kmp")
        subprocess.run(["git", "checkout-index", "--all", f"--prefix={folder}/"], cwd=ROOT, check=True)
        path = folder / mutant["file"]
        source = path.read_text(encoding="utf-8")
        lines = lines_of(mutant, source)
        tests = tests_for(mutant, source, seconds, tests_by_line)
        text = source.splitlines(keepends=True)
        text[lines[0] - 1 : lines[-1]] = [mutant["mutated"]]
        path.write_text("".join(text), encoding="utf-8")
        selection = Path(name, "tests.txt")
        selection.write_text("\n".join(tests), encoding="utf-8")
        arguments = ["-x", "-p", "no:xdist", "-p", "no:randomly", f"@{selection}"]
        results, out_of_time = run_pytest(folder, Path(name, "results.jsonl"), arguments, SECONDS)
    failed = next((result for result in results if result["failed"]), None)
    if failed is None:
        outcome = {"outcome": "time ran out" if out_of_time else "survived" if results else "not imported"}
    else:
        outcome = {"outcome": "killed", "by": failed["test"], "error": failed["error"]}
    done = {"id": mutant["id"], **outcome, "tests": len({result["test"] for result in results}), "of": len(tests)}
    print(json.dumps(done), flush=True)
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "run", "sample"])
    parser.add_argument("-m", default="", metavar="MARKERS", help="the tests to record, as for pytest")
    parser.add_argument("--only", nargs="*", metavar="ID", help="the mutants to run; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants run at once")
    arguments = parser.parse_args()
    if arguments.command == "sample":
        MUTANTS.write_text(json.dumps(sample(), indent=1) + "\n", encoding="utf-8")
    elif arguments.command == "record":
        record(arguments.m)
    else:
        mutants = [
            mutant
            for mutant in json.loads(MUTANTS.read_text(encoding="utf-8"))
            if arguments.only is None or mutant["id"] in arguments.only
        ]
        seconds, tests_by_line = recorded()
        with ThreadPoolExecutor(arguments.jobs) as pool:
            done = list(pool.map(lambda mutant: run(mutant, seconds, tests_by_line), mutants))
        print(f"{sum(each['outcome'] == 'killed' for each in done)} of {len(done)} mutants are killed")


if __name__ == "__main__":
    main()
