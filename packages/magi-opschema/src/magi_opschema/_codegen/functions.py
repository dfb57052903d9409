# SPDX-License-Identifier: Apache-2.0
"""The functions that are generated for an op, whole and readable.

| function | takes | does |
|---|---|---|
| twin | the flat arguments | rebuilds the user's arguments, calls the user's function, flattens its output |
| refusals | the flat arguments | raises the error about the first value that the signature refuses |
| flatten | the user's arguments | returns the flat ones, as a tuple |
| saved | the slots | returns what a backward needs to know of each |
| exposed | the user's arguments | is what the decorator returns: takes them apart, and chooses a lane |

The functions for values outside of a call are in `_call.bridge`. The lanes of the exposed function:

| lane | when | what is called |
|---|---|---|
| traced | Dynamo reads the function | the OpOverload: one node of the graph |
| careful | a gradient, a transform, forward-mode AD, torch.jit.trace, `__torch_function__` | `call_with_care` |
| fast | otherwise | the dispatcher below the autograd keys, without torch's bindings around it |

In eager code, the object of a handle that is passed in its place is looked up. A compiler cannot do that, so under a
compiler such a call goes to the opaque form of the op. So does one with a torch.Generator, which no graph holds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

from magi_opschema._model.lowering import Parameter, SignatureLowering
from magi_opschema._model.schema import Argument, python_type
from magi_opschema._model.tree import (
    Leaf,
    MaskedList,
    Node,
    Optional,
    Record,
    Sequence,
    children,
    flat_name,
    leaves,
    nodes,
)
from magi_opschema._torch_compat import is_dynamo_compiling
from magi_opschema.errors import ReturnValueError

from .nodes import class_name, flatten, read, rebuild
from .source import Writer, compile_at_first_call


Purpose = Literal["lowered", "kernel", "fake"]

_TWIN_DOCS: dict[Purpose, str] = {
    "lowered": "The body of {name} at its flat signature.",
    "kernel": "The body of {name} as the dispatcher calls it; the first real call is checked.",
    "fake": "The fake of {name} at its flat signature.",
}


def compile_twin(
    lowering: SignatureLowering,
    fn: Callable[..., Any],
    purpose: Purpose,
    check: object = None,
    run_checked: Callable[[tuple[Any, ...]], Any] | None = None,
) -> Callable[..., Any]:
    """The flat twin of *fn*, a body or a fake at the user's signature, for one *purpose*.

    While the attribute `pending` of *check* is true, calls are passed to *run_checked*.
    """
    to = Writer(lowering, is_description=purpose == "fake")
    call = to.bind("fn", fn)
    if check is not None:
        with to.block(f"if {to.bind('check', check)}.pending:"):
            arguments = tuple_text(argument.name for argument in lowering.arguments)
            to.line(f"return {to.bind('run_checked', run_checked)}({arguments})")
    open_arguments(lowering.arguments, to)
    conditions = [condition for _, condition in _refusals(lowering, to, are_real=check is not None)]
    if conditions:
        refuse = compile_at_first_call(functools.partial(compile_refusals, lowering))
        with to.block(f"if {' or '.join(conditions)}:"):
            flat = ", ".join(passed(argument, argument.name) for argument in lowering.arguments)
            to.line(f"{to.bind('refuse', refuse)}({flat})")
    values = [rebuild(parameter.node, to) for parameter in lowering.parameters]
    output = to.temporary("output")
    to.line(f"{output} = {call}({', '.join(map(passed, lowering.parameters, values))})")
    # The parameters keep their values, because an output may be named like one of them.
    of_output = replace(to, returned=ReturnValueError, are_locals_reserved=True)
    if lowering.returns is None:
        with to.block(f"if {output} is not None:"):
            to.line(f"{to.bind('reject_output', of_output.reject(None))}({output})")
    texts = ["None"] if lowering.returns is None else flatten(lowering.returns, output, of_output)
    to.line(f"return {texts[0] if len(texts) == 1 else tuple_text(texts)}")
    doc = _TWIN_DOCS[purpose].format(name=lowering.name)
    title = f"{purpose} {fn.__module__}.{fn.__qualname__}"
    twin = to.function(f"{lowering.name}_{purpose}", _with_defaults(lowering.arguments, to), doc, title)
    if purpose == "lowered":
        # The annotations of the flat signature, for torch.library.infer_schema and other readers.
        outputs = [python_type(leaf.schema_type) for leaf in lowering.return_leaves]
        whole = None if lowering.returns is None else outputs[0] if len(outputs) == 1 else tuple[tuple(outputs)]  # type: ignore[misc]
        annotations = {known.name: python_type(known.schema_type) for known in lowering.arguments}
        twin.__annotations__ = {**annotations, "return": whole}
    return twin


def compile_refusals(lowering: SignatureLowering) -> Callable[..., None]:
    """A function of the flat arguments that raises the error about the first value that the signature refuses.

    The exposed function has checked most values, but `torch.ops.namespace.op` can be called with any. An encoded value
    is refused where it is decoded, so the function decodes it.
    """
    to = Writer(lowering)
    open_arguments(lowering.arguments, to)
    for leaf, condition in _refusals(lowering, to, are_real=False):
        with to.block(f"if {condition}:"):
            to.line(f"{to.bind(f'reject_{leaf.name}', to.reject(leaf))}({leaf.name})")
    for leaf, flags in _leaves_with_flags(lowering):
        if not leaf.codec.described and "{reject}" in leaf.codec.decode:
            text = to.expression(leaf, leaf.codec.decode, leaf.name)
            conditions = [*flags, *([_is_no_symbol(leaf, to)] if _may_be_symbol(leaf) else [])]
            with to.block(f"if {' and '.join(conditions)}:") if conditions else nullcontext():
                to.line(text)
    to.line("return None")
    parameters = _with_defaults(lowering.arguments, to)
    return to.function("refuse_values", parameters, "Check the values.", f"values {lowering.name}")


def _refusals(lowering: SignatureLowering, to: Writer, *, are_real: bool) -> Iterator[tuple[Leaf, str]]:
    """The leaves, each with a condition under which its value is refused, as code with flat names.

    A number may be symbolic unless *are_real*, and a symbol is not of the class that it stands for.
    """
    for leaf, flags in _leaves_with_flags(lowering):
        if leaf.refuses_none:
            yield leaf, " and ".join([*flags, f"{leaf.name} is None"])
        if leaf.codec.keeps_value and leaf.codec.refuse:
            condition = f"({to.expression(leaf, leaf.codec.refuse, leaf.name)})"
            if not are_real and _may_be_symbol(leaf):
                condition = f"{_is_no_symbol(leaf, to)} and {condition}"
            yield leaf, " and ".join([*flags, condition])


def _leaves_with_flags(lowering: SignatureLowering) -> Iterator[tuple[Leaf, tuple[str, ...]]]:
    """The leaves, each with the names of the flags that are true if it has a value; the flags are not among them."""

    def below(node: Node, flags: tuple[str, ...]) -> Iterator[tuple[Leaf, tuple[str, ...]]]:
        match node:
            case Leaf():
                yield node, flags
            case Optional():
                yield from below(node.inner, (*flags, node.is_some.name))
            case _:
                for child in children(node):
                    yield from below(child, flags)

    for parameter in lowering.parameters:
        yield from below(parameter.node, ())


def _may_be_symbol(leaf: Leaf) -> bool:
    return not leaf.schema_type.startswith("str") and not leaf.is_opaque


def _is_no_symbol(leaf: Leaf, to: Writer) -> str:
    type_, numbers = to.builtin("type"), to.bind("numbers", (int, bool))
    if leaf.is_list:
        return f"{to.builtin('all')}([{type_}(item) in {numbers} for item in {leaf.name} or ()])"
    return f"{type_}({leaf.name}) in {numbers}"


def compile_saved(lowering: SignatureLowering) -> Callable[..., tuple[tuple[bool, ...], dict[str, Any]]]:
    """A function from a flag for each slot, and the slots, to what a backward needs to know.

    That is a flag for each parameter, true if it is set for one of its leaves; and by name, the shapes of the Tensors
    (None for None, a list of shapes for a list) and the masks of lists of optional Tensors.
    """
    to = Writer(lowering)
    flags = to.temporary("flags")
    position = {slot.name: i for i, slot in enumerate(lowering.slots)}
    wanted: list[str] = []
    shapes: dict[str, str] = {}
    for parameter in lowering.parameters:
        tensors = [leaf for leaf in leaves(parameter.node) if leaf.is_tensor]
        wanted.append(" or ".join(f"{flags}[{position[leaf.name]}]" for leaf in tensors) or "False")
        shapes |= {leaf.name: _shape_text(leaf) for leaf in tensors}
        masks = [part.present.name for part in nodes(parameter.node) if isinstance(part, MaskedList)]
        shapes |= {name: name for name in masks}
    saved = ", ".join(f"{name!r}: {text}" for name, text in shapes.items())
    to.line(f"return {tuple_text(wanted)}, {{{saved}}}")
    doc = f"What the backward of {lowering.name} will ask."
    return to.function(f"{lowering.name}_saved", [flags, *position], doc, f"saved {lowering.name}")


def _shape_text(leaf: Leaf) -> str:
    text = f"[item.shape for item in {leaf.name}]" if leaf.is_list else f"{leaf.name}.shape"
    return f"(None if {leaf.name} is None else {text})" if leaf.schema_type.endswith("?") or leaf.is_list else text


def compile_unpack(lowering: SignatureLowering, argument: Argument) -> Callable[..., tuple[Any, ...]]:
    """A function from the flat arguments, all by name, to a tuple of the leaves that *argument* holds."""
    to = Writer(lowering)
    _unpack(argument, to)
    to.line(f"return {tuple_text(leaf.name for leaf in argument.leaves)}")
    names = [known.name for known in lowering.arguments]
    return to.function("unpack", names, f"Unpack {argument.name}.", f"unpack {lowering.name}")


def compile_flatten(
    parameters: tuple[Parameter, ...], to: Writer, title: str, arguments: tuple[Argument, ...] = ()
) -> Callable[..., tuple[Any, ...]]:
    """A function from the user's arguments to a tuple of the flat ones, or of the leaves without *arguments*."""
    exprs = flatten_parameters(parameters, to)
    texts = argument_texts(arguments, exprs, to) if arguments else list(exprs.values())
    to.line(f"return {tuple_text(texts)}")
    return to.function("flatten", _with_defaults(parameters, to), "Take the arguments apart.", title)


