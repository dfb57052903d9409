# SPDX-License-Identifier: Apache-2.0
"""Lowers a whole signature to trees, schema and path. Nothing is registered here.

Of more than 64 leaves, those of one kind share one list argument:

    200 floats                  float[] packed_float
    100 floats that may be None float[] packed_optional_float, bool[] packed_optional_float_present
    dtypes, devices, numbers    str[] packed_ScalarType
    lists of ints               SymInt[] packed_SymInt_list, SymInt[] packed_SymInt_list_length

Tensors stay separate arguments while there is room, because a graph then shows each of them. If there is no room, they
share a list too, and the kernels of this package still see each Tensor: see `FlatLayout` in `_model.schema`.

    64 Tensors and a float      Tensor[] packed_Tensor, float packed_float
"""

from __future__ import annotations

import functools
import inspect
import keyword
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from magi_opschema._codegen.functions import compile_flatten
from magi_opschema._codegen.source import Writer
from magi_opschema._environment import refuse_unknown_variables
from magi_opschema._model.lowering import LoweringPath, Parameter, SignatureLowering
from magi_opschema._model.schema import MAX_ARGUMENTS, NO_DEFAULT, SCHEMA_TYPES, Argument, Packing, default_text, takes
from magi_opschema._model.tree import (
    IDENTITY,
    SEQUENCE,
    Leaf,
    Node,
    dotted,
    flat_name,
    leaves,
    nodes,
)
from magi_opschema._text import location, nearest, show_value, show_with_type
from magi_opschema._torch_compat import CustomOpDef, OpOverload, OpOverloadPacket
from magi_opschema.errors import DuplicateOpError, OptionError, Problem, SignatureError

from . import codecs
from .annotations import Scope, scope_of
from .types import Place, Refused, lower_resolved, lower_returns


TORCH_OP_ATTRIBUTE = "_magi_torch_registered_op"
"""The attribute with the OpOverload of what the decorator returned."""


def refuse_other_than_functions(fn: object) -> None:
    """Raise if *fn* cannot become an op, because it is one already or because it has no signature."""
    if hasattr(fn, TORCH_OP_ATTRIBUTE) or isinstance(fn, (OpOverload, OpOverloadPacket)):
        described = getattr(fn, "__qualname__", None) or str(fn)
        raise DuplicateOpError(
            f"{described} is an op already. Decorate a function once; op_def(op).fn is the plain function."
        )
    if isinstance(fn, CustomOpDef):
        raise DuplicateOpError(f"{fn} was registered by torch.library.custom_op. Take that decorator off.")
    if isinstance(fn, (staticmethod, classmethod)):
        kind = type(fn).__name__
        fix = "Put it above this decorator." if kind == "staticmethod" else "Use a static method: an op has no class."
        raise OptionError(f"{fn.__func__.__qualname__} is a {kind} already. {fix} ({location(fn.__func__)})")
    if not hasattr(fn, "__code__"):
        raise OptionError(
            f"{show_value(fn)} is not a Python function. Wrap it in one whose parameters have annotations."
        )


def mutated_leaves(trees: SignatureLowering, mutates_args: object) -> set[str]:
    """The names of the leaves that *mutates_args* means; raises an OptionError for a name that means none."""
    if isinstance(mutates_args, str):
        text = f"mutates_args={mutates_args!r} is one string. Write a tuple of names: ({mutates_args!r},)."
        raise OptionError(trees.sentence(text))
    if not isinstance(mutates_args, Iterable):
        text = f"mutates_args={show_value(mutates_args)} is not a tuple of names."
        raise OptionError(trees.sentence(f"{text} Leave it out if nothing is written into."))
    names = list(mutates_args)
    tensors: dict[str, list[Leaf]] = {}
    for parameter in trees.parameters if names else ():
        for node in nodes(parameter.node):
            tensors[dotted(node.path)] = tensors[flat_name(node.path)] = [
                leaf for leaf in leaves(node) if leaf.is_tensor
            ]
    for name in names:
        if not isinstance(name, str) or name not in tensors:
            text = f"mutates_args names {show_value(name)}, which is not a parameter, leaf path or flat name."
            raise OptionError(trees.sentence(text + nearest(name, tensors)))
        if not tensors[name]:
            text = f"mutates_args names '{name}', which holds no Tensor, and an op can write into Tensors only."
            raise OptionError(trees.sentence(text))
        for leaf in tensors[name]:
            if leaf.schema_type == "Tensor[]?":
                text = f"mutates_args names '{dotted(leaf.path)}', a list of Tensors that may be None, which torch "
                fix = "cannot functionalize (pytorch #144072). Use list[Tensor], empty for None."
                raise OptionError(trees.sentence(f"{text}{fix}"))
    return {leaf.name for name in names for leaf in tensors[name]}


