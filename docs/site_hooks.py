"""Adds pages outside this folder to the site: README, notebooks, contribution guide, changelog."""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_log = logging.getLogger("mkdocs.hooks.site")  # with --strict, its warnings are errors
_LINK = re.compile(r"(?s:```.*?```)|(\]\()(?!http|#|mailto:)([^)#]+)")  # or a block of code
_HREF = re.compile(r'(<a href=")(?!http|#|mailto:)([^"#]+)')


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for path in sorted((ROOT / "notebooks").rglob("*")):
        if path.suffix in (".ipynb", ".png", ".py"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links of the repository by those of the site.

    A link to a file that the site lacks becomes its text.
    """
    target = page.file.src_uri
    sources = {page_of: source for source, page_of in PAGES.items()}
    source = sources.get(target, f"docs/{target}")

    def on_site(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        path = "notebooks/1-first-run.ipynb" if path == "notebooks" else _page_of(path)
        return match[1] + posixpath.relpath(path, posixpath.dirname(target) or ".")

    in_site = _LINK.sub(on_site, markdown)
    return re.sub(r"\[([^\]]+)\]\(((?:\.\./)*(?:tests|kmp|benchmarks)/[^)]*)\)", r"\1", in_site)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links of a notebook by those of the site, which mkdocs-jupyter does not."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    folder = posixpath.dirname(page.file.src_uri)

    def on_site(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        target = files.get_file_from_path(_page_of(path))
        if target is None:
            _log.warning("%s links to %s, which the site lacks", page.file.src_uri, match[2])
            return match[0]
        return match[1] + target.url_relative_to(page.file)

    return _HREF.sub(on_site, html)


def _page_of(path: str) -> str:
    """Returns the path in the site of a file of the repository."""
    return PAGES.get(path, path.removeprefix("docs/"))
