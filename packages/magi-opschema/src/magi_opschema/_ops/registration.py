# SPDX-License-Identifier: Apache-2.0
"""The only module that registers anything with torch: one library fragment for each op, and the kernels in it.

A mutating op may get a second op, its functional form, which writes into nothing:

    mylib::fill              (Tensor x, Tensor(a0!) out) -> (Tensor, SymInt)
    mylib::fill__functional  (Tensor x, Tensor out) -> (Tensor, SymInt, Tensor)

AOTAutograd writes a mutating op as `auto_functionalized`. That refuses an op that returns anything else than Tensors
(torch/_higher_order_ops/auto_functionalize.py, `can_auto_functionalize`), and Inductor cannot compile it where such an
op has one output and gets nothing to write into, an empty list or None. There, a graph of ours has the functional form,
which returns new contents, and copies them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from magi_opschema import _torch_compat as compat
from magi_opschema._autograd import (
    Derivative,
    Formula,
    autograd_kernel,
    mutation_kernel,
    transforms_kernel,
    vmap_by_loop,
)
from magi_opschema._call.checks import CallCheck
from magi_opschema._call.direct import DirectCalls, count_writes
from magi_opschema._call.misfit import ErrorTranslation
from magi_opschema._codegen.functions import compile_twin
from magi_opschema._codegen.source import become, compile_at_first_call
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import NO_DEFAULT, Flat, as_output, as_tuple, schema_text, tensors_in
from magi_opschema.errors import RuleError

from .rules import FakeSlot


registering = threading.RLock()
"""Held from the check that a name is free until its op is known."""
Step: TypeAlias = Callable[[torch.library.Library], None]


@dataclass(eq=False)
class Registration:
    """What an op holds in torch. It keeps the library alive, because the op ends with it."""

    lowering: SignatureLowering
    library: torch.library.Library
    torch_op: Any
    check: CallCheck
    steps: list[Step]
    """The steps of the registration, so that it can be repeated."""
    fake: FakeSlot
    derivative: Derivative
    kernel: Callable[..., Any]
    """The kernel of the body for every device type without one of its own."""
    direct: DirectCalls
    functional_op: Any = None
    """The functional form of a mutating op; None for an op without one."""

    def add(self, step: Step) -> None:
        """Run *step* with the library, and remember it."""
        step(self.library)
        self.steps.append(step)

    def add_body(self, fn: Callable[..., Any], key: str) -> None:
        """Register *fn*, which has the user's signature, as the body for the devices of one dispatch key."""
        kernel = body_kernel(self.lowering, fn, self.check)
        self.add(_impl(self.lowering.title.split("::")[1], kernel, key))
        self.direct.add(key, kernel)

    def replace_body(self, fn: Callable[..., Any]) -> None:
        """Make *fn*, which has the user's signature, the body for every device type without one of its own."""
        become(self.kernel, compiled_kernel(self.lowering, fn, self.check))

    def add_autocast(self, device_type: str, dtype: torch.dtype) -> None:
        """Cast the floating-point Tensors among the arguments to *dtype* under autocast."""
        name = self.lowering.title
        self.add(lambda library: torch.library.register_autocast(name, device_type, dtype, lib=library))

    def register_again(self) -> None:
        """Register the op with torch again, after `unregister`."""
        self.library = torch.library.Library(self.lowering.title.split("::")[0], "FRAGMENT")
        for step in self.steps:
            step(self.library)
        for op in self.torch_ops:
            compat.restore_packet(op)
        self.direct.set_registered(is_registered=True)

    @property
    def torch_ops(self) -> tuple[Any, ...]:
        """The OpOverload of the op, and that of its functional form if it has one."""
        return (self.torch_op,) if self.functional_op is None else (self.torch_op, self.functional_op)


