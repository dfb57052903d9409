# SPDX-License-Identifier: Apache-2.0
"""The functions that are generated for an op: emitters of whole, readable functions.

| function | takes | does |
|---|---|---|
| twin | the flat arguments | rebuilds the user's arguments, calls the user's function, flattens its output |
| inputs | the slots | rebuilds the user's arguments, as a tuple |
| flatten | the user's arguments | returns the flat ones, as a tuple |
| saved | the slots | returns what a backward needs to know of each |

The function that the decorator returns is in `exposed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import python_type
from magi_opschema._model.tree import Leaf, MaskedList, Node, flat_name, leaves, nodes
from magi_opschema.errors import ReturnValueError

from .nodes import flatten, rebuild
from .refusals import Refusal, refusals_of, rejections, write_readings, write_refusals, writer_of
from .source import INDENT, Source, Writer, compile_source


if TYPE_CHECKING:
    from magi_opschema._model.lowering import Parameter
    from magi_opschema._model.schema import Argument


class Checked(Protocol):
    """A body together with the check of its calls."""

    @property
    def check(self) -> object:
        """An object whose attribute `pending` says whether the next call is checked."""

    def run(self, flat: tuple[Any, ...]) -> Any:
        """Call the body and check the call."""


Purpose = Literal["lowered", "kernel", "fake"]

_TWIN_DOCS: dict[Purpose, str] = {
    "lowered": "The body of {name} at its flat signature.",
    "kernel": "The body of {name} as the dispatcher calls it; the first real call is checked.",
    "fake": "The fake of {name} at its flat signature.",
}


@dataclass(frozen=True)
class TwinCalls:
    """What a twin calls: *fn*, a body or a fake at the user's signature, and other functions before it.

    *refuse* raises the error about the first of the flat arguments that the signature refuses. With *checked*, calls
    are passed to that while its check is pending.
    """

    fn: Callable[..., Any]
    refuse: Callable[..., None]
    checked: Checked | None = None


def emit_twin(lowering: SignatureLowering, purpose: Purpose, calls: TwinCalls) -> Source:
    """The flat twin of a function for one *purpose*."""
    fn, checked = calls.fn, calls.checked
    to = writer_of(lowering, is_description=purpose == "fake")
    reject_output = rejections(lowering.title, lowering.location, returned=ReturnValueError)
    call = to.bind("fn", fn)
    if checked is not None:
        with to.block(f"if {to.bind('check', checked.check)}.pending:"):
            arguments = tuple_text(argument.name for argument in lowering.arguments)
            to.line(f"return {to.bind('run_checked', checked.run)}({arguments})")
    _open_arguments(lowering.arguments, to)
    conditions = [condition for _, condition in _refusals(lowering, to, are_real=checked is not None)]
    if conditions:
        with to.block(f"if {' or '.join(conditions)}:"):
            to.line(f"{to.bind('refuse', calls.refuse)}({_flat_call(lowering.arguments)})")
    values = [rebuild(parameter.node, to) for parameter in lowering.parameters]
    passed = [
        f"{parameter.name}={value}" if parameter.is_keyword_only else value
        for parameter, value in zip(lowering.parameters, values, strict=True)
    ]
    output = to.temporary("output")
    to.line(f"{output} = {call}({', '.join(passed)})")
    to.line(f"return {_flat_output(lowering.returns, output, to.of_output(reject_output))}")
    doc = _TWIN_DOCS[purpose].format(name=lowering.name)
    title = f"{purpose} {fn.__module__}.{fn.__qualname__}"
    return source_of(f"{lowering.name}_{purpose}", _flat_parameters(lowering.arguments, to), doc, to, title)


def emit_refusals(lowering: SignatureLowering, to: Writer, title: str) -> Source:
    """A function of the flat arguments that raises the error about the first value that the signature refuses."""
    _open_arguments(lowering.arguments, to)
    write_refusals(_refusals(lowering, to, are_real=False), to)
    for parameter in lowering.parameters:
        write_readings(parameter.node, to)
    to.line("return None")
    return source_of("refuse_values", _flat_parameters(lowering.arguments, to), "Check the values.", to, title)


def emit_inputs(lowering: SignatureLowering, to: Writer, title: str) -> Source:
    """A function from the slots, all by position, to a tuple of the user's arguments."""
    _open_arguments(lowering.slots, to)
    values = [rebuild(parameter.node, to) for parameter in lowering.parameters]
    to.line(f"return {tuple_text(values)}")
    doc = f"Rebuild the arguments of {lowering.name}."
    names = [slot.name for slot in lowering.slots]
    return source_of(f"{lowering.name}_inputs", names, doc, to, title)


