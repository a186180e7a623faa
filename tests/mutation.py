"""Mutation testing: runs the tests on 60 mutants of kmp, and prints which test fails on each.

    python tests/mutation.py record [-m "not slow"]     # once: which test runs which line
    python tests/mutation.py run [ID ...]               # needs the extra `dev`
    python tests/mutation.py sample                     # draws the mutants again; overwrites tests/mutants.json

A mutant changes one expression or deletes one statement. `tests/mutants.json` holds those drawn from commit 63cdcde, so
that they stay the same while the tests change. Each is found by its own lines, so it survives edits elsewhere in its
file; those whose lines have changed since are listed, and `sample` draws new ones. A mutant gets the recorded tests
that run its lines, the fastest first, then the other tests of those files, until one fails; that test then runs alone,
because a test that depends on those before it detects nothing. `run` takes the files from git's index: `git add` first.
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
TIME_LIMIT = 420  # seconds of tests for one mutant
SWAPS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr)),
]
SWAPPED = {old: new for pair in SWAPS for old, new in (pair, pair[::-1])}
SWAPPED |= dict.fromkeys((ast.FloorDiv, ast.Pow, ast.Mod), ast.Mult)


def mutated(node):
    """Returns the faulty version of a syntax node, or `None` if it has none."""
    faulty = None
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        faulty = changed(node, ops=[SWAPPED[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
        faulty = changed(node, op=SWAPPED[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        faulty = node.operand
    elif isinstance(node, ast.IfExp):
        faulty = changed(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        faulty = changed(node, value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        faulty = changed(node, value=node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        faulty = ast.Pass()
    return faulty


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
        faulty = mutated(node)
        if faulty is None:
            continue
        first, last = node.lineno - 1, node.end_lineno
        before = lines[first].encode()[: node.col_offset].decode()
        after = lines[last - 1].encode()[node.end_col_offset :].decode()
        text = ast.unparse(ast.fix_missing_locations(faulty))
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
        by_line = {}
        for mutant in candidates:
            by_line.setdefault((mutant["file"], mutant["line"]), mutant)
        chosen = list(by_line.values())[:PER_PACKAGE]
        drawn += sorted(chosen, key=lambda mutant: (mutant["file"], mutant["line"]))
    return [{"id": f"{mutant['file'].split('/')[1]}-{i % PER_PACKAGE}", **mutant} for i, mutant in enumerate(drawn)]


def lines_of(mutant, source):
    """Returns the numbers of the lines in a file that a mutant changes: the occurrence nearest to where it was.

    `None` if the file has them no more.
    """
    count = len(mutant["original"].splitlines())
    lines = source.splitlines(keepends=True)
    starts = [i for i in range(len(lines)) if "".join(lines[i : i + count]) == mutant["original"]]
    if not starts:
        return None
    start = min(starts, key=lambda i: abs(i + 1 - mutant["line"]))
    return range(start + 1, start + 1 + count)


def pytest_runtest_logreport(report):
    """Writes each test's result for `record` and `run`, which name this module to pytest as a plugin."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the controller gets the report too
    error = report.longrepr.reprcrash.message.partition("\n")[0] if hasattr(report.longrepr, "reprcrash") else ""
    with Path(os.environ["MUTATION_RESULTS"]).open("a", encoding="utf-8") as file:
        result = {"test": report.nodeid, "seconds": report.duration, "failed": report.failed, "error": error}
        file.write(json.dumps(result) + "\n")


