# SPDX-License-Identifier: Apache-2.0
"""Nodes and graphs: what they call, what they write to, how they are cut."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.fx import GraphModule
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node


_OF_TORCH = ("aten", "prim", "prims")
_WITHOUT_CONTENTS = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
"""What Dynamo captures at the start and the end of a region of autocast; the second takes what the first returns."""

SET_GRAD_MODE = torch._C._set_grad_enabled
"""The function whose call Dynamo captures when grad mode changes."""


def triton_launches(graph: Graph) -> list[tuple[str, Node]]:
    """The launches in *graph* after functionalisation, each with the name of the kernel.

    Each has an item for each tensor that it writes to.
    """
    # Not at the top: passes call this, and the globals of what a pass calls are part of its uuid, with their state.
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    found = []
    for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        while not hasattr(kernel, "__name__"):
            kernel = kernel.fn  # an autotuner
        found.append((kernel.__name__, node))
    return found


def nesting(node: Node) -> int:
    """The number of nested regions, of ``torch.func``, saved-tensor hooks or similar, that *node* opens or closes.

    Dynamo captures the two ends of such a region as two calls (2.10 to 2.15). Autocast and grad mode are not among
    them: a call inside those can be captured again by itself.
    """
    name = getattr(node.target, "__name__", str(node.target))
    if node.target in (ENTER_AUTOCAST, EXIT_AUTOCAST):
        return 0
    if "increment_nesting" in name or name.startswith("_enter_") or name.endswith("hooks_disable"):
        return 1
    return -1 if "decrement_nesting" in name or name.startswith("_exit_") or name.endswith("hooks_enable") else 0


def is_empty(node: Node) -> bool:
    """Whether *node* makes a tensor without contents, by a function of torch, a method or an operator."""
    target: Any = node.target
    namespace, _, name = operator_name(target).partition("::")
    if namespace:
        return namespace == "aten" and name in _WITHOUT_CONTENTS
    if node.op == "call_method":
        return target in _WITHOUT_CONTENTS
    return node.op == "call_function" and any(
        target is getattr(owner, name, None) for owner in (torch, torch.Tensor) for name in _WITHOUT_CONTENTS
    )


def is_write(node: Node) -> bool:
    """Whether *node* is a write of a kernel or an operator that functionalisation has made functional."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    return node.target in (auto_functionalized, auto_functionalized_v2, triton_kernel_wrapper_functional)


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The fake tensors in what *node* of a captured graph gives."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(leaf, torch.Tensor)]


