# SPDX-License-Identifier: Apache-2.0
"""What is verified on an op's first real call: writes, aliasing, the fake, and rebuilt records.

The check is repeated until a call passes it, and for the first call of each kind that was traced: a fake may be right
for float32 alone, and no code that was compiled with it would notice. A fake that is the body is compared only for what
was traced. With `MAGI_OPSCHEMA_CHECK=1` in the environment when the op is decorated, every call is checked.

A Tensor counts the writes into it, and into the views that share its memory. An inference tensor does not, so its
contents are compared. Some writes are not counted: those of a Triton kernel, of NumPy, through `.data`, and of an
operator whose schema does not declare the write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from magi_opschema._codegen.source import rejection
from magi_opschema._environment import CHECK, is_set
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.schema import Argument, Flat, as_tuple, takes, tensors_in
from magi_opschema._model.tree import Leaf, Node, Record, dotted, leaves, nodes
from magi_opschema._text import show_value
from magi_opschema._torch_compat import counting_writes, run_on_fakes, writes_counted
from magi_opschema.errors import AliasingError, FakeMismatchError, MutationError, ReturnValueError, RoundTripError

from .bridge import Bridge


_MAX_BYTES = 2**24
"""The largest size in bytes of an inference tensor that is compared; if every call is checked, larger ones are too."""


def watch_inputs(lowering: SignatureLowering, flat: Flat, *, thorough: bool) -> list[tuple[str, Callable[[], bool]]]:
    """The paths of the Tensors that the body must not write into, each with a function that says whether it did.

    Tensors that share memory with a Tensor of `mutates_args` are left out, because they may share the count of writes
    too. Tensors without memory are left out, because sharing cannot be detected for them.
    """
    named = [
        (dotted(slot.leaves[0].path), tensor, bool(slot.alias))
        for slot, value in zip(lowering.slots, lowering.layout.open(flat), strict=True)
        if slot.leaves[0].is_tensor
        for tensor in tensors_in(value)
        if tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() != 0
    ]
    mutated = {memory(tensor) for _, tensor, is_mutated in named if is_mutated}
    return [(path, _watch(tensor, thorough=thorough)) for path, tensor, _ in named if memory(tensor) not in mutated]


def _watch(tensor: torch.Tensor, *, thorough: bool) -> Callable[[], bool]:
    """A function that says whether *tensor* was written into since now, by the count of writes or by its contents.

    It returns False if neither can be compared. With *thorough*, the contents are compared whatever their size.
    """
    if not tensor.is_inference():
        count = writes_counted(tensor)
        return lambda: writes_counted(tensor) != count
    is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout is torch.strided
    is_small = thorough or tensor.numel() * tensor.element_size() <= _MAX_BYTES
    is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()  # then nothing can be read back
    if not is_plain or not is_small or tensor.is_quantized or is_captured:
        return lambda: False

    def contents() -> torch.Tensor:
        # As numbers, a nan would not equal itself.
        copied = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return copied.view(-1).view(torch.uint8)

    form, before = (tensor.shape, tensor.stride()), contents()
    return lambda: (tensor.shape, tensor.stride()) != form or not torch.equal(before, contents())


def memory(tensor: torch.Tensor) -> object:
    """A value that is equal for two tensors that share memory; an empty tensor shares none with others."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _kind(flat: Flat) -> tuple[object, ...]:
    """What the dtypes of outputs may follow from: the dtypes of Tensors, None, flags and names."""
    return tuple(
        value
        if value is None or isinstance(value, (bool, str, torch.dtype))
        else tuple(tensor.dtype for tensor in tensors_in(value))
        for value in flat
    )


