import dataclasses
import runpy
from pathlib import Path

from kmp.records import replay

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api" / "records.md").read_text(encoding="utf-8")


def test_reference_lists_the_keys_of_the_schema():
    script = runpy.run_path(str(DOCS / "generate_schema.py"))
    assert "- `overflow_count`: integer, " in PAGE
    assert "- `last_loss`: float or null, " in PAGE
    assert script["generated"](PAGE) == PAGE, "run: python docs/generate_schema.py"


def test_reference_documents_every_type_of_a_replay():
    types = {name for name, value in vars(replay).items() if dataclasses.is_dataclass(value)}
    documented = {
        line.rpartition(".")[2] for line in PAGE.splitlines() if line.startswith("::: kmp.records.")
    }
    assert types <= documented
