"""Pages of the site that are files elsewhere in the repository: nothing is written twice.

ARCHITECTURE, CONTRIBUTING, the changelog and the benchmarks' reports are taken as they are, and of the README the
sections that a page asks for by `<!-- README: Heading -->`. Links are written for readers of the repository; here they
are turned to pages, and links to what is no page (code, licences) become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/*.md", "benchmarks/plots/*")
README_PART = re.compile(r"<!-- README: (.+?) -->")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from elsewhere."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Take in sections of the README, and turn links of the repository to links of the site."""
    uri = page.file.src_uri
    is_ours = page.file.generated_by is None
    folder = posixpath.dirname(uri) or "."

    def turned(text: str, origin: str) -> str:
        def link(match: re.Match[str]) -> str:
            mark, label, target = match.groups()
            path, _, anchor = target.partition("#")
            if not path or ":" in target:
                return match[0]
            found = posixpath.normpath(posixpath.join(origin, path)).removeprefix("docs/")
            if files.get_file_from_path(found) is None:
                return label
            return f"{mark}[{label}]({posixpath.relpath(found, folder)}{'#' + anchor if anchor else ''})"

        return LINK.sub(link, text)

    page_text = turned(markdown, posixpath.dirname(f"docs/{uri}" if is_ours else uri))
    return README_PART.sub(lambda part: turned(readme_section(part[1]), ""), page_text)


def readme_section(heading: str) -> str:
    """What stands under a heading of the README, without it."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.M | re.S)
    if found is None:
        raise ValueError(f"the README has no section {heading!r}")
    return found[1].strip()