def tuple_of(node: Node) -> Node | None:
    """The node whose item *node* is; None if it is something else, such as a part of a tensor."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, torch.fx.Node) and not isinstance(source.meta.get("example_value"), torch.Tensor):
        return source
    return None


def written_tensors(node: Node) -> list[torch.Tensor]:
    """The tensors that *node* of a captured graph may write to, by its schema or, for what has none, by its name."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    given: list[Any] = []
    if overloads := overloads_of(node.target):
        for place, argument in enumerate(overloads[0]._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given.append(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
    elif is_higher_order(node.target):
        given = [node.args, node.kwargs] if node.target is triton_kernel_wrapper_mutation else []
    else:
        given = [node.kwargs.get("out"), node.args[:1] if _is_in_place(node) else None]
    values = map_arg(given, lambda n: n.meta.get("example_value"))
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_in_place(node: Node) -> bool:
    """Whether a function or method writes to its first argument, by its name, or by its argument ``inplace``."""
    name, target = called_name(node), node.target
    if getattr(target, "__module__", "") == "_operator":  # `and_` is ``&``
        return name in _IN_PLACE
    if re.search("[a-z]_$", name):
        return True
    if not inspect.isfunction(target) or "inplace" not in (parameters := inspect.signature(target).parameters):
        return False
    place = list(parameters).index("inplace")
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("inplace", False))


_IN_PLACE = (
    *("setitem", "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub"),
    *("itruediv", "ixor"),
)


def changes_sizes(node: Node) -> bool:
    """Whether *node* gives a tensor other sizes or memory in place, as ``t_`` and ``resize_`` do."""
    of_torch = getattr(torch.ops.aten, called_name(node), None) if node.op.startswith("call_") else None
    return any(torch.Tag.inplace_view in op.tags for op in overloads_of(node.target) or overloads_of(of_torch))


def operator_name(target: object) -> str:
    """``ns::op`` for an operator of the dispatcher, otherwise an empty string."""
    overloads = overloads_of(target)
    return str(overloads[0].name()).partition(".")[0] if overloads else ""


def is_higher_order(target: object) -> bool:
    """Whether the target of a graph node is an operator that takes graphs, such as the one of an autograd.Function."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def called_overload(node: Node) -> str:
    """``ns::op`` or ``ns::op.overload``, the name of the overload that *node* calls; empty if it calls no operator.

    Dynamo captures ``torch.ops.ns.op(x)`` as a call of a packet, whose overload torch chooses by the arguments
    (``check_pt2_compliant_op`` in torch/_dynamo/output_graph.py does it likewise, 2.10 to 2.15).
    """
    overloads, target = overloads_of(node.target), node.target
    if isinstance(target, torch._ops.OpOverloadPacket) and len(overloads) > 1:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("example_value"))
        chosen = torch._C._jit_resolve_packet(target._qualified_op_name, *args, **kwargs)
        return str(getattr(target, chosen).name())
    return str(overloads[0].name()) if overloads else ""


def called_name(node: Node) -> str:
    """The name of the function, method or operator that *node* calls, without a namespace."""
    target: Any = node.target
    return target if isinstance(target, str) else operator_name(target).rpartition("::")[2] or target.__name__


def launch_constants(node: Node) -> dict[str, Any] | None:
    """The keyword arguments of a captured Triton launch, with its constants in place of the number of their entry."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

    if node.target is not triton_kernel_wrapper_mutation:
        return None
    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
    return {**node.kwargs, "constant_args_idx": constants}


def nodes_in(gm: GraphModule) -> list[Node]:
    """The nodes of *gm*, and of the graphs inside it."""
    return [node for module in gm.modules() if isinstance(module, GraphModule) for node in module.graph.nodes]


def dtypes_in(gm: GraphModule) -> frozenset[torch.dtype]:
    """The dtypes of the tensors in a captured graph, also in nested graphs."""
    return frozenset(tensor.dtype for node in nodes_in(gm) for tensor in tensors_of(node))


def operator_schemas(gm: GraphModule) -> tuple[str, ...]:
    """The schema of each operator that *gm* calls, also in nested graphs, with the outputs that its fake gave.

    Those of torch itself are left out.
    """
    found = set()
    for node in nodes_in(gm):
        for op in overloads_of(node.target):
            if op.namespace not in _OF_TORCH:
                outputs = "; ".join(
                    f"{one.dtype} {one.device} {tuple(map(str, one.shape))} {tuple(map(str, one.stride()))}"
                    for one in tensors_of(node)
                    if one.layout == torch.strided
                )
                found.add(f"{op._schema}: {outputs}")
    return tuple(sorted(found))


def gradient_functions(gm: GraphModule) -> tuple[Callable[..., Any], ...]:
    """The functions that differentiate the operators of ``torch.library.custom_op`` that *gm* calls (2.10 to 2.15)."""
    names = dict.fromkeys(op.name() for node in nodes_in(gm) for op in overloads_of(node.target))
    found = [OPDEFS[name] for name in names if name in OPDEFS]
    return tuple(fn for one in found for fn in (one._backward_fn, one._setup_context_fn) if fn is not None)


def python_operators(graph: Graph) -> tuple[str, ...]:
    """The operators in *graph*, as ``ns::op``, that have a kernel written in Python, also inside functional writes.

    ``torch.library`` keeps the names of the kernels that it was given as ``ns/op/key`` (2.10 to 2.15). Those of a
    ``custom_op`` that was registered again are lost when its first library is collected (``_del_library``).
    """
    named = {key.rpartition("/")[0].replace("/", "::") for key in torch.library._impls} | set(OPDEFS)
    called = {
        value for node in graph.nodes for value in (node.target, *node.args) if isinstance(value, torch._ops.OpOverload)
    }
    return tuple(sorted(operator_name(op) for op in called if {op.name(), operator_name(op)} & named))


def body_for(op: Any, device_type: str) -> Callable[..., Any] | None:
    """The kernel of an operator for a type of device, called below autograd and all modes; None if it has none."""
    name = torch._C._dispatch_key_for_device(device_type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), name):
        return None
    key = torch._C._parse_dispatch_key(name)
    assert key is not None, "the key of a device has a name"
    return functools.partial(op.redispatch, torch._C.DispatchKeySet(key))


