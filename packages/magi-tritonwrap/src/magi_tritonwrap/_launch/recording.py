# SPDX-License-Identifier: Apache-2.0
"""One run of a body, recorded as a graph that AOTAutograd's traces replay.

AOTAutograd traces each graph at least twice. A body that reads the data of a tensor, or launches through something that
is not a Triton kernel, would fail halfway through the first trace, when earlier launches have already replaced their
tensors there. So the body runs once on separate fake tensors. If that fails, the op stays opaque in this graph, and its
report says why. If not, each trace gets the recorded operators and launches.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from magi_tritonwrap._kernel.kernels import as_kernel
from magi_tritonwrap._torch_compat.kernels import is_launch, launched_kernel, writes_nothing
from magi_tritonwrap._torch_compat.tracing import (
    SYMBOLIC_NUMBERS,
    decides_by_data,
    detect_fake_mode,
    expression_of,
    functional_storage,
    kept_for_this_compilation,
    number_is_lost,
    on_functional_tensors,
    storage_of,
    unbacked_symbols,
    unwrap_functional,
    uses_real_tensor,
)
from magi_tritonwrap.errors import TritonWrapError

from .capture import CapturedLaunch, capture_launches
from .fake_runs import FakeAddresses, FakeRun
from .hook import STRAYS, in_library_folder
from .normalise import WRITES_NOTHING, refuse_no_write, unsupported


@dataclass(frozen=True)
class Recording:
    """What a body did.

    Attributes:
        graph: its operators and launches, at the Tensors and symbolic numbers among its arguments. None for a body that
            makes numbers of data, because a trace must see what the body checks of them, or of what no graph can
            follow, and for one that tells fake tensors from others: such a body runs again.
        launches: its launches, in order.
    """

    graph: torch.fx.GraphModule | None
    launches: Sequence[CapturedLaunch]

    def replay(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What *fn* returns for these arguments, in the trace that is active, and the launches in it."""
        if self.graph is None:
            with capture_launches() as log, FakeAddresses():
                return fn(*args, **kwargs), log.launches
        varying = [leaf for leaf in tree_leaves((args, kwargs)) if _varies(leaf)]
        return _Replay(self.graph, self.launches).run(*varying), self.launches

    def refuse_no_write(self) -> None:
        """Raise UnsupportedLaunchError for a launch that torch would leave out, before a trace meets it."""
        nodes = [] if self.graph is None else [node for node in self.graph.graph.nodes if is_launch(node.target)]
        for node, launch in zip(nodes, self.launches, strict=False):
            if writes_nothing(node):
                raise unsupported(launch.kernel, WRITES_NOTHING, (launch.file, launch.line))


# As operators, these return numbers that the trace does not know.
_MEASURES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sym_size.int: torch.Tensor.size,
    torch.ops.aten.sym_stride.int: torch.Tensor.stride,
    torch.ops.aten.sym_numel.default: torch.Tensor.numel,
    torch.ops.aten.sym_storage_offset.default: torch.Tensor.storage_offset,
}


class _Replay(torch.fx.Interpreter):
    """Runs a recorded graph. The annotations of the node that is traced stay those of the new nodes."""

    def __init__(self, graph: torch.fx.GraphModule, launches: Sequence[CapturedLaunch]) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # it would change the messages of errors
        in_graph = [node for node in graph.graph.nodes if is_launch(node.target)]
        self._launches = iter(launches if len(launches) == len(in_graph) else ())

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_launch(target):
            return super().call_function(_MEASURES.get(target, target), args, kwargs)
        launch = next(self._launches, None)
        kernel = as_kernel(launched_kernel(kwargs["kernel_idx"])) if launch is None else launch.kernel
        site = None if launch is None else (launch.file, launch.line)
        with refuse_no_write(kernel, kwargs["kwargs"].values(), site):
            return super().call_function(target, args, kwargs)