def emit_saved(lowering: SignatureLowering, to: Writer, title: str) -> Source:
    """A function from a flag for each slot, and the slots, to what a backward needs to know.

    That is a flag for each parameter, true if it is set for one of its leaves; and by name, the shapes of the Tensors
    (None for None, a list of shapes for a list) and the masks of lists of optional Tensors.
    """
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
    return source_of(f"{lowering.name}_saved", [flags, *position], doc, to, title)


def _shape_text(leaf: Leaf) -> str:
    text = f"[item.shape for item in {leaf.name}]" if leaf.is_list else f"{leaf.name}.shape"
    return f"(None if {leaf.name} is None else {text})" if leaf.schema_type.endswith("?") or leaf.is_list else text


def emit_unpack(lowering: SignatureLowering, argument: Argument) -> Source:
    """A function from the flat arguments, all by name, to a tuple of the leaves that *argument* holds."""
    to = writer_of(lowering)
    argument.unpack(to)
    to.line(f"return {tuple_text(leaf.name for leaf in argument.leaves)}")
    names = [known.name for known in lowering.arguments]
    return source_of("unpack", names, f"Unpack {argument.name}.", to, f"unpack {lowering.name}")


def emit_flatten(
    parameters: tuple[Parameter, ...], to: Writer, title: str, arguments: tuple[Argument, ...] = ()
) -> Source:
    """A function from the user's arguments to a tuple of the flat ones, or of the leaves without *arguments*."""
    exprs = flatten_parameters(parameters, to)
    texts = argument_texts(arguments, exprs, to) if arguments else list(exprs.values())
    to.line(f"return {tuple_text(texts)}")
    return source_of("flatten", _user_parameters(parameters, to), "Take the arguments apart.", to, title)


def emit_flatten_output(node: Node, to: Writer, title: str) -> Source:
    """A function from the user's return value to a tuple of the flat outputs."""
    to.line(f"return {tuple_text(flatten(node, 'output', to))}")
    return source_of("flatten_output", ["output"], "Take a return value apart.", to, title)


def emit_rebuild_output(node: Node, to: Writer, title: str) -> Source:
    """A function from the flat outputs to the user's return value."""
    parameters = [leaf.name for leaf in leaves(node)]
    value = rebuild(node, to)
    to.line(f"return {value}")
    return source_of("rebuild_output", parameters, "Rebuild a return value.", to, title)


def flatten_parameters(parameters: tuple[Parameter, ...], to: Writer) -> dict[str, str]:
    """Write the lines that take the parameters apart; return an expression for each leaf, by its name."""
    exprs: dict[str, str] = {}
    for parameter in parameters:
        names = [leaf.name for leaf in leaves(parameter.node)]
        exprs |= dict(zip(names, flatten(parameter.node, parameter.name, to), strict=True))
    return exprs


def argument_texts(arguments: tuple[Argument, ...], exprs: Mapping[str, str], to: Writer) -> list[str]:
    return [argument.pack([exprs[leaf.name] for leaf in argument.leaves], to) for argument in arguments]


def _refusals(lowering: SignatureLowering, to: Writer, *, are_real: bool) -> Iterator[Refusal]:
    for parameter in lowering.parameters:
        yield from refusals_of(parameter.node, to, are_real=are_real)