def register(
    lowering: SignatureLowering,
    fn: Callable[..., Any],
    fake: FakeSlot,
    formula: Formula | None,
    tags: Sequence[torch.Tag],
) -> Registration:
    """Define `namespace::op` and register its kernels.

    | key | kernel |
    |---|---|
    | CompositeExplicitAutograd | the body, for every device type without a body of its own |
    | Meta and FakeTensor | the fake |
    | Autograd | an autograd.Function; of a mutating op, the error where a gradient would be wrong |
    | FuncTorchDynamicLayerFrontMode | an autograd.Function, for torch.func transforms |
    | ADInplaceOrView | of a mutating op, the bump of version counters |

    A mutating op that torch cannot make functional gets a second op, its functional form.

    If one of these steps fails, nothing stays registered.
    """
    name = lowering.title
    namespace, op_name = name.split("::")
    schema = lowering.schema.replace(lowering.name, op_name, 1)
    all_tags = tuple({torch.Tag.pt2_compliant_tag, *tags})

    def define(library: torch.library.Library) -> None:
        library.define(schema, tags=all_tags)

    with registering:
        library = torch.library.Library(namespace, "FRAGMENT")
        try:
            define(library)
            torch_op = getattr(getattr(torch.ops, namespace), op_name).default
            compat.translate_errors(torch_op, ErrorTranslation(lowering).of_flat)
            check = CallCheck(lowering, torch_op, lambda: fake.runs_body)
            kernel = body_kernel(lowering, fn, check)
            direct = DirectCalls(lowering, torch_op, kernel)

            def traced(*args: Any, **kwargs: Any) -> Any:
                # The direct call is offered to Inductor here, because that is loaded only when an op is traced for it.
                compat.call_directly(torch_op, direct.key_of)
                check.await_real(args, kwargs)
                return fake.run(*args, **kwargs)

            derivative = Derivative(lowering, torch_op, formula)
            registration = Registration(lowering, library, torch_op, check, [define], fake, derivative, kernel, direct)
            registration.add(_impl(op_name, kernel, "CompositeExplicitAutograd"))
            registration.add(lambda library: compat.register_fake(library, name, traced, lowering.location))
            if lowering.mutated:
                registration.add(_impl(op_name, mutation_kernel(lowering, torch_op), "Autograd"))
                registration.add(_impl(op_name, _version_kernel(lowering, torch_op), "ADInplaceOrView"))
                batched = _batched_mutation(lowering, registration)
                registration.add(lambda library: torch.library.register_vmap(name, batched, lib=library))
                may_write_nothing = all(argument.schema_type != "Tensor" for argument in lowering.mutated)
                if _returns_others(lowering) or (len(lowering.return_leaves) == 1 and may_write_nothing):
                    _add_functional_form(registration)
            else:
                registration.add(_impl(op_name, autograd_kernel(derivative), "Autograd"))
                registration.add(_impl(op_name, transforms_kernel(derivative), "FuncTorchDynamicLayerFrontMode"))
                compat.install_kernel_guards()
                guard = functools.partial(_refuse_kernel, lowering)
                registration.add(lambda _: compat.kernel_guards.update({name: guard}))
        except BaseException:
            compat.destroy(library)
            raise
    return registration


def _refuse_kernel(lowering: SignatureLowering, key: str) -> None:
    """Raise for a kernel that calls would reach or not, because the op applies an autograd.Function before it."""
    rule = {"FuncTorchBatched": "register_vmap"}.get(key, "register_autograd" if key.startswith("Autograd") else "")
    if rule:
        text = f"torch.library.{rule}, or a kernel at {key}, would change some of its calls and not others"
        fix = f"Use the op's own: {lowering.name}.{rule}, or {rule} of magi_opschema"
        raise RuleError(lowering.sentence(f"{text}. {fix}."))


def _returns_others(lowering: SignatureLowering) -> bool:
    return any(leaf.schema_type != "Tensor" for leaf in lowering.return_leaves)