def operator_names() -> list[str]:
    """Every operator that is registered, as ``ns::op``."""
    return sorted({name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()})


_PRODUCTS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)


def is_product(target: object) -> bool:
    """Whether the target of a node is compute-bound: a matrix product, a convolution, or attention."""
    if getattr(target, "__name__", "") == "flex_attention":
        return True
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and target._opname in _PRODUCTS


def has_backward(graph: Any) -> bool:
    """Whether *graph* is a joint graph, whose later part computes gradients from tangents."""
    return any("tangents" in node.name for node in graph.find_nodes(op="placeholder"))


def in_backward(node: Any) -> bool:
    """Whether a node of a joint graph belongs to its backward."""
    return node.meta.get("partitioner_tag") == "is_backward" or "fwd_source_fn_stack" in node.meta


def source_name(placeholder: Node) -> str:
    """The source of an input as Python: ``L['batch']['x']``. It is a method up to torch 2.12, and a property later."""
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)


def static_sizes(gm: GraphModule) -> tuple[str, ...]:
    """How each guard on a size begins that is there because an input of *gm* has a mark of ``mark_static``."""
    guards = list[str]()
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        given = getattr(placeholder.meta.get("grapharg"), "example", None)
        if marked := getattr(given, "_dynamo_static_indices", ()):
            name = re.sub(r"^L\['(\w+)'\]", r"\1", source_name(placeholder))
            guards += [f"tensor '{name}' size mismatch at index {dim}." for dim in marked]
    return tuple(guards)


def bodies(gm: GraphModule, node: Node) -> list[GraphModule]:
    """The graphs inside *gm* that *node*, a call of a higher-order operator, runs; empty for any other node."""
    if not is_higher_order(node.target):
        return []
    held = (getattr(gm, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr")
    return [body for body in held if isinstance(body, GraphModule)]


_OF_A_CAPTURE = ("_param_name_to_source", "compile_subgraph_reason")
"""The attributes that Dynamo sets on the module of a graph besides ``meta``, and that a copy needs."""


def graph_copy(gm: GraphModule, done: dict[int, GraphModule] | None = None) -> GraphModule:
    """A copy of a graph, with the graphs inside it and with everything that AOTAutograd reads of a captured one.

    Parameters and constants are shared, and so are copies that are *done*. The copy of a node loses ``_dynamo_source``,
    which is set again; ``meta["grapharg"]`` is left out, because it would keep the caller's values alive.
    """
    done = {} if done is None else done
    if id(gm) in done:
        return done[id(gm)]
    twin = done[id(gm)] = GraphModule(gm, copy.deepcopy(gm.graph))
    twin.meta = dict(gm.meta)
    for name in _OF_A_CAPTURE:
        if hasattr(gm, name):
            setattr(twin, name, getattr(gm, name))
    for name, child in gm.named_children():
        if isinstance(child, GraphModule):  # hooks for saved tensors are called by no node
            setattr(twin, name, graph_copy(child, done))
    for node, original in zip(twin.graph.nodes, gm.graph.nodes, strict=True):
        node.meta.pop("grapharg", None)
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    return twin


def declared_kinds(overload: Any, place: int | str) -> tuple[str, ...]:
    """The types that *overload* declares at *place*, a position or a name, such as ``("int",)``; empty for none."""
    arguments = overload._schema.arguments
    if isinstance(place, str):
        return tuple(str(argument.type) for argument in arguments if argument.name == place)
    return tuple(str(argument.type) for argument in arguments[place : place + 1])


def tensor_overloads(name: str) -> list[Any]:
    """ATen's overloads of *name* that return a tensor, which those for TorchScript's numbers do not."""
    overloads = overloads_of(getattr(torch.ops.aten, name, None)) if name.isidentifier() else []
    return [each for each in overloads if any("Tensor" in str(result.type) for result in each._schema.returns)]


def overloads_of(target: object) -> list[Any]:
    """The overloads that a call of *target* may choose; none if it is not an operator of the dispatcher."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


def schema_of(node: Node) -> Any:
    """The declaration of the operator that *node* calls; None if it calls none."""
    overloads = overloads_of(node.target)
    return overloads[0]._schema if overloads else None
