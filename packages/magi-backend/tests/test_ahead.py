# SPDX-License-Identifier: Apache-2.0
"""A package made by ``aot_compile`` runs where none of our packages can be imported; what cannot go in is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _packages import check_elsewhere
from magi_backend import aot_compile, magi_register_custom_op
from magi_backend.errors import OptionError, PackageError, TargetTypeError
from magi_opschema import ObjectHandle, register_kernel
from torch import Tensor, nn


pytestmark = pytest.mark.kernels


BATCH = torch.export.Dim("batch", min=2, max=64)


@dataclass(frozen=True)
class Scaling:
    factor: float = 2.0
    shift: Tensor | None = None


class Calling(nn.Module):
    """A layer, and an operator on what it returns."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        result: Tensor | None = self.op(y)
        return y if result is None else result


def scaling(ns: str) -> Any:
    @magi_register_custom_op(f"{ns}::scale", infer_output_meta_fn=["x"])
    def scale(x: Tensor, cfg: Scaling) -> Tensor:
        return x * cfg.factor + x.shape[0]

    return lambda x: scale(x, Scaling(3.0))


def writing(ns: str) -> Any:
    @magi_register_custom_op(f"{ns}::add_one", mutates_args=["x"])
    def add_one(x: Tensor) -> None:
        x.add_(1)

    return add_one


def nested(ns: str) -> Any:
    inner = scaling(ns)

    @magi_register_custom_op(f"{ns}::outer", infer_output_meta_fn=["x"])
    def outer(x: Tensor) -> Tensor:
        scaled: Tensor = inner(x)
        return scaled.relu()

    return outer


def with_a_body_for_the_cpu(ns: str) -> Any:
    @magi_register_custom_op(f"{ns}::launched", infer_output_meta_fn=["x"])
    def launched(x: Tensor) -> Tensor:
        msg = "it launches a kernel"
        raise RuntimeError(msg)

    register_kernel(launched, "cpu", lambda x: x.sin() * x.shape[0])
    return launched


@pytest.mark.parametrize(
    "make",
    [scaling, *(pytest.param(make, marks=pytest.mark.slow) for make in (writing, nested, with_a_body_for_the_cpu))],
)
def test_a_package_runs_where_our_packages_are_not(make: Any, ns: str, tmp_path: Path) -> None:
    model = Calling(make(ns)).eval()

    # Precompiled headers take longer than the one file that they are for, and so does its optimisation.
    options = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    package = aot_compile(model, tmp_path / "model.pt2", (torch.randn(3, 4),), ({0: BATCH},), options)

    with torch.no_grad():
        values = [(x, model(x)) for x in (torch.randn(size, 4) for size in (2, 5, 64))]
    assert check_elsewhere(package, values, tmp_path) == "equal\n"


@pytest.mark.slow
def test_an_exported_program_with_keywords_and_our_options(ns: str, tmp_path: Path) -> None:
    op = scaling(ns)

    class Model(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            scaled: Tensor = op(x)
            return scaled * mask

    x, mask = torch.randn(3, 4), torch.randn(3, 1)
    program = torch.export.export(Model(), (x,), {"mask": mask}, dynamic_shapes={"x": {0: BATCH}, "mask": {0: BATCH}})
    package = aot_compile(
        program, tmp_path / "model.pt2", options={"magi.pass_config.max_tiles": 2, "max_autotune": False}
    )

    loaded = torch._inductor.aoti_load_package(package)
    torch.testing.assert_close(loaded(x[:2], mask=mask[:2]), Model()(x[:2], mask=mask[:2]))


@pytest.mark.slow
def test_the_repairs_of_defects_of_torch_hold_in_a_package(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Upsample(scale_factor=2.0), nn.SiLU()).eval()
    height = torch.export.Dim("height", min=4, max=64)
    package = aot_compile(model, tmp_path / "model.pt2", (torch.randn(1, 4, 8, 8),), ({2: height},))

    loaded, x = torch._inductor.aoti_load_package(package), torch.randn(1, 4, 11, 8)
    torch.testing.assert_close(loaded(x), model(x))


class Runner:
    factor = 2


RUNNER = Runner()


def with_a_handle(ns: str) -> Any:
    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[Runner]) -> Tensor:
        return x * runner.factor

    return lambda x: run(x, RUNNER)


