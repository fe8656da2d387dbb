"""A hook of mkdocs: links from the pages to files of the repository that are not pages.

In the repository they lead to the file. On the site they lead to the file at `repo_url`, or, as
long as mkdocs.yml has none, are left as plain text.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")

# Below this name mkdocs counts warnings, which --strict makes errors.
logger = logging.getLogger("mkdocs.hooks.outward_links")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Returns a page's text with the links that leave the folder of the pages replaced."""
    root = Path(config.config_file_path).parent
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(link: re.Match[str]) -> str:
        text, address = link.groups()
        path = posixpath.normpath(posixpath.join(folder, address.partition("#")[0]))
        if "://" in address or address.startswith("#") or path.startswith("docs/"):
            return link[0]
        if not (root / path).exists():
            logger.warning(f"{page.file.src_uri} links to {path}, which is not there")
        return (
            f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text
        )

    return LINK.sub(replaced, markdown)
