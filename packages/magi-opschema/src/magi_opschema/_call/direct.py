# SPDX-License-Identifier: Apache-2.0
"""A call from the code that Inductor generates straight to an op's body, past the dispatcher.

The dispatcher takes longer than a small kernel: it converts each argument to C++ and back, and passes the kernel at the
Autograd key. Generated code needs neither. Like the kernels around the call, the body gets plain Tensors of a known
device, with gradients off. Where only the dispatcher can tell which body runs, or what it gets, the call stays its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from magi_opschema import _torch_compat as compat
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import Flat, FlatLayout, tensors_in


class DirectCalls:
    """Functions that call the bodies of one op, for the dispatch keys that generated code has asked for."""

    def __init__(self, lowering: SignatureLowering, torch_op: Any, own: Callable[..., Any]) -> None:
        self.bodies: dict[str, Callable[..., Any]] = {}
        """The kernels of the bodies for one device type, by dispatch key."""
        self._own = own
        self._lowering, self._torch_op = lowering, torch_op
        self._pool = compat.below_adinplaceorview_pool if lowering.mutated else compat.below_autograd_pool
        self._calls: dict[str, Callable[..., Any]] = {}
        self._called: dict[str, Callable[..., Any]] = {}
        self._is_registered = True
        torch_op.magi_direct = self.at

    def add(self, key: str, kernel: Callable[..., Any]) -> None:
        """Let calls at the dispatch key *key* run *kernel*, also those of code that was generated before."""
        self.bodies[key] = kernel
        self._choose()

    def set_registered(self, *, is_registered: bool) -> None:
        """While the op is not registered, calls go to its OpOverload, which stands for the op that replaced it."""
        self._is_registered = is_registered
        self._choose()

    def _choose(self) -> None:
        for key in self._calls:
            kernel = self.bodies.get(key, self._own)
            if self._lowering.mutated:
                kernel = functools.partial(_count_and_call, self._lowering.layout, kernel)
            self._called[key] = kernel if self._is_registered else self._torch_op

    def key_of(self, args: Flat, kwargs: dict[str, Any]) -> str:
        """The dispatch key whose body a call runs; empty if the dispatcher would do more than run it.

        The arguments are those of a traced call, which the dispatcher has converted to what the schema says.
        """
        tensors = list(tensors_in((args, kwargs)))
        types = {tensor.device.type for tensor in tensors}
        # In a graph of torch 2.10 a view may be conjugated where the op gets it, which later releases do before.
        if len(types) != 1 or any(t.layout is not torch.strided or t.is_conj() or t.is_neg() for t in tensors):
            return ""
        if not all(leaf.is_tensor for leaf in self._lowering.return_leaves):
            return ""
        return compat.dispatch_key_of(types.pop())

    def at(self, key: str) -> Callable[..., Any]:
        """The function of the flat arguments that runs the body for the dispatch key *key*.

        It calls the OpOverload if a mode or a profiler must see the call. It is the OpOverload if another library has
        registered a kernel for this op, which stands before ours; that is looked for when generated code is loaded.
        """
        others = {key, f"Autograd{key}"} - self.bodies.keys()
        if any(compat.has_kernel(self._lowering.title, other) for other in others):
            return self._torch_op  # type: ignore[no-any-return]
        if key in self._calls:
            return self._calls[key]
        torch_op, called, make, unused = self._torch_op, self._called, self._pool.make, self._pool.unused
        count_dispatch_modes, count_function_modes = compat.count_dispatch_modes, compat.count_function_modes
        profiler = compat.profiler

        def call(*args: Any, **kwargs: Any) -> Any:
            if count_dispatch_modes() or count_function_modes() or profiler._is_profiler_enabled:  # noqa: SLF001
                return torch_op(*args, **kwargs)
            try:
                context = unused.pop()
            except IndexError:
                context = make()
            with context:
                output = called[key](*args, **kwargs)
            unused.append(context)
            return output

        self._calls[key] = compat.hide_from_dynamo(call)
        self._choose()
        return call


def _count_and_call(layout: FlatLayout, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    count_writes(layout, args, kwargs)
    return kernel(*args, **kwargs)


def count_writes(layout: FlatLayout, args: Flat, kwargs: dict[str, Any]) -> None:
    """Bump the version counters of what a call writes into."""
    flat = layout.fill(args, kwargs)
    for position in layout.mutated:
        compat.increment_version(tuple(tensors_in(flat[position])))
