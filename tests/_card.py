# SPDX-License-Identifier: Apache-2.0
"""Compile for a card that is not there, run what was written on the CPU, and compare it with eager.

Dynamo and AOTAutograd see the CPU; from there on the graph is one of an H200, and Inductor writes its program for that
card. The program runs as it was written: its wrapper, the expressions of its grids and arguments, its Triton kernels in
Triton's interpreter with the first of their configurations, and its other operators by their kernels for the CPU, whose
results are laid out as torch says that the card's are. New memory is filled with NaN. A kernel with more blocks than
can be interpreted is compiled to machine code of the card instead, by Triton's ptxas, and is named in `only_compiled`.

What this cannot show: the numbers of the card's own arithmetic and libraries, races between programs or threads, limits
of a launch (shared memory, registers), streams, CUDA graphs, what benchmarking would choose, what torch captures for
CUDA alone (attention), what Inductor's pattern matcher would find, and memory of a tensor of integers that nothing
wrote.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _interpreter import interpret, interpreting, launcher_of, steps_of
from _pretended_gpu import pretended_gpu
from magi_tritonwrap.testing import stub_driver
from torch import Tensor, nn
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


CPU, CARD = torch.device("cpu"), torch.device("cuda:0")
_compile_to_module = GraphLowering.compile_to_module
_codegen = GraphLowering.codegen


@dataclass
class Programs:
    """What was written and run for a card.

    Attributes:
        codes: the programs, in the order in which they were written.
        launches: how often each kernel was interpreted.
        only_compiled: the kernels that were too long to interpret; numbers made from theirs say nothing.
    """

    codes: list[str] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    only_compiled: set[str] = field(default_factory=set)


@contextlib.contextmanager
def card(change: Callable[[str], str] = lambda code: code, most_steps: int = 2**12) -> Iterator[Programs]:
    """Within, what `torch.compile` makes of functions of CPU tensors is written for a card, and run as above.

    Args:
        change: applied to each program before it is loaded.
        most_steps: how many blocks of a launch are interpreted; one that has more is only compiled.
    """
    programs = Programs()
    compiled: set[int] = set()

    def codegen(graph: GraphLowering) -> Any:
        written = _codegen(graph)
        written[0].value = change(written[0].value)
        programs.codes.append(written[0].value)
        return written

    def load(graph: GraphLowering) -> Any:
        module: Any = _compile_to_module(graph)
        original = module.runner.call
        module.empty_strided_cuda = _unwritten

        def call(arguments: list[Any]) -> Any:
            with _Operators():  # type: ignore[no-untyped-call]
                return original(arguments)

        module.call = module.runner.call = call
        return module

    def launch(kernel: CachingAutotuner, *arguments: Any, stream: Any, **_how: Any) -> None:
        chosen, name = kernel.configs[0], kernel.fn.__name__

        def run(grid: tuple[int, ...], **values: Any) -> None:
            meta = kernel._create_compile_meta(chosen)
            if steps_of(grid, meta, values) > most_steps:
                if id(kernel) not in compiled:
                    with stub_driver():
                        kernel._precompile_config(chosen)
                    compiled.add(id(kernel))
                programs.only_compiled.add(name)
                return
            with interpreting():
                interpret(kernel, chosen, grid, values)
            programs.launches[name] += 1

        launcher_of(kernel, chosen, run)(*arguments)

    with (
        moved_to_the_card(load),
        mock.patch.object(GraphLowering, "codegen", codegen),
        mock.patch.object(CachingAutotuner, "precompile", return_value=None),
        mock.patch.object(CachingAutotuner, "run", launch),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", return_value=None),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
    ):
        yield programs


@contextlib.contextmanager
def moved_to_the_card(
    load: Callable[[GraphLowering], Any] | None = None,
    look: Callable[[torch.fx.GraphModule], None] = lambda captured: None,
) -> Iterator[list[str]]:
    """Within, Inductor gets the graphs of CPU tensors as those of a card, and *load* loads what it has written.

    The list that is yielded and *load* are those of `pretended_gpu`.
    *look* gets each graph before it is moved. The CPU computes without oneDNN, whose convolutions of bfloat16 with a
    stride of two read what nobody wrote where a size is odd (torch 2.13, CPUs with AMX).
    """
    _let_fake_tensors_be_there()
    wrap = compile_fx.wrap_compiler_debug  # type: ignore[attr-defined]

    def moving(compile_graph: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        compile_graph = wrap(compile_graph, **how)

        def moved(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **how: Any) -> Any:
            look(gm)
            return compile_graph(put_on(CARD, gm), tree_map_only(FakeTensor, _fake_of_the_card, example_inputs), **how)

        return moved

    with (
        pretended_gpu(load) as codes,
        # `_compile_fx_inner` itself is wrapped by magi-passes.
        mock.patch.object(compile_fx, "wrap_compiler_debug", moving),
        mock.patch.object(torch._C, "_conv_determine_backend_memory_format", _layout_of_convolution),
        mock.patch("torch.cuda._DeviceGuard", return_value=contextlib.nullcontext()),
        mock.patch("torch.cuda.set_device", return_value=None),
        config.patch(compile_threads=1),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        yield codes


_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
// With a device to count, autograd would wait for its streams.
static struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }
} guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


@functools.cache
def _let_fake_tensors_be_there() -> None:
    """Give a CPU build of torch a device guard of CUDA, as other builds have, for the rest of the process.

    Without one it refuses to index fake tensors of the card, and to write to them.
    """
    if torch.version.cuda is not None:
        return
    from torch.utils import cpp_extension  # where there is CUDA, it warns that there is none

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *includes, str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


def put_on(device: torch.device, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """*gm*, whose graphs make their tensors on *device*, one of CPU and CARD, where they made them on the other."""

    def there(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type in {"cpu", "cuda"} else value

    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.args, node.kwargs = tree_map(there, (node.args, node.kwargs))
    gm.recompile()
    return gm


def _fake_of_the_card(value: FakeTensor) -> Tensor:
    with value.fake_mode:
        return _like_on_the_card(value).as_strided(value.shape, value.stride(), value.storage_offset())


def _layout_of_convolution(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """As cuDNN lays a convolution out (`cudnn_conv_suggest_memory_format`); a CPU build of torch does not know."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    formats = [torch._prims_common.suggest_memory_format(each) for each in (x, weight)]
    is_double = torch.float64 in (x.dtype, weight.dtype)
    return torch.contiguous_format if last is None or last not in formats or is_double else last


