# SPDX-License-Identifier: Apache-2.0
"""The functions that are generated for an op: emitters of whole, readable functions.

| function | takes | does |
|---|---|---|
| exposed | the user's arguments | flattens them, calls the op, rebuilds the output |
| lowered | the flat arguments | rebuilds the user's, calls a function of the user's, flattens its output |
| inputs | the slots | rebuilds the user's arguments, as a tuple |
| flatten | the user's arguments | returns the flat ones, as a tuple |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from magi_opschema._model.tree import Node, flat_name, leaves

from .nodes import flatten, rebuild
from .refusals import Refusal, refusals_of, write_refusals
from .reject import writer_of
from .source import Source
from .writer import INDENT, Reject, Writer


if TYPE_CHECKING:
    from magi_opschema._model.lowering import Parameter, SignatureLowering
    from magi_opschema._model.schema import Argument


class Checked(Protocol):
    """A body together with the check of its calls."""

    @property
    def check(self) -> object:
        """What says in its attribute `pending` whether the next call is checked."""

    def run(self, flat: tuple[Any, ...]) -> Any:
        """Call the body and check the call."""


def emit_exposed(
    lowering: SignatureLowering, op_name: str, calls: Mapping[str, Callable[..., Any]], to: Writer, title: str
) -> Source:
    """The function that the decorator returns.

    *calls* binds `torch_op` and what the eager lane needs, see `_lane`.
    """
    if lowering.path == "flattened":
        exprs = _name_tensors(lowering, _flatten_parameters(lowering.parameters, to), to)
    else:
        # The kernel looks at the values: here a check of a Literal would make a symbolic int a constant.
        exprs = {parameter.name: parameter.name for parameter in lowering.parameters}
    texts = _argument_texts(lowering.arguments, exprs, to)
    arguments = ", ".join(map(_passed, lowering.arguments, texts))
    names = {name: to.bind(name, call) for name, call in calls.items()}
    output = to.temporary("output")
    to.line(f"if {_needs_dispatch(lowering, exprs, names)}:")
    to.line(f"{INDENT}{output} = {names['torch_op']}({arguments})")
    to.line("else:")
    to.line(f"{INDENT}try:")
    if lowering.mutated:
        to.line(f"{INDENT}{INDENT}{names['increment_version']}({_mutated_text(lowering, exprs)})")
    to.line(f"{INDENT}{INDENT}with {names['below_autograd']}():")
    to.line(f"{INDENT}{INDENT}{INDENT}{output} = {names['dispatch']}({arguments})")
    error = to.temporary("error")
    to.line(f"{INDENT}except {to.builtin('Exception')} as {error}:")
    values = ", ".join([error, names["torch_op"], *(parameter.name for parameter in lowering.parameters)])
    to.line(f"{INDENT}{INDENT}{names['explain']}({values})")
    to.line(f"{INDENT}{INDENT}raise")
    to.line(f"return {_rebuild_output(lowering.returns, output, to) if lowering.rebuilds_returns else output}")
    doc = f"{'Flatten the arguments and call' if lowering.path == 'flattened' else 'Call'} {op_name}."
    return _source(lowering.name, _user_parameters(lowering.parameters, to), doc, to, title)


def emit_lowered(
    lowering: SignatureLowering,
    fn: Callable[..., Any],
    suffix: str,
    doc: str,
    to: Writer,
    title: str,
    reject_output: Reject,
    refuse: Callable[..., None],
    checked: Checked | None = None,
) -> Source:
    """The flat twin of *fn*, which has the user's signature: its body or its fake.

    *refuse* raises the error about the first of the flat arguments that the signature refuses. With *checked*, calls
    are handed over to that while its check is pending.
    """
    call = to.bind("fn", fn)
    if checked is not None:
        to.line(f"if {to.bind('check', checked.check)}.pending:")
        arguments = _tuple_text(argument.name for argument in lowering.arguments)
        to.line(f"{INDENT}return {to.bind('run_checked', checked.run)}({arguments})")
    _open_arguments(lowering.arguments, to)
    conditions = [condition for _, condition in _refusals(lowering, to, are_real=checked is not None)]
    if conditions:
        to.line(f"if {' or '.join(conditions)}:")
        to.line(f"{INDENT}{to.bind('refuse', refuse)}({_flat_call(lowering.arguments)})")
    values = [rebuild(parameter.node, to) for parameter in lowering.parameters]
    passed = [
        f"{parameter.name}={value}" if parameter.is_keyword_only else value
        for parameter, value in zip(lowering.parameters, values, strict=True)
    ]
    to.reject = reject_output
    output = to.temporary("output")
    to.line(f"{output} = {call}({', '.join(passed)})")
    to.line(f"return {_flat_output(lowering.returns, output, to)}")
    return _source(f"{lowering.name}_{suffix}", _flat_parameters(lowering.arguments, to), doc, to, title)


def emit_refusals(lowering: SignatureLowering, to: Writer, title: str) -> Source:
    """From the flat arguments to the error about the first value that the signature refuses."""
    _open_arguments(lowering.arguments, to)
    write_refusals(_refusals(lowering, to, are_real=False), to)
    to.line("return None")
    return _source("refuse_values", _flat_parameters(lowering.arguments, to), "Check the values.", to, title)


def emit_inputs(lowering: SignatureLowering, to: Writer, title: str) -> Source:
    """From the slots, all by position, to a tuple of the user's arguments."""
    _open_arguments(lowering.slots, to)
    values = [rebuild(parameter.node, to) for parameter in lowering.parameters]
    to.line(f"return {_tuple_text(values)}")
    doc = f"Rebuild the arguments of {lowering.name}."
    names = [slot.name for slot in lowering.slots]
    return _source(f"{lowering.name}_inputs", names, doc, to, title)


