"""The documentation site, built as `mkdocs build --strict` does.

A broken link or reference is an error.
"""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kmp

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    options = {"NO_MKDOCS_2_WARNING": "true"}  # an announcement, not about this site
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | options, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def anchors_of(site):
    pages = site.glob("api/*/index.html")
    return {
        name
        for page in pages
        for name in re.findall(r'id="(kmp[^"]*)"', page.read_text(encoding="utf-8"))
    }


def test_reference_has_every_public_name_and_no_private_one(site):
    anchors = anchors_of(site)
    modules = [getattr(kmp, name) for name in kmp.__all__ if inspect.ismodule(getattr(kmp, name))]
    names = {f"kmp.{name}" for name in kmp.__all__ if not inspect.ismodule(getattr(kmp, name))}
    at_the_top = {name.rpartition(".")[2] for name in names}
    names |= {
        f"{module.__name__}.{name}"
        for module in modules
        for name in module.__all__
        if name not in at_the_top and not inspect.ismodule(getattr(module, name))
    }
    assert (
        sorted(name for name in names if name not in anchors and not name.endswith("BIN_COUNT"))
        == []
    )
    assert [name for name in anchors if "._" in name] == []


def test_pages_of_the_repository_and_notebooks_with_their_outputs_are_in_the_site(site):
    assert "trains Keras 3 models" in (site / "index.html").read_text(encoding="utf-8")
    assert "loss scale" in (site / "changelog" / "index.html").read_text(encoding="utf-8")
    notebooks = sorted(path.parent.name for path in site.glob("notebooks/*/index.html"))
    assert notebooks == [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    first = (site / "notebooks" / notebooks[0] / "index.html").read_text(encoding="utf-8")
    assert "data:image/png" in first


def test_no_page_loads_a_file_from_another_host(site):
    for page in site.rglob("index.html"):
        sources = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"',
            page.read_text(encoding="utf-8"),
        )
        assert sources == [], page
