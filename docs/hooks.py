"""Pages of the site that are files elsewhere in the repository: nothing is written twice.

README, ARCHITECTURE, CONTRIBUTING and the benchmarks' reports are taken as they are. Their links, and those of the
pages in `docs/`, are written for readers of the repository; here they are turned to pages, and links to what is no page
(code, licences) become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/*.md", "benchmarks/plots/*")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from elsewhere."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links of the repository to links of the site."""
    uri = page.file.src_uri
    is_ours = page.file.generated_by is None
    folder = posixpath.dirname(f"docs/{uri}" if is_ours else uri)

    def turned(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in target:
            return link[0]
        found = posixpath.normpath(posixpath.join(folder, path)).removeprefix("docs/")
        if files.get_file_from_path(found) is None:
            return text
        relative = posixpath.relpath(found, posixpath.dirname(uri) or ".")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(turned, markdown)