def recording_of(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], looks_for_writes: bool, tells_fake: bool
) -> Recording | str:
    """What *fn* does with these functional tensors, or why it cannot be traced.

    Within one compilation, *fn* runs once for arguments of the same sizes, types and values. The trace refuses a launch
    that writes nothing; with *looks_for_writes*, which takes longer, it is refused here. With *tells_fake*, *fn* asks
    which of its tensors are fake, as a fake of an op does that computes nothing: it runs on functional ones.

    Raises:
        TritonWrapError: a launch is one that no graph can carry, which is an error rather than a reason.
    """
    leaves, spec = tree_flatten((args, kwargs))
    inner = [unwrap_functional(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    fake_mode = detect_fake_mode(inner)
    if fake_mode is None:
        return Recording(None, ())
    kept = kept_for_this_compilation()
    key = (
        id(fn),
        looks_for_writes,
        spec,
        torch.is_grad_enabled(),
        *(_described(leaves, at) for at in range(len(leaves))),
    )
    if key not in kept:
        known_by_id = [fn, *(leaf for leaf in leaves if not _varies(leaf))]  # kept, so that no other object has the id
        made = _recorded(fn, leaves, inner, spec, fake_mode, tells_fake)
        if looks_for_writes and isinstance(made, Recording):
            made.refuse_no_write()
        kept[key] = made, known_by_id
    found: Recording | str = kept[key][0]
    return found


def _recorded(
    fn: Callable[..., Any], leaves: list[Any], inner: list[Any], spec: TreeSpec, fake_mode: Any, tells_fake: bool
) -> Recording | str:
    def body(*varying: Any) -> Any:
        given = iter(varying)
        args, kwargs = tree_unflatten([next(given) if _varies(leaf) else leaf for leaf in leaves], spec)
        return fn(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(disable_proxy_modes_tracing())
        stack.enter_context(fake_mode)
        if fake_mode.shape_env is not None:
            stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        log = stack.enter_context(capture_launches())
        strays = len(STRAYS)
        fresh = _elsewhere(leaves, inner)
        varying = [fresh[_first(leaves, at)] for at, leaf in enumerate(leaves) if _varies(leaf)]
        in_run = FakeRun(fn, varying)
        stack.enter_context(in_run)
        for run in (on_functional_tensors(body),) if tells_fake else (make_fx(body), body):
            try:
                made = run(*varying)
                break
            except Exception as error:
                why = told(error)
                in_run.forget(error=error)
                if isinstance(error, TritonWrapError):
                    raise
                if run is body or not number_is_lost(error):
                    return why
        if len(STRAYS) > strays:
            return f"it launches a kernel in another thread ({':'.join(map(str, STRAYS[-1]))})"
        if kept := in_run.forget(made):
            return kept
    if tells_fake and not log.launches:
        return "it asks whether a tensor is fake, and launches nothing on those of a trace"
    if not isinstance(made, torch.fx.GraphModule):
        return Recording(None, log.launches)
    met = [node.meta.get("val") for node in made.graph.nodes]
    # torch writes a product of three sizes that it has lost track of as `operator.mul(a, b, c)` (2.10 to 2.15).
    is_lost = any(node.target in (operator.mul, operator.add) and len(node.args) > 2 for node in made.graph.nodes)
    is_plain = not any(isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg()) for leaf in leaves)
    is_known = is_plain and not is_lost and unbacked_symbols(met) <= unbacked_symbols(inner)
    return Recording(made if is_known else None, log.launches)


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *SYMBOLIC_NUMBERS))


def _first(leaves: list[Any], at: int) -> int:
    """The position of the first of *leaves* that is the same object as the one at position *at*."""
    return next(index for index, leaf in enumerate(leaves) if leaf is leaves[at])


def _described(leaves: list[Any], at: int) -> Hashable:
    """What a body can see of an argument without reading data."""
    leaf = leaves[at]
    if isinstance(leaf, torch.Tensor):
        sharing = [index for index, other in enumerate(leaves) if _memory_of(other) == _memory_of(leaf)]
        kind = (leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad, leaf.is_conj(), leaf.is_neg())
        return (_first(leaves, at), sharing[0], *kind, *map(expression_of, _measures(unwrap_functional(leaf))))
    if isinstance(leaf, SYMBOLIC_NUMBERS):
        return (type(leaf), expression_of(leaf))
    # 0.0 and -0.0 are equal, and objects of users may be equal and yet differ in what a body reads.
    return (type(leaf), repr(leaf) if isinstance(leaf, (bool, int, float, complex, str, torch.device)) else id(leaf))


def _measures(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:
        return (*tensor.size(),)
    return (*tensor.size(), *tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())


def _memory_of(leaf: object) -> object:
    """A value that is the same for Tensors that share memory."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return id(leaf)
    return functional_storage(leaf) or storage_of(leaf)


def _elsewhere(leaves: list[Any], inner: list[Any]) -> list[Any]:
    """*inner* with Tensors of the same layouts, which may be written without changing those that are being traced.

    Those that share memory share it here as well.
    """
    memories: dict[object, torch.Tensor] = {}

    def fresh(leaf: object, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return torch.empty_like(tensor)
        how: Any = {"dtype": tensor.dtype, "device": tensor.device}
        made = torch.empty_strided(tensor.size(), tensor.stride(), **how)
        is_whole = tuple(map(expression_of, _measures(made))) == tuple(map(expression_of, _measures(tensor)))
        is_shared = sum(_memory_of(other) == _memory_of(leaf) for other in leaves) > 1
        if is_shared or not is_whole:
            length = tensor.untyped_storage().nbytes() // tensor.element_size()
            memory = memories.setdefault(_memory_of(leaf), torch.empty((length,), **how))
            made = memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return made.requires_grad_(tensor.requires_grad)

    pairs = zip(leaves, inner, strict=True)
    return [fresh(leaf, value) if isinstance(value, torch.Tensor) else value for leaf, value in pairs]


def told(error: Exception) -> str:
    """The message of an error of a body in one line, with the place in the author's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not in_library_folder(frame.filename)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if uses_real_tensor(error):
        return f"it uses a Tensor that is not an argument{place}; pass it as one"
    # torch's message names a symbol, which differs between traces.
    first_line = "it branches on data of a tensor" if decides_by_data(error) else str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}{place}"
