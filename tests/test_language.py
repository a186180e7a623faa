"""The package is written in the field's terms: private words of earlier versions do not come back."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import kmp

ROOT = Path(kmp.__file__).parent
FILES = [*sorted(ROOT.rglob("*.py")), *sorted((ROOT.parent / "kmp_cli").glob("*.py")), *sorted(ROOT.rglob("*.jinja"))]

# Each with the term to use in its place.
PRIVATE_WORDS = {
    r"tells?|told|say so|says so": "warns, raises, reports, logs, records; returns whether",
    r"culprits?|(to )?blamed?": "overflow origin",
    r"(no|a|any) trace left|no trace|without a trace|puts?[ _](\w+ )?back": "state unchanged, restores",
    r"mend(s|ed|ing)?|unmend": "fix, patch",
    r"anew": "again, rebuild, retrace, recompile",
    r"spoilt": "corrupt, non-finite",
    r"torn": "truncated",
    r"drifts?": "relative error, difference from float32",
    r"hands? on": "passes through",
    r"islands?": "float32 layers",
    r"for the sake of": "because of, for compatibility with",
    r"worked out|works? out": "computed",
    r"reckon(s|ed)?": "estimate",
    r"pictures?": "figure, plot",
    r"readings|(a|the|each|every|last|newest|this) reading": "record, snapshot",
    r"(in|leaves|makes|there is) (no )?room|rooms|floors?(?!\()": "package, module, layer",
    r"gate(s|d|able)?": "conditional update, predicated write; CI",
    r"a user's own|of one's own|of (your|their) own|by itself": "custom; automatically",
    r"sees to( it)?|see to it": "makes sure, ensures",
    r"looked at|looks at": "checks, measures",
    r"so many": "the number of",
    r"amounts? to": "is equivalent to",
}
PATTERNS = {re.compile(rf"\b({words})\b", re.IGNORECASE): term for words, term in PRIVATE_WORDS.items()}


def texts_of(path):
    """Yields `(line, text)` for each string, comment and name that a file defines."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split())
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name.replace("_", " ")
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg.replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_private_words_are_not_used(path):
    found = [
        f"{path}:{line}: {match[0]!r} (write: {term}) in {text[:100]!r}"
        for line, text in texts_of(path)
        for pattern, term in PATTERNS.items()
        if (match := pattern.search(text))
    ]
    assert found == []
