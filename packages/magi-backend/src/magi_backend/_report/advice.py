# SPDX-License-Identifier: Apache-2.0
"""What to do about a recompilation, by the guard that failed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from magi_backend._records.records import Recompilation


@dataclass(frozen=True)
class _Rule:
    """Advice for the guards that *pattern* matches; the text refers to the groups of the match by number."""

    pattern: str
    advice: str


_RULES = (
    _Rule(
        r"tensor '(.+?)' size mismatch at index (\d+)",
        "Mark the size before the first call, torch._dynamo.mark_dynamic({0}, {1}), and one graph serves all sizes. "
        'Where few sizes come back, options={{"magi.hot_sizes": 4}} also gives each of them code of its own.',
    ),
    _Rule(
        r"tensor '(.+?)' (?:stride|storage offset) mismatch",
        "The layout of {0} differs between calls: pass {0}.contiguous(), or always the same layout.",
    ),
    _Rule(
        r"tensor '(.+?)' (?:rank mismatch|dispatch key set mismatch|dtype mismatch|device mismatch|Tensor device)",
        "{0} comes in another form: the same number of dimensions, dtype and device in each call need one graph.",
    ),
    _Rule(
        r"tensor '(.+?)' (?:requires_grad mismatch|dtype|.*requires_grad)",
        "{0} requires gradients in some calls only; each of the two gets a graph.",
    ),
    _Rule(
        r"(?:\d+ <= |== )?(\S+?)\.size\(\)\[(\d+)\]",
        "The program asks about this size, so code for one answer does not serve the other. A size of 0 or 1 always "
        "has a graph of its own. For others, look for an if, an assert or a shape that needs the number.",
    ),
    _Rule(
        r"___check_global_state|grad_mode|GRAD_MODE|autocast|torch_function",
        "The calls differ in what is set around them: grad mode, autocast, the default dtype or the number of threads. "
        "Call it under the same settings, or accept a graph for each.",
    ),
    _Rule(
        r"len\((.+?)\)|(.+?)\.__len__",
        "A list or a dict has another length. Dynamo unrolls it: pass a tensor with a dimension for the items.",
    ),
    _Rule(
        r"___check_type_id\((.+?),|type\((.+?)\)",
        "An argument has another type in this call. Pass the same types, or compile a function for each.",
    ),
    _Rule(
        r"___check_obj_id\((.+?),|id\((.+?)\)| is ",
        "It is another object than before, such as a function, a class or a module created again in each call. Make it "
        "once and pass it again.",
    ),
    _Rule(
        r"BACKEND_MATCH",
        "The same function was compiled by two backends, or with other options.",
    ),
    _Rule(
        r"^(\S+\.\S+) == …",
        "{0} is a number, and its value is part of the code. Where it changes between calls, pass it as an argument; "
        "a number on a module stays open with torch._dynamo.config.allow_unspec_int_on_nn_module = True. A float field "
        "of a record is a constant: make it a Tensor without dimensions.",
    ),
    _Rule(
        r"^(\S+) == …",
        "{0} is a number, and its value is part of the code. After the first change Dynamo leaves it open, where the "
        "program permits that; a Tensor without dimensions, torch.tensor({0}), is open from the first call on.",
    ),
    _Rule(
        r"^(\S+) == '",
        "{0} is a string, and the code is for one of its values. Compile a function for each value.",
    ),
    _Rule(
        r"Duplicate tensor|duplicate tensor",
        "The same tensor is passed twice in some calls and not in others. Pass a copy, or always the same way.",
    ),
)
_OTHERWISE = "TORCH_LOGS=recompiles_verbose says which guards failed, and where the program needs them."


def advice_on(found: Recompilation) -> str:
    """A sentence on how to avoid the recompilation *found*.

    Example:
        >>> from magi_backend._records.records import Recompilation
        >>> advice_on(Recompilation("0/0", "tensor 'x' size mismatch at index 0. expected 3, actual 5"))[:60]
        'Mark the size before the first call, torch._dynamo.mark_dyna'
    """
    for rule in _RULES:
        if match := re.search(rule.pattern, found.guard):
            return rule.advice.format(*(group or "it" for group in match.groups()))
    return _OTHERWISE