class CallCheck:
    """The check of one op; `pending` says whether the next call may need it."""

    def __init__(
        self, lowering: SignatureLowering, torch_op: Callable[..., Any], fake_runs_body: Callable[[], bool]
    ) -> None:
        self.pending = True
        self._fake_runs_body = fake_runs_body
        self._always = is_set(CHECK)
        self._lowering = lowering
        self._torch_op = torch_op
        self._passed: set[tuple[object, ...]] = set()
        self._traced: set[tuple[object, ...]] = set()

    def await_real(self, args: Flat, kwargs: dict[str, Any]) -> None:
        """Check the first real call of the kind of this one, for which the fake runs."""
        kind = _kind(self._lowering.layout.fill(args, kwargs))
        if kind not in self._passed:
            self._traced.add(kind)
            self.pending = True

    def run(self, body: Callable[..., Any], flat: Flat) -> Any:
        """The flat output of *body*, which has the flat signature and gets *flat*; the call is checked.

        Raises:
            MutationError: the body wrote into a Tensor that `mutates_args` does not name.
            ReturnValueError: an output is of another class than the signature says.
            AliasingError: an output shares memory with an input or another output.
            FakeMismatchError: the fake fails, or returns another shape, dtype, device or other strides.
            RoundTripError: a record, passed or returned, differs after the op rebuilt it from its fields.
        """
        kind = _kind(self._lowering.layout.open(flat))
        if kind in self._passed and not self._always:
            return self._lowering.layout.apply(body, flat)  # one of another kind is awaited
        inputs = watch_inputs(self._lowering, flat, thorough=self._always)
        with counting_writes():
            output = self._lowering.layout.apply(body, flat)
        self._check_writes(inputs)
        outputs = as_tuple(output, len(self._lowering.return_leaves))
        for leaf, each in zip(self._lowering.return_leaves, outputs, strict=True):
            if not takes(leaf.schema_type, each):
                rejection(self._lowering, leaf, returned=ReturnValueError)(each)
        self._check_records(flat, outputs)
        self._check_aliasing(flat, outputs)
        # To run the body once more would change what it keeps between calls.
        if kind in self._traced or not self._fake_runs_body():
            self._check_fake(flat, outputs)
            self._passed.add(kind)
        self.pending = self._always or not self._traced <= self._passed
        return output

    def _check_writes(self, inputs: list[tuple[str, Callable[[], bool]]]) -> None:
        written = sorted({path for path, is_written in inputs if is_written()})
        if written:
            names = " and ".join(f"'{path}'" for path in written)
            text = f"the body wrote into {names}, which mutates_args does not name."
            fix = "Compiled code would use old values: name it in mutates_args, or write into a copy."
            raise MutationError(self._lowering.sentence(f"{text} {fix}"))

    def _check_records(self, flat: Flat, outputs: Flat) -> None:
        """Raise if rebuilding changed a record, for example because `__init__` doubles a field again."""
        lowering, bridge = self._lowering, Bridge(self._lowering)
        unsure = {leaf.name for parameter in lowering.parameters for leaf in _leaves_of_custom(parameter.node)}
        if unsure:
            names = [parameter.name for parameter in lowering.parameters]
            rebuilt = bridge.rebuild(*lowering.layout.open(flat))
            again = bridge.flatten(**dict(zip(names, rebuilt, strict=True)))
            for argument, before, after in zip(lowering.arguments, flat, again, strict=True):
                if any(leaf.name in unsure for leaf in argument.leaves) and not _is_same(before, after):
                    self._refuse_record(*_difference(argument, before, after))
        if lowering.returns is not None and any(_leaves_of_custom(lowering.returns)):
            again = bridge.flatten_output(bridge.rebuild_output(*outputs))
            for leaf, before, after in zip(lowering.return_leaves, outputs, again, strict=True):
                if not _is_same(before, after):
                    self._refuse_record(dotted(leaf.path), before, after)

    def _refuse_record(self, path: str, before: object, after: object) -> NoReturn:
        seen = f"'{path}' was {show_value(before)} and is {show_value(after)}"
        text = f"{seen} after the op rebuilt its record from the fields."
        fix = "Let __new__, __init__ and __post_init__ keep the fields as they are given."
        raise RoundTripError(self._lowering.sentence(f"{text} {fix}"))

    def _check_aliasing(self, inputs: Flat, outputs: Flat) -> None:
        seen = {memory(tensor): "an input" for tensor in tensors_in(inputs)}
        for leaf, output in zip(self._lowering.return_leaves, outputs, strict=True):
            for tensor in tensors_in(output):
                owner = seen.setdefault(memory(tensor), f"'{dotted(leaf.path)}'")
                if owner != f"'{dotted(leaf.path)}'" or (
                    leaf.is_list and list(map(memory, output)).count(memory(tensor)) > 1
                ):
                    text = f"'{dotted(leaf.path)}' shares its memory with {owner}, which a compiler may not see."
                    raise AliasingError(self._lowering.sentence(f"{text} Return a copy: .clone()."))

    def _check_fake(self, flat: Flat, outputs: Flat) -> None:
        layout = self._lowering.layout
        try:
            # The fake is called through the op, so that it has its torch.library.get_ctx().
            expected = run_on_fakes(lambda *values: layout.call(self._torch_op, values), layout.open(flat))
        except Exception as error:
            text = f"the fake failed on the arguments of a real call: {type(error).__name__}: {error}."
            raise FakeMismatchError(self._lowering.sentence(f"{text} Mend infer_output_meta_fn.")) from error
        fakes = as_tuple(expected, len(outputs))
        for leaf, real, fake in zip(self._lowering.return_leaves, outputs, fakes, strict=True):
            for what, real_value, fake_value in _differences(real, fake):
                text = f"'{dotted(leaf.path)}' has {what} {real_value}, and the fake says {fake_value}."
                fix = "Compiled code would be wrong: fix infer_output_meta_fn, or the body."
                raise FakeMismatchError(self._lowering.sentence(f"{text} {fix}"))


