# SPDX-License-Identifier: Apache-2.0
"""The names that a user has for the inputs of a captured graph: ``blocks.0.weight``, ``cfg.scale``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from magi_backend import _torch_compat


if TYPE_CHECKING:
    from torch.fx import GraphModule

_ROOT = re.compile(r"[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def input_names(gm: GraphModule) -> dict[str, str]:
    """The name of each input of *gm* by its placeholder: the name of a parameter in its module, or that of an argument.

    Inputs whose source Dynamo does not give are left out.
    """
    found = {
        str(node.target): readable(_torch_compat.source_name(node)) for node in gm.graph.find_nodes(op="placeholder")
    }
    return {placeholder: name for placeholder, name in found.items() if name}


def readable(source: str) -> str:
    """*source*, Dynamo's Python expression for a value, as its owner would write it; empty if it cannot be parsed.

    Example:
        >>> readable("L['self']._modules['blocks']._modules['0']._parameters['weight']")
        'blocks.0.weight'
        >>> readable("L['cfg'].scale")
        'cfg.scale'
    """
    root = _ROOT.match(source)
    if root is None:
        return ""
    path = _MEMBER.sub(r".\1", source[root.end() :])
    return path.removeprefix(".") if root[1] == "self" and path else root[1] + path