def flatten_parameters(parameters: tuple[Parameter, ...], to: Writer) -> dict[str, str]:
    """Write the lines that take the parameters apart; return an expression for each leaf, by its name."""
    exprs: dict[str, str] = {}
    for parameter in parameters:
        names = [leaf.name for leaf in leaves(parameter.node)]
        exprs |= dict(zip(names, flatten(parameter.node, parameter.name, to), strict=True))
    return exprs


def argument_texts(arguments: tuple[Argument, ...], exprs: Mapping[str, str], to: Writer) -> list[str]:
    """An expression for each argument, made from those of its leaves."""
    return [_pack(argument, [exprs[leaf.name] for leaf in argument.leaves], to) for argument in arguments]


def _pack(argument: Argument, exprs: list[str], to: Writer) -> str:
    packing = argument.packing
    if packing is None:
        return exprs[0]
    items = []
    for leaf, text in zip(argument.leaves, exprs, strict=True):
        value = _refuse_unless(leaf, packing.kinds, text, to) if packing.kinds else text
        encoded = to.expression(replace(leaf, name="packed", codec=packing.codec), packing.codec.encode, value)
        items.append(packing.item.format(value=value, encoded=encoded, len=to.builtin("len")))
    return packing.whole.format(items=", ".join(items), tensor=to.temporary("tensor"))


