# SPDX-License-Identifier: Apache-2.0
"""Objects that are taken apart: the launches of their methods are nodes of the graph, and a package holds them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from _packages import check_elsewhere
from magi_backend import aot_compile, explain, magi_register_custom_op
from magi_backend.errors import PackageError
from magi_opschema import ObjectHandle, op_def, register_kernel, register_object, see_through_object
from magi_tritonwrap import see_through_report
from magi_tritonwrap._cache_key import fingerprint
from magi_tritonwrap._torch_compat.tracing import fake_tensors
from magi_tritonwrap.testing import aot_graphs, launches_of, stub_driver
from torch import Tensor, nn
from torch._dynamo.utils import counters


@triton.jit
def scale_kernel(x, weight, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * tl.load(weight + at, at < n), at < n)


def launched(x: Tensor, weight: Tensor, block: int) -> Tensor:
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), block),)](x, weight, out, x.numel(), BLOCK=block)
    return out


@see_through_object
class Scaler:
    weight: Tensor
    block: int

    def __init__(self, weight: Tensor, block: int = 64) -> None:
        self.weight, self.block = weight, block

    def run(self, x: Tensor) -> Tensor:
        return self._launched(x)

    def _launched(self, x: Tensor) -> Tensor:
        return launched(x, self.weight, self.block)


@dataclass(frozen=True)
class Frozen:
    weight: Tensor
    block: int = 64

    def run(self, x: Tensor) -> Tensor:
        return launched(x, self.weight, self.block)


class Plain:
    """A class that declares nothing."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def run(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.fixture
def gpu() -> Iterator[Callable[..., Tensor]]:
    """Makes fake CUDA tensors, where Triton believes in a GPU."""

    def make(*sizes: int) -> Tensor:
        with fake_tensors():
            return torch.empty(*sizes, device="cuda")

    with stub_driver():
        yield make


def make(ns: str, annotation: Any, **options: Any) -> Any:
    @magi_register_custom_op(f"{ns}::scaled", **options)
    def scaled(x: Tensor, runner: ObjectHandle[annotation]) -> Tensor:
        out: Tensor = runner.run(x)
        return out

    return scaled


@pytest.mark.parametrize("annotation", [Scaler, Frozen])
@pytest.mark.parametrize("dynamic", [False, True])
def test_launches_in_methods_are_seen(ns: str, gpu: Any, annotation: Any, dynamic: bool) -> None:
    scaled = make(ns, annotation)
    report = see_through_report(scaled)
    assert [kernel.name for kernel in report.kernels] == ["scale_kernel"]
    assert not report.unresolved
    assert "see-through  1 Triton kernel" in str(op_def(scaled))
    runners = [annotation(gpu(128), block) for block in (64, 32)]

    def program(x: Tensor) -> Tensor:
        for runner in runners:
            x = scaled(x, runner)
        return x

    (graph,) = aot_graphs(program, torch.ones(128), dynamic=dynamic)
    assert [launch.arguments["BLOCK"] for launch in launches_of(graph)] == [64, 32]
    weights = [launch.arguments["weight"].name for launch in launches_of(graph)]
    assert all(node.op == "placeholder" for node in graph.graph.nodes if node.name in weights)
    assert len(set(weights)) == 2
    assert not any(node.target is op_def(scaled).torch_op for node in graph.graph.nodes)
    assert see_through_report(scaled).cache in {"keyed", "not asked yet"}


def test_a_handle_hides_the_launches_and_the_note_says_so(ns: str, gpu: Any) -> None:
    scaled = make(ns, Scaler, infer_output_meta_fn=["x"])
    by_handle = op_def(scaled).by_handle
    assert by_handle is not None
    assert by_handle.notes["see-through"].startswith("no: these calls pass the handle of an object, which hides it")
    handle = register_object(Scaler(gpu(128)))
    (graph,) = aot_graphs(lambda x: scaled(x, handle), torch.ones(128))
    assert not launches_of(graph)
    assert by_handle.torch_op in {node.target for node in graph.graph.nodes}


def test_explain_says_which_calls_pass_a_handle(ns: str) -> None:
    scaled = make(ns, Plain, infer_output_meta_fn=["x"])
    seen = on_the_cpu(f"{ns}_seen", infer_output_meta_fn=["x"])
    plain, scaler = Plain(torch.ones(4)), Scaler(torch.ones(4))
    handle = register_object(scaler)
    text = explain(lambda x: seen(seen(scaled(x, plain), scaler), handle))(torch.ones(4)).to_text()
    assert "Scaler, taken apart" in text
    assert "handle of a Plain" in text
    assert f"{ns}_seen::scaled_by_handle" in text
    assert "these calls pass the handle of an object, which hides it" in text


