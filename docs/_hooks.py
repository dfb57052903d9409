# SPDX-License-Identifier: Apache-2.0
"""What the site has beyond what MkDocs does: pages that ask no other host for anything, and news not released yet."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError


_FETCHED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?P<url>(?:https?:)?//[^"'\s>]+)[^>]*>"""
)
_CODE = re.compile(r"`[^`\n]+`")


def on_config(config: Any) -> Any:
    """Say at the foot of each page which version it describes."""
    version = (Path(config.config_file_path).parent / "VERSION").read_text().strip()
    config.copyright = f"magi {version}"
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The two files of the repository's root that are pages too: their links, and what is not released yet."""
    del files
    root = Path(config.config_file_path).parent
    if page.file.src_uri == "contributing.md":
        return (root / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    if page.file.src_uri == "changelog.md":
        return f"{(root / 'CHANGELOG.md').read_text()}\n{_unreleased(root)}"
    # In a table GitHub needs a backslash before a bar, also in code; Python-Markdown would show it.
    return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)


def _unreleased(root: Path) -> str:
    """The fragments of the changelog, if there are any, as a release would write them."""
    if not any((root / "changelog.d").glob("*.md")):
        return ""
    version = (root / "VERSION").read_text().strip()
    draft = ("towncrier", "build", "--draft", "--version", version, "--date", "not released yet")
    return subprocess.run([sys.executable, "-m", *draft], cwd=root, capture_output=True, text=True, check=True).stdout


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that loads a script, style, font or image from elsewhere."""
    del config
    fetched = [match["url"] for match in _FETCHED.finditer(output) if 'rel="canonical"' not in match[0]]
    if fetched:
        msg = f"{page.file.src_uri} loads {', '.join(fetched)}; keep a copy in docs/ instead"
        raise PluginError(msg)
    return output