def lower_signature_in(
    fn: Callable[..., Any],
    scope: Scope,
    mutates_args: Iterable[str],
    op_name: str = "",
    *,
    is_opaque: bool = False,
) -> SignatureLowering:
    """The lowering of *fn* as the op *op_name*; string annotations are evaluated in *scope*.

    With *is_opaque*, an `ObjectHandle[T]` is a handle even if the object could be taken apart.
    """
    signature = inspect.signature(fn)
    is_name = fn.__name__.isidentifier() and not keyword.iskeyword(fn.__name__)
    name = flat_name((fn.__name__,)) if is_name else "op"
    title = op_name or f"{name}()"
    parameters, returns = _lower_all(fn, title, signature, scope, is_opaque=is_opaque)
    flat_names = [flat_name(node.path) for parameter in parameters for node in nodes(parameter.node)]
    prefix, taken = "_m_", (name, *signature.parameters, *flat_names)
    while any(other.startswith(prefix) for other in taken):
        prefix = f"_{prefix}"
    trees = SignatureLowering(name, signature, parameters, returns, prefix, location(fn), title)
    arguments = _arguments(trees, mutated_leaves(trees, mutates_args))
    path = _choose_path(trees, arguments)
    if path == "flattened":
        arguments = _positional_with_trailing_defaults(arguments)
    return replace(trees, arguments=arguments, path=path)


def _lower_all(
    fn: Callable[..., Any], title: str, signature: inspect.Signature, scope: Scope, *, is_opaque: bool
) -> tuple[tuple[Parameter, ...], Node | None]:
    problems: list[Problem] = []
    parameters: list[Parameter] = []
    for parameter in signature.parameters.values():
        try:
            place = Place((parameter.name,), scope, "parameter", is_opaque=is_opaque)
            parameters.append(_lower_parameter(parameter, place))
        except Refused as refused:
            problems += refused.problems
    returns: Node | None = None
    try:
        returns = lower_returns(signature.return_annotation, scope)
    except Refused as refused:
        problems += refused.problems
    problems += _clashes([parameter.node for parameter in parameters])
    problems += _clashes([] if returns is None else [returns])
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        problems.append(
            Problem("", "is a coroutine or a generator, and an op returns when it is done. Write a plain function.")
        )
    if problems:
        raise SignatureError(title, location(fn), tuple(problems))
    return tuple(parameters), returns


def _lower_parameter(parameter: inspect.Parameter, place: Place) -> Parameter:
    if sentence := _unfit(parameter):
        raise Refused(Problem(parameter.name, sentence))
    annotation, was_wrapped = place.resolved(parameter.annotation)
    node = lower_resolved(annotation, place)
    is_plain = not was_wrapped and isinstance(node, Leaf) and node.codec == IDENTITY
    default = NO_DEFAULT if parameter.default is parameter.empty else parameter.default
    return Parameter(parameter.name, node, default, parameter.kind is parameter.KEYWORD_ONLY, is_plain)


def _unfit(parameter: inspect.Parameter) -> str:
    """Why no annotation could give the parameter a place in a schema; empty if one can."""
    name = parameter.name
    match parameter.kind:
        case parameter.VAR_POSITIONAL:
            why = "takes any number of values, and a schema has a fixed number of arguments"
            return f"'*{name}' {why}. Use a list or tuple[T, ...] parameter."
        case parameter.VAR_KEYWORD:
            return f"'**{name}' takes any names, and a schema has fixed names. Use a frozen dataclass."
        case parameter.POSITIONAL_ONLY:
            return f"parameter '{name}' is positional-only, and every schema argument has a name. Remove the '/'."
    if parameter.annotation is parameter.empty:
        fix = f"Annotate it, for example {name}: Tensor."
        return f"parameter '{name}' has no annotation, and the schema needs its type. {fix}"
    return ""


def _clashes(trees: list[Node]) -> list[Problem]:
    """Problems of nodes that would share a flat name, such as a parameter `cfg__eps` and the leaf `cfg.eps`."""
    problems: list[Problem] = []
    seen: dict[str, Node] = {}
    for node in (node for tree in trees for node in nodes(tree)):
        name = flat_name(node.path)
        other = seen.setdefault(name, node)
        if any(each is node for each in nodes(other)):
            continue  # it is the same, or has the path of what holds it: the value of an Optional, of a list
        sentence = f"'{dotted(other.path)}' and '{dotted(node.path)}' have the same flat name '{name}'. Rename one."
        if other.path == node.path:
            flag = f"the flat name '{name}', that of the bool that says whether '{dotted(node.path[:-1])}' is None"
            sentence = f"the field '{dotted(node.path)}' has {flag}. Rename the field."
        problems.append(Problem(dotted(node.path), sentence))
    return problems