def run_pytest(folder, results, arguments, time_limit=None):
    """Runs tests of a copy of the repository. Returns a dict for each phase of each test, and whether time ran out."""
    results.unlink(missing_ok=True)
    path = os.pathsep.join([str(folder), str(folder / "tests")])  # precedes the installed kmp
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "MUTATION_RESULTS": str(results)}
    output = results.with_suffix(".out")
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "mutation", "-p", "no:cacheprovider", *arguments],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(time_limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return read(results), True
    if process.returncode not in (0, 1) and not results.exists():
        lines = [line for line in output.read_text(encoding="utf-8").splitlines() if line]
        return [{"test": "", "seconds": 0.0, "failed": True, "error": lines[-1]}], False  # kmp cannot be imported
    return read(results), False


def read(results):
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def record(markers):
    """Runs the tests with some markers on the unchanged code, and records which of them run which line."""
    RECORDED.mkdir(exist_ok=True)
    settings = RECORDED / "settings.ini"  # coverage erases all files that begin as its data file does
    settings.write_text(f"[run]\nrelative_files = True\nsource = kmp\ndata_file = {RECORDED / 'coverage'}\n")
    arguments = ["-n", "2", "-m", markers, "-o", "filterwarnings=default"]  # coverage itself may warn
    arguments += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    results, _ = run_pytest(ROOT, RECORDED / "results.jsonl", arguments)
    failed = [result["test"] or result["error"] for result in results if result["failed"]]
    print(f"recorded {len({result['test'] for result in results})} tests, of which {len(failed)} failed: {failed}")


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


def tests_for(mutant, lines, seconds, tests_by_line):
    """Returns the tests for a mutant in the order to run them."""
    first = set().union(*(tests_by_line.get((mutant["file"], line), ()) for line in lines))
    if not first:  # a line that runs when kmp is imported
        first = set().union(*(tests for (path, _), tests in tests_by_line.items() if path == mutant["file"]))
    files = {test.partition("::")[0] for test in first}
    others = {test for test in seconds if test.partition("::")[0] in files} - first
    return sorted(first, key=seconds.get) + sorted(others, key=seconds.get)


def run(mutant, lines, tests):
    """Runs tests on a copy of the repository with one mutant. Returns which of them failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "kmp")
        subprocess.run(["git", "checkout-index", "--all", f"--prefix={folder}/"], cwd=ROOT, check=True)
        path = folder / mutant["file"]
        text = path.read_text(encoding="utf-8").splitlines(keepends=True)
        text[lines[0] - 1 : lines[-1]] = [mutant["mutated"]]
        path.write_text("".join(text), encoding="utf-8")
        selection = Path(name, "tests.txt")
        selection.write_text("\n".join(tests), encoding="utf-8")
        one_process = ["-n", "0", "--dist", "no", "-m", ""]  # the recorded slow tests too
        results, is_out_of_time = run_pytest(
            folder, Path(name, "results.jsonl"), [*one_process, "-x", f"@{selection}"], TIME_LIMIT
        )
        failed = next((result for result in results if result["failed"]), None)
        outcome = {"outcome": "time ran out" if is_out_of_time else "survived"}
        if failed:
            alone = results
            if failed["test"]:
                alone, _ = run_pytest(folder, Path(name, "alone.jsonl"), [*one_process, failed["test"]], TIME_LIMIT)
            is_killed = any(result["failed"] for result in alone)
            outcome = {"outcome": "killed" if is_killed else "fails only after other tests", "by": failed["test"]}
            outcome["error"] = failed["error"]
    done = {"id": mutant["id"], **outcome, "tests": len({result["test"] for result in results}), "of": len(tests)}
    print(json.dumps(done), flush=True)
    return done


def run_all(ids, jobs):
    """Runs the tests on the mutants with some IDs, by default all."""
    mutants = json.loads(MUTANTS.read_text(encoding="utf-8"))
    if unknown := set(ids) - {mutant["id"] for mutant in mutants}:
        raise SystemExit(f"Unknown mutants: {', '.join(sorted(unknown))}")
    seconds, tests_by_line = recorded()
    if not seconds:
        raise SystemExit("No test is recorded: see `record`.")
    prepared = []
    for mutant in mutants:
        if not ids or mutant["id"] in ids:
            path = ROOT / mutant["file"]
            lines = lines_of(mutant, path.read_text(encoding="utf-8")) if path.exists() else None
            if lines is None:
                print(json.dumps({"id": mutant["id"], "outcome": "no longer in the code"}), flush=True)
            else:
                prepared.append((mutant, lines, tests_for(mutant, lines, seconds, tests_by_line)))
    with ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(lambda arguments: run(*arguments), prepared))
    print(f"{sum(each['outcome'] == 'killed' for each in done)} of {len(done)} mutants are killed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("sample")
    commands.add_parser("record").add_argument("-m", default="", metavar="MARKERS", help="as for pytest")
    runs = commands.add_parser("run")
    runs.add_argument("ids", nargs="*", metavar="ID", help="the mutants to run; by default all")
    runs.add_argument("--jobs", type=int, default=2, help="how many mutants run at once")
    arguments = parser.parse_args()
    if arguments.command == "sample":
        MUTANTS.write_text(json.dumps(sample(), indent=1) + "\n", encoding="utf-8")
    elif arguments.command == "record":
        record(arguments.m)
    else:
        run_all(arguments.ids, arguments.jobs)


if __name__ == "__main__":
    main()