def _add_functional_form(registration: Registration) -> None:
    """Define and register the functional form of a mutating op, and make compilers use it where torch has none."""
    lowering, layout = registration.lowering, registration.lowering.layout
    name = f"{lowering.title}__functional"
    namespace, op_name = name.split("::")
    count, written = len(lowering.return_leaves), [i for i, known in enumerate(lowering.arguments) if known.alias]
    arguments = tuple(replace(argument, alias="", default=NO_DEFAULT) for argument in lowering.arguments)
    returned = [leaf.schema_type for leaf in lowering.return_leaves]
    schema = schema_text(op_name, arguments, (*returned, *(arguments[i].schema_type for i in written)))

    def all_arguments(args: Flat, kwargs: dict[str, Any]) -> Flat:
        # An op with bundles has no defaults, so it is called with all arguments.
        return args if layout.bundles else layout.fill(args, kwargs)

    def body(*args: Any, **kwargs: Any) -> Any:
        """The op, called with copies of what it writes; this is the fake too."""
        flat = list(all_arguments(args, kwargs))
        for i in written:
            flat[i] = _copy(flat[i])
        outputs = as_tuple(layout.apply(registration.torch_op, tuple(flat)), count)
        return as_output((*outputs, *(flat[i] for i in written)))

    compat.hide_from_dynamo(body)

    def define(library: torch.library.Library) -> None:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(op_name, body, "CompositeExplicitAutograd")
        compat.register_fake(library, name, body, lowering.location)

    def rule(*args: Any, **kwargs: Any) -> Any:
        """What makes a call of the op functional, where torch has no way of its own."""
        flat = all_arguments(args, kwargs)
        targets = [list(tensors_in(flat[i])) for i in written]
        if any(targets) and not _returns_others(lowering):
            return NotImplemented
        outputs = as_tuple(layout.apply(registration.functional_op, flat), count + len(written))
        for tensors, contents in zip(targets, outputs[count:], strict=True):
            for tensor, new in zip(tensors, tensors_in(contents), strict=True):
                tensor.copy_(new)
        return as_output(outputs[:count])

    registration.add(define)
    registration.functional_op = getattr(getattr(torch.ops, namespace), op_name).default
    compat.functionalize_by(registration.torch_op, rule)


def _copy(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    if value is None or value.layout is not torch.strided:
        return None if value is None else value.clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _impl(op_name: str, kernel: Callable[..., Any], key: str) -> Step:
    return lambda library: library.impl(op_name, kernel, key)


def unregister(registration: Registration) -> None:
    """Unregister an op from torch, so that its name is free again. Its OpOverload can still be called safely."""
    with registering:
        for op in registration.torch_ops:
            compat.keep_entry(op)
        compat.kernel_guards.pop(registration.lowering.title, None)
        compat.destroy(registration.library)
        registration.direct.set_registered(is_registered=False)


@contextlib.contextmanager
def replacing(earlier: Registration | None) -> Iterator[None]:
    """A context in which *earlier* is unregistered; it is registered again if the `with` block raises."""
    if earlier is None:
        yield
        return
    with registering:
        unregister(earlier)
        try:
            yield
        except BaseException:
            earlier.register_again()
            raise


def body_kernel(lowering: SignatureLowering, fn: Callable[..., Any], check: CallCheck) -> Callable[..., Any]:
    """The kernel of one body: *fn*, at the user's signature, with the check of the first real call."""
    return compat.hide_from_dynamo(compile_at_first_call(lambda: compiled_kernel(lowering, fn, check)))


def compiled_kernel(lowering: SignatureLowering, fn: Callable[..., Any], check: CallCheck) -> Callable[..., Any]:
    """`body_kernel`, compiled now."""
    lowered = compile_at_first_call(functools.partial(compile_twin, lowering, fn, "lowered"))
    return compat.hide_from_dynamo(compile_twin(lowering, fn, "kernel", check, functools.partial(check.run, lowered)))


def _batched_mutation(lowering: SignatureLowering, registration: Registration) -> Callable[..., Any]:
    """Vmap of a mutating op, which an autograd.Function cannot support: by the user's rule, or element by element."""
    layout = lowering.layout

    def batched(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        flat = layout.fill(args, {})
        in_dims = layout.open(in_dims, masks=args)
        dims = (*in_dims, *(None for _ in range(len(flat) - len(in_dims))))
        if (rule := registration.derivative.vmap_rule) is not None:
            output, out_dims = rule(info, dims, *flat)
            return as_output(output), as_output(out_dims)
        for position, path in layout.mutated.items():
            if flat[position] is not None and dims[position] is None:
                text = f"under vmap every element of the batch would write into '{path}', which has no batch dimension."
                raise RuleError(lowering.sentence(f"{text} Expand it, or give a rule with register_vmap."))
        return vmap_by_loop(lowering, info, dims, flat, lambda *values: layout.call(registration.torch_op, values))

    return batched


def _version_kernel(lowering: SignatureLowering, op: Any) -> Callable[..., Any]:
    layout = lowering.layout

    def kernel(*args: Any, **kwargs: Any) -> Any:
        count_writes(layout, args, kwargs)
        with compat.below_adinplaceorview_pool.make():
            return op(*args, **kwargs)

    return compat.hide_from_dynamo(kernel)