def _unpack(argument: Argument, to: Writer) -> None:
    """Write the lines that give each leaf of a packed *argument* its name again."""
    packing = argument.packing
    if packing is None or not packing.holds_values:
        return
    names = {
        "list": argument.name,
        "leaves": ", ".join(leaf.name for leaf in argument.leaves),
        "rest": to.temporary(argument.name),
        "take": to.bind("take", _take),
        **{name: to.builtin(name) for name in ("iter", "next")},
    }
    if packing.head:
        to.line(packing.head.format(**names))
    for i, leaf in enumerate(argument.leaves if packing.read else ()):
        packed = Leaf(leaf.path, "str", "packed", packing.codec)
        decoded = to.expression(packed, packing.codec.decode, f"{argument.name}[{i}]")
        to.line(f"{leaf.name} = {packing.read.format(i=i, decoded=decoded, **names)}")


def _take(items: Iterator[Any], length: int) -> list[Any] | None:
    """The next *length* of *items*; None for a negative length."""
    return None if length < 0 else [next(items) for _ in range(length)]


def _refuse_unless(leaf: Leaf, kinds: tuple[type, ...], value: str, to: Writer) -> str:
    """Write the check that *value* is of one of *kinds*, or None for an optional leaf; return its local name."""
    if not value.isidentifier():
        # The leaf's own name is not used, because the expression may read it, and is written again for the length.
        name = to.temporary(f"{leaf.name}_packed")
        to.line(f"{name} = {value}")
        value = name
    accepted = to.bind(f"kinds_of_{leaf.name}", (*kinds, *((type(None),) if leaf.is_optional else ())))
    with to.block(f"if not {to.builtin('isinstance')}({value}, {accepted}):"):
        to.line(f"{to.bind(f'reject_{leaf.name}', to.reject(leaf))}({value})")
    return value


def passed(known: Parameter | Argument, text: str) -> str:
    """*text*, an argument for *known*, by name if it must be."""
    return f"{known.name}={text}" if known.is_keyword_only else text


def open_arguments(arguments: Iterable[Argument], to: Writer) -> None:
    """Write the lines that give each leaf its name; a list that is a default is copied."""
    for argument in arguments:
        if isinstance(argument.default, list):
            # The body may write into the list, and the next call must not see that.
            default = default_name(argument, to)
            with to.block(f"if {argument.name} is {default}:"):
                to.line(f"{argument.name} = [*{default}]")
        _unpack(argument, to)


def tuple_text(texts: Iterable[str]) -> str:
    items = list(texts)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def default_name(known: Parameter | Argument, to: Writer) -> str:
    return to.bind(f"default_{flat_name((known.name,))}", known.default)


def _with_defaults(all_known: Iterable[Parameter | Argument], to: Writer) -> list[str]:
    """The parameters of a function; those of a schema have its defaults, as torch leaves out what equals them."""
    texts: list[str] = []
    for known in all_known:
        if known.is_keyword_only and "*" not in texts:
            texts.append("*")
        texts.append(f"{known.name}={default_name(known, to)}" if known.has_default else known.name)
    return texts


def handle_conditions(node: Node, value: str, to: Writer) -> Iterator[str]:
    """Conditions under which *value* is, or holds, what only the form for handles takes."""
    parts = nodes(node)
    may_be_handle = any(isinstance(part, Record) and part.handle is not None for part in parts)
    if not may_be_handle and not any(isinstance(part, Leaf) and part.is_generator for part in parts):
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