def emit_unpack(lowering: SignatureLowering, argument: Argument) -> Source:
    """From the flat arguments, all by name, to a tuple of the leaves that one of them holds."""
    to = writer_of(lowering)
    argument.unpack(to)
    to.line(f"return {_tuple_text(leaf.name for leaf in argument.leaves)}")
    names = [known.name for known in lowering.arguments]
    return _source("unpack", names, f"Unpack {argument.name}.", to, f"unpack {lowering.name}")


def emit_flatten(
    parameters: tuple[Parameter, ...], to: Writer, title: str, arguments: tuple[Argument, ...] = ()
) -> Source:
    """From the user's arguments to a tuple of the flat ones, or of the leaves where no *arguments* are given."""
    exprs = _flatten_parameters(parameters, to)
    texts = _argument_texts(arguments, exprs, to) if arguments else list(exprs.values())
    to.line(f"return {_tuple_text(texts)}")
    return _source("flatten", _user_parameters(parameters, to), "Take the arguments apart.", to, title)


def emit_flatten_output(node: Node, to: Writer, title: str) -> Source:
    """From the user's return value to a tuple of the flat outputs."""
    to.line(f"return {_tuple_text(flatten(node, 'output', to))}")
    return _source("flatten_output", ["output"], "Take a return value apart.", to, title)


def emit_rebuild_output(node: Node, to: Writer, title: str) -> Source:
    """From the flat outputs to the user's return value."""
    parameters = [leaf.name for leaf in leaves(node)]
    value = rebuild(node, to)
    to.line(f"return {value}")
    return _source("rebuild_output", parameters, "Rebuild a return value.", to, title)


def _flatten_parameters(parameters: tuple[Parameter, ...], to: Writer) -> dict[str, str]:
    """An expression for each leaf, by the leaf's name."""
    exprs: dict[str, str] = {}
    for parameter in parameters:
        names = [leaf.name for leaf in leaves(parameter.node)]
        exprs |= dict(zip(names, flatten(parameter.node, parameter.name, to), strict=True))
    return exprs


def _name_tensors(lowering: SignatureLowering, exprs: dict[str, str], to: Writer) -> dict[str, str]:
    """Tensors are looked at twice, by the lane and by the op: read each once."""
    return {
        leaf.name: to.local(leaf.name, exprs[leaf.name]) if leaf.is_tensor else exprs[leaf.name]
        for leaf in lowering.leaves
    }