def that_reads_data(ns: str) -> Any:
    @magi_register_custom_op(f"{ns}::read", infer_output_meta_fn=["x"])
    def read(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x

    return read


def that_calls_itself(ns: str) -> Any:
    @magi_register_custom_op(f"{ns}::again", infer_output_meta_fn=["x"])
    def again(x: Tensor) -> Tensor:
        return again(x + 1)

    return again


def of_another_library(ns: str) -> Any:
    @torch.library.custom_op(f"{ns}::foreign", mutates_args=())
    def foreign(x: Tensor) -> Tensor:
        return x * 2

    foreign.register_fake(torch.empty_like)
    return foreign


def of_another_library_that_writes(ns: str) -> Any:
    return torch.library.custom_op(f"{ns}::foreign", Tensor.zero_, mutates_args={"x"}, schema="(Tensor(a!) x) -> ()")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (with_a_handle, "{ns}::run takes an object handle (runner), which stands for an object of this process"),
        (that_reads_data, "the body of {ns}::read cannot be traced into the package: "),
        (that_reads_data, "or give it such a body for this device: register_kernel(op, 'cpu', fn)."),
        (that_calls_itself, "the bodies of {ns}::again call registered operators more than 8 levels"),
        (of_another_library, "{ns}::foreign is implemented in Python, and a package runs without it. Register it with"),
        (of_another_library_that_writes, "{ns}::foreign is implemented in Python"),
    ],
)
def test_what_cannot_go_in_is_named(make: Any, sentence: str, ns: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"aot_compile: ") as caught:
        aot_compile(Calling(make(ns)), tmp_path / "model.pt2", (torch.randn(3, 4),), ({0: BATCH},))

    assert sentence.format(ns=ns) in str(caught.value)
    assert not (tmp_path / "model.pt2").exists()


def test_a_body_for_one_size_only_is_an_error(ns: str, tmp_path: Path) -> None:
    @magi_register_custom_op(f"{ns}::three", infer_output_meta_fn=["x"])
    def three(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 3 else x

    with pytest.raises(Exception, match="specialized"):
        aot_compile(Calling(three), tmp_path / "model.pt2", (torch.randn(3, 4),), ({0: BATCH},))


RELU = nn.ReLU()
X = (torch.ones(3),)


@pytest.mark.parametrize(
    ("asked", "kind", "sentence"),
    [
        ((abs, "m.pt2", X), TargetTypeError, "aot_compile takes a torch.nn.Module or what torch.export.export"),
        ((RELU, "m.pt2"), TargetTypeError, "example_inputs is a NoneType. It is a tuple of the arguments"),
        ((RELU, "m.so", X), OptionError, "path='m.so' does not end in .pt2, as the names of packages do."),
        ((RELU, "m.pt2", X, None, {"magi.chek": 1}), OptionError, "Did you mean 'magi.check'?"),
        ((RELU, "m.pt2", X, None, {"magi.check": True}), OptionError, "magi.check has no meaning ahead of time, only"),
        ((RELU, "m.pt2", X, None, {"magi.hot_sizes": 2}), OptionError, "magi.hot_sizes has no meaning ahead of time"),
    ],
)
def test_wrong_arguments_are_refused(asked: tuple[Any, ...], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        aot_compile(*asked)

    assert sentence in str(caught.value)


def test_sizes_together_with_a_program_are_refused() -> None:
    program = torch.export.export(RELU, X)

    with pytest.raises(TargetTypeError, match=r"dynamic_shapes with an exported program. Give them to torch.export"):
        aot_compile(program, "m.pt2", dynamic_shapes=({0: BATCH},))
