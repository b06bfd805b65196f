"""What makes the pages, written for a reader of the repository, into a site.

The site mirrors the repository, with docs/ at its top: a link from a page to an example or to
CONTRIBUTING.md leads to a copy in the site. The marks of code blocks, which tell the tests what to
run, become titles.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "examples/*")  # of docs/, and in the site

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")
_FENCE = re.compile(r"^```(\w+) +([\w./-]+)$", flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links and code blocks as the site needs them."""
    uri = page.file.src_uri
    outside = not (Path(config.docs_dir) / uri).exists()
    source = uri if outside else f"docs/{uri}"
    markdown = _LINK.sub(lambda link: site_link(source, link[1]), markdown)
    return _FENCE.sub(lambda fence: site_fence(fence[1], fence[2]), markdown)


def site_link(source: str, link: str) -> str:
    """A relative link in the file `source` of the repository, as it is from there in the site.
    Pure."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return posixpath.relpath(_site_path(target), posixpath.dirname(_site_path(source)) or ".")


def site_fence(language: str, mark: str) -> str:
    """The first line of a code block; a mark that is a file's name is its title. Pure."""
    return f"```{language}" if mark == "runnable" else f'```{language} title="{mark}"'


def _site_path(path: str) -> str:
    return path.removeprefix("docs/")
