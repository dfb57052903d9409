# SPDX-License-Identifier: Apache-2.0
"""The function that the decorator returns: it reads the arguments, takes them apart, and chooses a lane.

| lane | when | what is called |
|---|---|---|
| traced | Dynamo reads the function | the OpOverload: one node of the graph |
| careful | a gradient, a transform, forward-mode AD, torch.jit.trace, `__torch_function__` | `call_with_care` |
| fast | otherwise | the dispatcher below the autograd keys, without torch's bindings around it |

In eager code, the object of a handle that is passed in its place is looked up. A compiler cannot do that, so under a
compiler such a call goes to the opaque form of the op. So does one with a torch.Generator, which no graph holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from magi_opschema._model.lowering import Parameter, SignatureLowering
from magi_opschema._model.tree import Leaf, Node, Optional, Record, Sequence, nodes
from magi_opschema._torch_compat import is_dynamo_compiling

from .functions import argument_texts, default_name, flatten_parameters, passed, tuple_text
from .nodes import class_name, read, rebuild
from .source import Writer


def handle_conditions(node: Node, value: str, to: Writer) -> Iterator[str]:
    """Conditions under which *value* is, or holds, what only the form for handles takes."""
    if not any(part.is_generator if isinstance(part, Leaf) else _may_be_handle(part) for part in nodes(node)):
        return
    match node:
        case Leaf():
            yield f"{to.bind('is_dynamo_compiling', is_dynamo_compiling)}() and {value} is not None"
        case Record():
            if node.handle is not None:
                # Dynamo sees a symbolic int as an int, and has no stand-ins for objects. A class that two ops name is
                # compared at every call, in Python.
                asked = (
                    "({isinstance}({value}, {int}) if {is_dynamo_compiling}() else {isinstance}({value}, {handles}))"
                )
                yield to.expression(node.handle, asked, value)
            is_one = f"{to.builtin('type')}({value}) is {class_name(node, to)}"
            if node.kind == "typeddict":
                keys = to.bind(f"keys_of_{node.cls.__name__}", {part.name for part in node.fields})
                is_one = f"{to.builtin('isinstance')}({value}, {to.builtin('dict')}) and {value}.keys() == {keys}"
            for part in node.fields:
                yield from _within(is_one, handle_conditions(part.node, read(node, value, part.name, to), to))
        case Sequence():
            count = f"{to.builtin('len')}({value}) == {len(node.items)}"
            is_one = f"{to.builtin('isinstance')}({value}, {to.builtin('tuple')}) and {count}"
            for i, item in enumerate(node.items):
                yield from _within(is_one, handle_conditions(item, f"{value}[{i}]", to))
        case Optional():
            yield from handle_conditions(node.inner, value, to)


def _may_be_handle(node: Node) -> bool:
    return isinstance(node, Record) and node.handle is not None


def _within(outer: str, inner: Iterator[str]) -> Iterator[str]:
    return (f"{outer} and {condition}" for condition in inner)


def compile_exposed(lowering: SignatureLowering, bound: Mapping[str, object], title: str) -> Callable[..., Any]:
    """The function that the decorator returns.

    *bound* holds, by name, `torch_op`, the function that refuses a call that does not fit, and what the eager lanes
    call.
    """
    to = Writer(lowering, is_traced=True)
    names = {name: to.bind(name, value) for name, value in bound.items()}
    parameters = _open_call(lowering.parameters, names["refuse_call"], to)
    _write_by_handle(lowering, names, to)
    if lowering.path == "flattened":
        exprs = flatten_parameters(lowering.parameters, to)
        for leaf in lowering.leaves:
            if leaf.is_tensor or leaf.is_fixed:  # it is used twice, and should be read once
                exprs[leaf.name] = to.local(leaf.name, exprs[leaf.name])
        if fixed := [exprs[leaf.name] for leaf in lowering.leaves if leaf.is_fixed]:
            with to.block(f"if {names['is_dynamo_compiling']}():"):
                for text in fixed:
                    to.line(f"{text} = {names['fixed']}({text})")
    else:
        # The kernel checks the values; here, a check of a Literal would make a symbolic int a constant.
        exprs = {parameter.name: parameter.name for parameter in lowering.parameters}
    arguments = ", ".join(map(passed, lowering.arguments, argument_texts(lowering.arguments, exprs, to)))
    output = to.temporary("output")
    with to.block(f"if {names['is_dynamo_compiling']}():"):
        to.line(f"{output} = {names['torch_op']}({arguments})")
    with to.block("else:"):
        _write_eager_lanes(lowering, exprs, arguments, names, to)
    returned = output
    if lowering.returns is not None and lowering.rebuilds_returns:
        if leaf_names := [leaf.name for leaf in lowering.return_leaves]:
            to.line(f"{', '.join(leaf_names)} = {output}")
        returned = rebuild(lowering.returns, to)
    to.line(f"return {returned}")
    doc = f"{'Flatten the arguments and call' if lowering.path == 'flattened' else 'Call'} {lowering.title}."
    return to.function(lowering.name, parameters, doc, title)


def _write_by_handle(lowering: SignatureLowering, names: Mapping[str, str], to: Writer) -> None:
    """Write the lines for handles that are passed instead of objects that would be taken apart."""
    for known in lowering.parameters:
        found, value = known.node.inner if isinstance(known.node, Optional) else known.node, known.name
        if isinstance(found, Record) and found.handle is not None:
            is_handle = f"{to.builtin('isinstance')}({value}, {to.builtin('int')})"
            with to.block(f"if not {names['is_dynamo_compiling']}() and {is_handle}:"):
                to.line(f"{value} = {to.expression(found.handle, found.handle.codec.decode, value)}")
    conditions = [text for known in lowering.parameters for text in handle_conditions(known.node, known.name, to)]
    if conditions:
        arguments = ", ".join(passed(parameter, parameter.name) for parameter in lowering.parameters)
        with to.block(f"if {' or '.join(conditions)}:"):
            to.line(f"return {names['by_handle']}({arguments})")


def _write_eager_lanes(
    lowering: SignatureLowering, exprs: Mapping[str, str], arguments: str, names: Mapping[str, str], to: Writer
) -> None:
    """Write the call outside of compiled code: through `call_with_care`, or directly to the dispatcher."""
    output, error, context = map(to.temporary, ("output", "error", "context"))
    with to.block("try:"):
        with to.block(f"if {_needs_more_keys(lowering, exprs, names)}:"):
            to.line(f"{output} = {names['call_with_care']}({arguments})")
        with to.block("else:"):
            if lowering.mutated:
                to.line(f"{names['increment_version']}({_mutated_text(lowering, exprs)})")
            with to.block("try:"):
                to.line(f"{context} = {names['unused_contexts']}.pop()")
            with to.block(f"except {to.builtin('IndexError')}:"):
                to.line(f"{context} = {names['below_autograd']}()")
            with to.block(f"with {context}:"):
                to.line(f"{output} = {names['dispatch']}({', '.join(filter(None, (names['handle'], arguments)))})")
            to.line(f"{names['unused_contexts']}.append({context})")
    with to.block(f"except {to.builtin('Exception')} as {error}:"):
        values = ", ".join([error, names["torch_op"], *(parameter.name for parameter in lowering.parameters)])
        to.line(f"{names['translate_error']}({values})")
        to.line("raise")


def _needs_more_keys(lowering: SignatureLowering, exprs: Mapping[str, str], names: Mapping[str, str]) -> str:
    """The condition under which a call must not go straight to the keys below autograd.

    Of a mutating op only the mutated tensors matter to autograd: a gradient never flows through it.
    """
    tensors = [leaf for leaf in lowering.leaves if leaf.is_tensor]
    alone = ", ".join(exprs[leaf.name] for leaf in tensors if not leaf.is_list)
    conditions = [
        f"{names['are_transforms_active']}()",
        # This reads an attribute, because a call would take as long as the one above.
        f"{names['forward_ad']}._current_level >= 0",
        f"{names['tracing_state']}() is not None",
        # Without an argument it would not look for a mode.
        f"{names['has_torch_function']}({alone or names['handle']})",
    ]
    for leaf in tensors:
        if leaf.is_list:
            listed = f"{exprs[leaf.name]} or ()" if leaf.is_optional else exprs[leaf.name]
            conditions.append(f"{names['has_torch_function_among']}({listed})")
    watched = lowering.mutated or lowering.arguments
    watched_texts = [exprs[leaf.name] for argument in watched for leaf in argument.leaves if leaf.is_tensor]
    if watched_texts:
        conditions.append(f"{names['is_grad_enabled']}() and {names['any_requires_grad']}({', '.join(watched_texts)})")
    return " or ".join(conditions)


def _mutated_text(lowering: SignatureLowering, exprs: Mapping[str, str]) -> str:
    """The mutated tensors as one tuple: `(out, *outs, *(() if maybe is None else (maybe,)))`."""
    texts = []
    for argument in lowering.mutated:
        value = exprs[argument.name]
        if argument.schema_type == "Tensor[]":
            value = f"*{value}"
        elif argument.schema_type.endswith("?"):
            value = f"*(() if {value} is None else ({value},))"
        texts.append(value)
    return tuple_text(texts)


def _open_call(parameters: tuple[Parameter, ...], refuse_call: str, to: Writer) -> list[str]:
    """Write the lines that give each parameter its value, or refuse the call; return parameters that accept any call.

    Python would refuse a call before a line of the function runs. So a parameter that can be given by position is
    positional-only for Python, and is looked up among the arguments given by name.
    """
    empty, extra, named = to.bind("empty", inspect.Parameter.empty), to.temporary("extra"), to.temporary("named")
    by_position = [parameter for parameter in parameters if not parameter.is_keyword_only]
    if by_position:
        with to.block(f"if {named}:"):
            for parameter in by_position:
                with to.block(f"if {parameter.name} is {empty}:"):
                    to.line(f"{parameter.name} = {named}.pop({parameter.name!r}, {empty})")
    for parameter in parameters:
        if parameter.has_default:
            with to.block(f"if {parameter.name} is {empty}:"):
                to.line(f"{parameter.name} = {default_name(parameter, to)}")
    absent = [f"{parameter.name} is {empty}" for parameter in parameters if not parameter.has_default]
    with to.block(f"if {' or '.join([extra, named, *absent])}:"):
        to.line(f"{refuse_call}({tuple_text(parameter.name for parameter in parameters)}, {extra}, {named})")
    texts = [f"{parameter.name}={empty}" for parameter in by_position]
    by_name = [f"{parameter.name}={empty}" for parameter in parameters if parameter.is_keyword_only]
    return [*texts, *(["/"] if texts else []), f"*{extra}", *by_name, f"**{named}"]