def _arguments(trees: SignatureLowering, mutated: set[str]) -> tuple[Argument, ...]:
    arguments: list[Argument] = []
    problems: list[Problem] = []
    for parameter in trees.parameters:
        defaults = _leaf_defaults(parameter, trees)
        for leaf, default in zip(leaves(parameter.node), defaults, strict=True):
            if default is not NO_DEFAULT and not takes(leaf.schema_type, default):
                shown = f"the default of '{dotted(leaf.path)}' is {show_with_type(default)}"
                fix = "Annotate it T | None" if default is None else "Change the default or the annotation"
                text = f"{shown}, which the schema type {leaf.schema_type} does not take. {fix}."
                problems.append(Problem(dotted(leaf.path), text))
            holdable = default is not NO_DEFAULT and default_text(leaf.schema_type, default) is not None
            if leaf.codec.is_process_bound and default is not None:
                holdable = False
            arguments.append(
                Argument(
                    leaf.name,
                    leaf.schema_type,
                    (leaf,),
                    default if holdable else NO_DEFAULT,
                    f"a{len(mutated & {a.name for a in arguments})}" if leaf.name in mutated else "",
                    parameter.is_keyword_only,
                )
            )
    if problems:
        raise SignatureError(trees.title, trees.location, tuple(problems))
    if len(arguments) > MAX_ARGUMENTS:
        return pack(tuple(arguments), trees)
    return tuple(arguments)


def _leaf_defaults(parameter: Parameter, trees: SignatureLowering) -> list[object]:
    """The default of each leaf of the parameter."""
    below = leaves(parameter.node)
    if not parameter.has_default:
        return [NO_DEFAULT] * len(below)
    if isinstance(parameter.node, Leaf) and parameter.node.codec.is_identity:
        return [parameter.default]
    to = Writer(trees, of="the default of ")
    flatten = compile_flatten((replace(parameter, is_keyword_only=False),), to, f"default of {trees.name}")
    return list(flatten(parameter.default))


def _choose_path(trees: SignatureLowering, arguments: tuple[Argument, ...]) -> LoweringPath:
    parameters = trees.parameters
    for parameter in parameters:
        node = parameter.node
        if not isinstance(node, Leaf) or not node.codec.keeps_value or node.name != parameter.name:
            return "flattened"
    if len(parameters) != len(arguments):
        return "flattened"
    if any(p.has_default and not a.has_default for p, a in zip(parameters, arguments, strict=True)):
        return "flattened"
    if trees.rebuilds_returns:
        return "flattened"
    if any(a.alias for a in arguments) and any(a.is_keyword_only and a.leaves[0].is_tensor for a in arguments):
        return "flattened"  # torch.library.register_vmap takes no keyword-only Tensors
    return "direct" if all(parameter.is_plain for parameter in parameters) else "lowered"


