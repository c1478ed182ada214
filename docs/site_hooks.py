"""The parts of the site besides docs/: MkDocs calls these functions (mkdocs.yml, hooks).

README.md, CONTRIBUTING.md and CHANGELOG.md become pages. If a page links to a file outside docs/,
the file is copied into the site, unless it is Markdown.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
TEXT_OF_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)/?\)")
FILE_AS_TEXT = re.compile(r"\[(?:docs/)?([\w-]+\.md)\](?=\()")
TITLE = re.compile(r"^# (.+)$", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    for target in sorted(linked_files(files)):
        path = str(ROOT / target)
        files.append(File.generated(config, target, abs_src_path=path))
    return files


def linked_files(files: Files) -> set[str]:
    """Returns the paths, from the repository's root, of files outside docs/ that pages link to."""
    paths = set()
    for file in files.documentation_pages():
        for match in LINK.finditer(file.content_string):
            target = from_root(match[1], file.src_uri)
            if target is not None and (ROOT / target).is_file() and not target.endswith(".md"):
                paths.add(target)
    return paths


def from_root(link: str, page: str) -> str | None:
    """Returns the target of a page's link if it is outside docs/, else None."""
    if ":" in link or link.startswith("/"):
        return None
    folder = "" if page in ROOT_PAGES.values() else f"docs/{os.path.dirname(page)}"
    target = os.path.normpath(os.path.join(folder, link))
    return None if target.startswith(("docs/", "..")) else target


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text of a page in the site.

    Links out of docs/ lead to the copies; folders and other Markdown files are only named. A link
    whose text is the name of a page shows the page's title.
    """
    uri = page.file.src_uri
    depth = "../" * uri.count("/")

    def link(match: re.Match[str]) -> str:
        anchor = match[2] or ""
        target = from_root(match[1], uri)
        if target is None:
            inside = match[1].removeprefix("docs/") if uri in ROOT_PAGES.values() else match[1]
            return f"]({inside}{anchor})"
        if target == "README.md":
            return f"]({depth}index.md)"
        return f"]({depth}{ROOT_PAGES.get(target, target)}{anchor})"

    def unlinked(match: re.Match[str]) -> str:
        target = from_root(match[2], uri)
        if target is None or target in ROOT_PAGES or target == "README.md":
            return match[0]
        if target.endswith(".md"):
            return f"`{target}`"
        return f"{match[1]} (`{target}/`)" if (ROOT / target).is_dir() else match[0]

    titled = FILE_AS_TEXT.sub(lambda match: f"[{title_of(match[1])}]", markdown)
    return LINK.sub(link, TEXT_OF_LINK.sub(unlinked, titled))


def title_of(name: str) -> str:
    """Returns the title of a page, such as `cli.md`; its name if the page does not exist."""
    path = (ROOT if name in ROOT_PAGES else DOCS) / name
    match = TITLE.search(path.read_text("utf-8")) if path.is_file() else None
    return match[1] if match else name
