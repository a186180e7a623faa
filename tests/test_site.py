"""The documentation site, built as `mkdocs build --strict` does.

A broken link or reference is an error.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    # Without `--quiet`, which passes over broken anchors.
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    options = {"NO_MKDOCS_2_WARNING": "true"}  # an announcement, not about this site
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | options, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_overview_links_the_entry_of_each_name_and_no_private_one(site):
    anchors = {
        name
        for page in site.glob("api/*/index.html")
        for name in re.findall(r'id="(kmp[^"]*)"', page.read_text(encoding="utf-8"))
    }
    overview = (site / "api" / "index.html").read_text(encoding="utf-8")
    linked = set(re.findall(r'href="[a-z]+/#(kmp[^"]*)"', overview))
    assert "kmp.enable" in linked
    assert linked <= anchors
    assert [name for name in anchors if "._" in name] == []


def test_pages_of_the_repository_and_notebooks_with_their_outputs_are_in_the_site(site):
    assert "trains Keras 3 models" in (site / "index.html").read_text(encoding="utf-8")
    assert "loss scale" in (site / "changelog" / "index.html").read_text(encoding="utf-8")
    notebooks = sorted(path.parent.name for path in site.glob("notebooks/*/index.html"))
    assert notebooks == [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    first = (site / "notebooks" / notebooks[0] / "index.html").read_text(encoding="utf-8")
    assert "data:image/png" in first


def test_links_of_notebooks_lead_to_files_of_the_site(site):
    for page in site.glob("notebooks/*/index.html"):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r'<a href="(?!http|#|mailto:)([^"#]+)', text):
            target = page.parent / link
            assert target.is_file() or (target / "index.html").is_file(), (page, link)


def test_no_page_loads_a_file_from_another_host(site):
    for page in site.rglob("index.html"):
        sources = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"',
            page.read_text(encoding="utf-8"),
        )
        assert sources == [], page