def _unwritten(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """New memory, of which each byte is 255: NaN as a floating-point number, -1 as an integer."""
    made = torch.empty_strided(shape, stride, dtype=dtype)
    made.untyped_storage().fill_(255)  # type: ignore[attr-defined]
    return made


class _Operators(TorchDispatchMode):
    """Runs each operator on the CPU; what it makes is laid out as the card's would be."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if op is torch.ops.aten.mm.dtype_out:
            # A CPU multiplies only into the dtype of the operands.
            left, right, dtype = args
            return torch.mm(left.to(dtype), right.to(dtype), **given[1])
        here = tree_map_only(torch.device, lambda device: CPU if device.type == "cuda" else device, given)
        made = op(*here[0], **here[1])
        returns = op._schema.returns
        if op._schema.is_mutable or any(each.alias_info is not None for each in returns):
            return made
        try:
            with FakeTensorMode():
                like = tree_map_only(Tensor, _like_on_the_card, given)
                expected = op(*like[0], **like[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            return made
        return tree_map(_laid_out, made, expected)


def _like_on_the_card(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CARD)


def _laid_out(made: Any, expected: Any) -> Any:
    if not isinstance(made, Tensor) or made.stride() == expected.stride():
        return made
    return torch.empty_strided(made.shape, expected.stride(), dtype=made.dtype).copy_(made)


# A difference within so many times the error of eager, and so much of the largest number, is rounding.
_TIMES_EAGER = 8.0
_OF_LARGEST = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def compared(
    model: nn.Module,
    calls: Sequence[tuple[Tensor, ...]],
    *,
    backend: str = "magi",
    dynamic: bool | None = None,
    training: bool = False,
    **how: Any,
) -> tuple[list[str], Programs]:
    """How *model*, compiled for a card, differs from itself in eager mode; with the programs.

    The model is called with each of *calls* in turn. Compared are outputs, arguments and buffers after the call and, if
    *training*, gradients: numbers, dtypes, and which of them share memory; of outputs also the strides, which are to be
    those that eager would have on the card.

    Args:
        model: a module of floating-point parameters.
        calls: the arguments of each call.
        backend: the backend to compile with.
        dynamic: as in `torch.compile`.
        training: whether outputs are differentiated by parameters and arguments.
        how: as for `card`.
    """
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    found = []
    with card(**how) as programs, torch.set_grad_enabled(training):
        compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
        for number, arguments in enumerate(calls):
            doubles = tuple(each.double() if each.is_floating_point() else each for each in arguments)
            expected, truth = _step(eager, eager, arguments, training), _step(exact, exact, doubles, training)
            expected |= _strides_on_the_card(eager, arguments)
            actual = _step(compiled, model, arguments, training)
            for name, value in expected.items():
                if difference := _difference(actual[name], value, truth[name], bool(programs.only_compiled)):
                    found.append(f"call {number}, {name}: {difference}")
    return found, programs


def _step(call: Callable[..., Any], model: nn.Module, arguments: tuple[Tensor, ...], training: bool) -> dict[str, Any]:
    """What a call of the model gives and leaves behind, by name."""
    given = [each.clone().requires_grad_(training and each.is_floating_point()) for each in arguments]
    outputs = tree_leaves(call(*given))
    tensors = [*outputs, *given]
    made: dict[str, Any] = {f"output {at}": each for at, each in enumerate(outputs)}
    made |= {f"strides of output {at}": _strides(each) for at, each in enumerate(outputs)}
    made |= {f"argument {at}": each for at, each in enumerate(given)}
    made |= {f"buffer {name}": each.clone() for name, each in model.named_buffers()}
    memory = [each.untyped_storage().data_ptr() for each in tensors]
    made["the first of outputs and arguments with the same memory"] = [memory.index(each) for each in memory]
    if training:
        wanted = {f"argument {at}": each for at, each in enumerate(given)} | dict(model.named_parameters())
        wanted = {name: each for name, each in wanted.items() if each.requires_grad}
        parts = [each for each in outputs if each.requires_grad]
        # Weights that depend on the place, so that a gradient in another place is another number.
        weights = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape) for each in parts]
        gradients = torch.autograd.grad(parts, list(wanted.values()), weights, allow_unused=True)
        made |= {f"gradient of {name}": each for name, each in zip(wanted, gradients, strict=True)}
    return made


def _strides(tensor: Tensor) -> list[int]:
    """The strides of *tensor* along dimensions of which there is more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


def _strides_on_the_card(model: nn.Module, arguments: tuple[Tensor, ...]) -> dict[str, list[int]]:
    # On fake tensors of the CPU, within `card`: a CPU build cannot index those of the card.
    with FakeTensorMode() as mode, torch.no_grad():
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        fakes: dict[str, Tensor] = {name: mode.from_tensor(each) for name, each in state.items()}
        given = tuple(mode.from_tensor(each) for each in arguments)
        outputs = tree_leaves(torch.func.functional_call(model, fakes, given))
    return {f"strides of output {at}": _strides(each) for at, each in enumerate(outputs)}


def _difference(actual: Any, expected: Any, truth: Any, only_layout: bool) -> str:
    """What is wrong with *actual*, in words; nothing if it differs from *expected* by rounding alone."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return "" if actual == expected else f"{actual}, expected {expected}"
    kinds = [(each.dtype, tuple(each.shape)) for each in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]}, expected {kinds[1]}"
    if only_layout or not expected.numel():
        return ""
    if not expected.is_floating_point():
        return "" if torch.equal(actual, expected) else f"{int((actual != expected).sum())} elements differ"
    errors = [(each.double() - truth).abs().nan_to_num(torch.inf).max().item() for each in (actual, expected)]
    largest = truth.abs().max().item()
    allowed = _TIMES_EAGER * errors[1] + _OF_LARGEST[expected.dtype] * largest + 1e-6
    return "" if errors[0] <= allowed else f"wrong by {errors[0]:.3g}, eager by {errors[1]:.3g}, largest {largest:.3g}"