def _leaves_of_custom(node: Node) -> Iterator[Leaf]:
    """The leaves below records that run code of the user when an instance is made or read."""
    for part in nodes(node):
        if isinstance(part, Record) and part.kind in {"dataclass", "namedtuple"} and not part.is_plain:
            yield from leaves(part)


def _difference(argument: Argument, before: Any, after: Any) -> tuple[str, object, object]:
    """The path of the first leaf of *argument* that changed, and its values before and after; None if none changed."""
    paths = [dotted(leaf.path) for leaf in argument.leaves]
    if argument.packing is None or len(paths) != len(before):
        return " or ".join(paths), before, after
    return next(found for found in zip(paths, before, after, strict=True) if not _is_same(found[1], found[2]))


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return len(before) == len(after) and all(map(_is_same, before, after))
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return before is after
    return bool(before == after) or (before != before and after != after)  # noqa: PLR0124  (nan)


def _differences(real: Any, fake: Any) -> Iterator[tuple[str, object, object]]:
    if isinstance(real, (list, tuple)) and isinstance(fake, (list, tuple)):
        if len(real) != len(fake):
            yield "length", len(real), len(fake)
            return
        for real_item, fake_item in zip(real, fake, strict=True):
            yield from _differences(real_item, fake_item)
    elif isinstance(real, torch.Tensor) and isinstance(fake, torch.Tensor):
        yield from _tensor_differences(real, fake)
    elif isinstance(real, torch.Tensor) or isinstance(fake, torch.Tensor) or (real is None) is not (fake is None):
        yield "type", type(real).__name__, type(fake).__name__


def _tensor_differences(real: torch.Tensor, fake: torch.Tensor) -> Iterator[tuple[str, object, object]]:
    if real.dim() != fake.dim() or any(_differ(a, b) for a, b in zip(real.shape, fake.shape, strict=True)):
        yield "shape", tuple(real.shape), tuple(fake.shape)
    for what in ("dtype", "device", "layout"):
        if getattr(real, what) != getattr(fake, what):
            yield what, getattr(real, what), getattr(fake, what)
    if real.layout is fake.layout is torch.strided and real.numel() > 0:
        # The stride of a dimension with one element is never used.
        used = [i for i, size in enumerate(real.shape) if size > 1]
        if any(_differ(real.stride(i), fake.stride(i)) for i in used):
            yield "strides", real.stride(), fake.stride()


def _differ(real: int, fake: Any) -> bool:
    """Whether sizes or strides differ; a symbolic one of the fake matches any number."""
    return isinstance(fake, int) and real != fake