def _flat_call(arguments: Iterable[Argument]) -> str:
    return ", ".join(passed(argument, argument.name) for argument in arguments)


def passed(argument: Argument, text: str) -> str:
    return f"{argument.name}={text}" if argument.is_keyword_only else text


def _open_arguments(arguments: Iterable[Argument], to: Writer) -> None:
    """Write the lines that give each leaf its name; a list that is a default is copied."""
    for argument in arguments:
        if isinstance(argument.default, list):
            # The body may write into the list, and the next call must not see that.
            default = _default_name(argument, to)
            with to.block(f"if {argument.name} is {default}:"):
                to.line(f"{argument.name} = [*{default}]")
        argument.unpack(to)


def _flat_output(node: Node | None, output: str, to: Writer) -> str:
    """Write the lines that check and take apart the body's return value; return an expression of the flat ones."""
    if node is None:
        with to.block(f"if {output} is not None:"):
            to.line(f"{to.bind('reject_output', to.reject(None))}({output})")
        return "None"
    texts = flatten(node, output, to)
    return texts[0] if len(texts) == 1 else tuple_text(texts)


def tuple_text(texts: Iterable[str]) -> str:
    items = list(texts)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def user_default(parameter: Parameter, to: Writer) -> str:
    return to.bind(f"default_{flat_name((parameter.name,))}", parameter.default)


def _user_parameters(parameters: Iterable[Parameter], to: Writer) -> list[str]:
    texts: list[str] = []
    for parameter in parameters:
        if parameter.is_keyword_only and "*" not in texts:
            texts.append("*")
        default = f"={user_default(parameter, to)}" if parameter.has_default else ""
        texts.append(f"{parameter.name}{default}")
    return texts


def _flat_parameters(arguments: Iterable[Argument], to: Writer) -> list[str]:
    """The flat parameters, with the schema's defaults, because torch leaves out arguments that equal them."""
    texts: list[str] = []
    for argument in arguments:
        if argument.is_keyword_only and "*" not in texts:
            texts.append("*")
        texts.append(f"{argument.name}={_default_name(argument, to)}" if argument.has_default else argument.name)
    return texts


def _default_name(argument: Argument, to: Writer) -> str:
    return to.bind(f"default_{argument.name}", argument.default)


def source_of(name: str, parameters: list[str], doc: str, to: Writer, title: str) -> Source:
    """The function *name* with *parameters*, whose body is the lines of *to*."""
    body = "\n".join(INDENT + line for line in [f'"""{doc}"""', *to.lines])
    return Source(f"def {name}({', '.join(parameters)}):\n{body}\n", to.globals, name, title)


def compile_twin(
    lowering: SignatureLowering, fn: Callable[..., Any], purpose: Purpose, checked: Checked | None = None
) -> Callable[..., Any]:
    """The flat twin of *fn* for one *purpose*."""
    compiled = functools.cache(functools.partial(compile_refusals, lowering))

    def refuse(*args: Any, **kwargs: Any) -> None:
        compiled()(*args, **kwargs)

    twin = compile_source(emit_twin(lowering, purpose, TwinCalls(fn, refuse, checked)))
    if purpose == "lowered":
        twin.__annotations__ = _annotations(lowering)
    return twin


def _annotations(lowering: SignatureLowering) -> dict[str, Any]:
    """The annotations of the flat signature, for torch.library.infer_schema and other readers."""
    returned = [python_type(leaf.schema_type) for leaf in lowering.return_leaves]
    output = None if lowering.returns is None else returned[0] if len(returned) == 1 else tuple[tuple(returned)]  # type: ignore[misc]
    return {**{known.name: python_type(known.schema_type) for known in lowering.arguments}, "return": output}


def compile_refusals(lowering: SignatureLowering) -> Callable[..., None]:
    """A function at the flat signature that only checks the values."""
    return compile_source(emit_refusals(lowering, writer_of(lowering), f"values {lowering.name}"))
