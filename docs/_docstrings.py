# SPDX-License-Identifier: Apache-2.0
"""Docstrings as they are written in the packages, told to the site's parser in its own words."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object


_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]+)`")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class PlainDocstrings(Extension):
    """`Example:` is a section of Google's style, where the parser knows only `Examples:`; roles of Sphinx are code."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called for each module, class, function and attribute, once its docstring is read."""
        if isinstance(obj.docstring, Docstring):
            text = _EXAMPLE.sub("Examples:", obj.docstring.value)
            obj.docstring.value = _ROLE.sub(r"`\1`", text)