class Layers(nn.Module):
    def __init__(self, op: Any, count: int) -> None:
        super().__init__()
        self.op = op
        self.runners = [Scaler(torch.full((4,), 1.0 + i)) for i in range(count)]

    def forward(self, x: Tensor) -> Tensor:
        for runner in self.runners:
            x = self.op(x, runner)
        return x


def on_the_cpu(ns: str, **options: Any) -> Any:
    scaled = make(ns, Scaler, **options)

    @register_kernel(scaled, "cpu")
    def body(x: Tensor, runner: ObjectHandle[Scaler]) -> Tensor:
        return x * runner.weight

    return scaled


@pytest.mark.slow
def test_a_package_holds_the_tensors_of_objects(ns: str, tmp_path: Path) -> None:
    model, x = Layers(on_the_cpu(ns), 3), torch.ones(2, 4)
    path = aot_compile(model, tmp_path / "layers.pt2", (x,))
    with torch.no_grad():
        check_elsewhere(path, [(x, model(x))], tmp_path)


def test_a_package_holds_no_handles(ns: str, tmp_path: Path) -> None:
    scaled = make(ns, Scaler, infer_output_meta_fn=["x"])

    class Handled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = scaled(x, handle)
            return out

    handle: Any = int(register_object(Scaler(torch.ones(4))))
    program = torch.export.export(Handled(), (torch.ones(4),), strict=True)
    with pytest.raises(PackageError, match=f"{ns}::scaled_by_handle takes an object handle \\(runner\\)"):
        aot_compile(program, tmp_path / "layers.pt2")


@pytest.mark.slow
def test_the_backend_checks_layers_with_objects(ns: str) -> None:
    model, x = Layers(on_the_cpu(ns), 3), torch.ones(2, 4)
    compiled = torch.compile(model, backend="magi", options={"magi.check": True}, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    model.runners[0].weight = torch.full((4,), 7.0)
    torch.testing.assert_close(compiled(x), model(x))


def test_the_methods_of_an_object_are_in_the_key_of_the_cache(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = op_def(make(ns, Scaler)).lowered_fn
    before = fingerprint((body,), "the body")
    with monkeypatch.context() as patch:
        patch.setattr(Scaler, "_launched", lambda self, x: x.clone())
        after = fingerprint((body,), "the body")
    assert not before.unstable
    assert not after.unstable
    assert after.digest != before.digest
    assert fingerprint((body,), "the body").digest == before.digest


HIDDEN = {"launched": weakref.ref(launched)}


@see_through_object
class Named:
    """Launches in a function to which no name leads."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = HIDDEN["launched"]()(x, self.weight, 128)  # type: ignore[misc]
        return out


def test_a_handle_decides_nothing_for_calls_with_the_object(ns: str, gpu: Any) -> None:
    scaled = make(ns, Named)
    assert "see-through" not in op_def(scaled).notes
    handle = register_object(Named(gpu(128)))
    (graph,) = aot_graphs(lambda x: scaled(x, handle), torch.ones(128))
    assert not launches_of(graph)
    assert "see-through" not in op_def(scaled).notes
    runner = Named(gpu(128))
    (graph,) = aot_graphs(lambda x: scaled(x, runner), torch.ones(128))
    assert len(launches_of(graph)) == 1
    assert op_def(scaled).notes["see-through"] == "Triton kernels that are captured at compilation"


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["argument", "layer"])
def test_a_replay_of_a_cuda_graph_copies_no_weight(ns: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = make(ns, Scaler)
    copied: list[int] = []
    original = torch._foreach_copy_

    def counting(targets: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        copied.extend(source.numel() for source in sources)
        return original(targets, sources, *args, **kwargs)

    class Layer(nn.Module):
        def __init__(self, runner: Scaler) -> None:
            super().__init__()
            self.runner = runner

    runners = [Scaler(torch.randn(256, 256, device="cuda")) for _ in range(6)]
    owners: list[Any] = [Layer(runner) for runner in runners] if place == "layer" else runners

    def program(owner: Any, x: Tensor) -> Tensor:
        out: Tensor = scaled(x.expand(256, 256).contiguous(), owner.runner if place == "layer" else owner)
        return out + 1

    compiled = torch.compile(program, backend="magi", mode="reduce-overhead", fullgraph=True)
    x = torch.randn(256, 1, device="cuda")
    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    before = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
    with torch.no_grad():
        for _ in range(4):
            copied.clear()
            for runner, owner in zip(runners, owners, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                torch.testing.assert_close(compiled(owner, x), x * runner.weight + 1)
    recordings = counters["inductor"]["cudagraph_recorded_non_static_inputs"] - before
    assert recordings == len(runners), "one recording for each weight, with one input that is copied: x"
    assert copied == [x.numel()] * len(runners)
    runners[0].weight = torch.randn(256, 256, device="cuda")
    torch.testing.assert_close(compiled(owners[0], x), x * runners[0].weight + 1)
