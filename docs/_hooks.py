# SPDX-License-Identifier: Apache-2.0
"""What the site promises beyond what MkDocs checks: viewing a page asks no other host for anything."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.exceptions import PluginError


_FETCHED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?P<url>(?:https?:)?//[^"'\s>]+)[^>]*>"""
)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that loads a script, style, font or image from elsewhere."""
    del config
    fetched = [match["url"] for match in _FETCHED.finditer(output) if 'rel="canonical"' not in match[0]]
    if fetched:
        msg = f"{page.file.src_uri} loads {', '.join(fetched)}; keep a copy in docs/ instead"
        raise PluginError(msg)
    return output