def _positional_with_trailing_defaults(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """*arguments*, all positional, and with defaults at the end only; the exposed function holds the others.

    A schema default before an argument without one fails an internal assert of torch's parser, so only the last
    defaults stay.
    """
    last_without = max((i for i, argument in enumerate(arguments) if not argument.has_default), default=-1)
    defaults = [argument.default if i > last_without else NO_DEFAULT for i, argument in enumerate(arguments)]
    return tuple(
        argument
        if default is argument.default and not argument.is_keyword_only
        else replace(argument, is_keyword_only=False, default=default)
        for argument, default in zip(arguments, defaults, strict=True)
    )


_FILLERS = {"SymInt": "0", "float": "0.0", "bool": "False", "str": '""'}
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


@functools.cache
def _texts() -> dict[str, Packing]:
    """How values of these schema types are written as text, the empty text for None."""
    kinds = {name: SCHEMA_TYPES[name][1] for name in ("ScalarType", "Device", "Layout", "MemoryFormat")}
    written = {name: (codecs.torch_constant_text(kind[0]), kind) for name, kind in kinds.items()}
    written |= dict.fromkeys(("complex", "Scalar"), (codecs.NUMBER_TEXT, _NUMBERS))
    item, read = "'' if {value} is None else {encoded}", "{decoded} if {list}[{i}] else None"
    return {name: Packing(item, read=read, kinds=kind, codec=codec) for name, (codec, kind) in written.items()}


_VALUES = Packing(head="{leaves}, = {list}")
_PRESENT = Packing("{value} is not None")
_LENGTHS = Packing("-1 if {value} is None else {len}({value})")


def pack(arguments: tuple[Argument, ...], trees: SignatureLowering) -> tuple[Argument, ...]:
    """*arguments*, packed so that there are at most 64 for any number of leaves.

    Raises a SignatureError if more than 64 leaves cannot share an argument, such as lists of Tensors and generators.
    """
    taken = {flat_name(node.path) for parameter in trees.parameters for node in nodes(parameter.node)}
    groups: dict[str, list[Argument]] = {}
    for argument in arguments:
        groups.setdefault(_kind(argument), []).append(argument)
    tensors = [kind for kind in groups if kind.endswith("Tensor")]
    shared = [kind for kind in groups if kind and kind not in tensors and len(groups[kind]) > 2]
    for chosen in (shared, [*tensors, *shared]):
        alone = [replace(argument, default=NO_DEFAULT) for argument in arguments if _kind(argument) not in chosen]
        packed = [argument for kind in chosen for argument in _share(kind, groups[kind], taken)]
        if len(alone) + len(packed) <= MAX_ARGUMENTS:
            return (*alone, *packed)
    lists = sum(argument.leaves[0].is_tensor for argument in alone)
    text = (
        f"the signature has {lists} lists of Tensors and {len(alone) - lists} other values that cannot share an "
        f"argument, and torch registers no schema of more than {MAX_ARGUMENTS} arguments. Pass some as one list."
    )
    raise SignatureError(trees.title, trees.location, (Problem("", text),))


def _kind(argument: Argument) -> str:
    """A key that is equal for leaves that can share an argument; empty for leaves that cannot."""
    leaf = argument.leaves[0]
    base = leaf.schema_type.removesuffix("?")
    if leaf.is_list:
        return "" if leaf.is_tensor or leaf.is_opaque else f"{base.removesuffix('[]')}_list"
    if base in _texts():
        return base
    if base not in {"Tensor", *_FILLERS}:
        return ""
    kind = f"mutated_{base}" if argument.alias else base
    return f"optional_{kind}" if leaf.is_optional else kind


def _share(kind: str, members: Sequence[Argument], taken: set[str]) -> list[Argument]:
    """The arguments that the leaves of *members*, all of one *kind*, share; no name in *taken* begins like theirs."""
    name, alias = f"packed_{kind}", members[0].alias
    while any(other.startswith(name) for other in taken):
        name += "_"
    shared = tuple(leaf for argument in members for leaf in argument.leaves)
    base = shared[0].schema_type.removesuffix("?")
    if kind.startswith("optional_"):
        present = f"{name}_present"
        if base == "Tensor":
            packing = Packing(
                whole="[{tensor} for {tensor} in ({items},) if {tensor} is not None]",
                head="{rest} = {iter}({list})",
                read=f"{{next}}({{rest}}) if {present}[{{i}}] else None",
            )
        else:
            item = f"{_FILLERS[base]} if {{value}} is None else {{value}}"
            packing = Packing(item, read=f"{{list}}[{{i}}] if {present}[{{i}}] else None")
        return [
            Argument(name, f"{base}[]", shared, alias=alias, packing=packing),
            Argument(present, "bool[]", shared, packing=_PRESENT),
        ]
    if kind.endswith("_list"):
        lengths = f"{name}_length"
        head, read = "{rest} = {iter}({list})", f"{{take}}({{rest}}, {lengths}[{{i}}])"
        return [
            Argument(name, base, shared, packing=Packing("*({value} or ())", head=head, read=read, kinds=SEQUENCE)),
            Argument(lengths, "SymInt[]", shared, packing=_LENGTHS),
        ]
    if base in _texts():
        return [Argument(name, "str[]", shared, packing=_texts()[base])]
    return [Argument(name, f"{base}[]", shared, alias=alias, packing=_VALUES)]


def lower_signature(fn: Callable[..., Any], *, mutates_args: Iterable[str] = ()) -> SignatureLowering:
    """Lower the signature of *fn* to a flat schema. Nothing is registered.

    Args:
        fn: a function with an annotation for each parameter and for the return value.
        mutates_args: what the op writes into: parameter names (a record means all its Tensor leaves),
            dotted leaf paths (`"cfg.out"`) or flat names (`"cfg__out"`).

    Raises:
        SignatureError: a parameter or the return value has no flat form; all such places are in the message.
        OptionError: *mutates_args* names nothing, or nothing that can be written into; or *fn* is not a function.
        DuplicateOpError: *fn* is an op already.

    Example:
        >>> from torch import Tensor
        >>> def scale(x: Tensor, factor: float = 2.0) -> Tensor: ...
        >>> lower_signature(scale).schema
        'scale(Tensor x, float factor=2.0) -> Tensor'
    """
    refuse_unknown_variables()
    refuse_other_than_functions(fn)
    return lower_signature_in(fn, scope_of(fn, sys._getframe(1)), mutates_args)  # noqa: SLF001