def _needs_dispatch(lowering: SignatureLowering, exprs: dict[str, str], names: Mapping[str, str]) -> str:
    """The condition under which a call has to go through the autograd and functorch keys.

    Of a mutating op only the mutated tensors matter: a gradient never flows through it.
    """
    watched = lowering.mutated or lowering.arguments
    tensors = [exprs[leaf.name] for argument in watched for leaf in argument.leaves if leaf.is_tensor]
    conditions = [f"{names['is_dynamo_compiling']}()", f"{names['are_transforms_active']}()"]
    # Not a call: it would take as long as both of those above.
    conditions.append(f"{names['forward_ad']}._current_level >= 0")
    if tensors:
        conditions.append(f"{names['is_grad_enabled']}() and {names['any_requires_grad']}({', '.join(tensors)})")
    return " or ".join(conditions)


def _mutated_text(lowering: SignatureLowering, exprs: dict[str, str]) -> str:
    """The mutated tensors as one tuple: `(out, *outs, *(() if maybe is None else (maybe,)))`."""
    texts = []
    for argument in lowering.mutated:
        value = exprs[argument.name]
        if argument.schema_type == "Tensor[]":
            value = f"*{value}"
        elif argument.schema_type.endswith("?"):
            value = f"*(() if {value} is None else ({value},))"
        texts.append(value)
    return _tuple_text(texts)


def _argument_texts(arguments: tuple[Argument, ...], exprs: Mapping[str, str], to: Writer) -> list[str]:
    return [argument.pack([exprs[leaf.name] for leaf in argument.leaves], to) for argument in arguments]


def _refusals(lowering: SignatureLowering, to: Writer, *, are_real: bool) -> Iterator[Refusal]:
    for parameter in lowering.parameters:
        yield from refusals_of(parameter.node, to, are_real=are_real)


def _flat_call(arguments: Iterable[Argument]) -> str:
    return ", ".join(_passed(argument, argument.name) for argument in arguments)


def _passed(argument: Argument, text: str) -> str:
    return f"{argument.name}={text}" if argument.is_keyword_only else text


def _open_arguments(arguments: Iterable[Argument], to: Writer) -> None:
    """Write the lines that give each leaf its name, and a list that is a default to the body alone."""
    for argument in arguments:
        if isinstance(argument.default, list):
            # The body may write into its list; the next call must not see that.
            default = _default_name(argument, to)
            to.line(f"if {argument.name} is {default}:")
            to.line(f"{INDENT}{argument.name} = [*{default}]")
        argument.unpack(to)


def _rebuild_output(node: Node | None, output: str, to: Writer) -> str:
    """Write the lines that rebuild the user's return value from the op's; return an expression for it."""
    assert node is not None
    names = [leaf.name for leaf in leaves(node)]
    if names:
        to.line(f"{', '.join(names)} = {output}")
    return rebuild(node, to)


def _flat_output(node: Node | None, output: str, to: Writer) -> str:
    """Write the lines that check and take apart the body's return value; return an expression of the flat ones."""
    if node is None:
        to.line(f"if {output} is not None:")
        to.line(f"{INDENT}{to.bind('reject_output', to.reject(None))}({output})")
        return "None"
    to.are_locals_reserved = True
    texts = flatten(node, output, to)
    return texts[0] if len(texts) == 1 else _tuple_text(texts)


def _tuple_text(texts: Iterable[str]) -> str:
    items = list(texts)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _user_parameters(parameters: Iterable[Parameter], to: Writer) -> list[str]:
    texts: list[str] = []
    for parameter in parameters:
        if parameter.is_keyword_only and "*" not in texts:
            texts.append("*")
        default = (
            f"={to.bind(f'default_{flat_name((parameter.name,))}', parameter.default)}" if parameter.has_default else ""
        )
        texts.append(f"{parameter.name}{default}")
    return texts


def _flat_parameters(arguments: Iterable[Argument], to: Writer) -> list[str]:
    """The flat parameters; torch leaves out arguments that equal the schema's default, so these have it too."""
    texts: list[str] = []
    for argument in arguments:
        if argument.is_keyword_only and "*" not in texts:
            texts.append("*")
        texts.append(f"{argument.name}={_default_name(argument, to)}" if argument.has_default else argument.name)
    return texts


def _default_name(argument: Argument, to: Writer) -> str:
    return to.bind(f"default_{argument.name}", argument.default)


def _source(name: str, parameters: list[str], doc: str, to: Writer, title: str) -> Source:
    body = "\n".join([f'{INDENT}"""{doc}"""', *to.lines])
    return Source(f"def {name}({', '.join(parameters)}):\n{body}\n", to.globals, name, title)
