# SPDX-License-Identifier: Apache-2.0
"""``aot_compile``: a model compiled into a package by AOTInductor, with our passes, repairs and operators."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import magi_tritonwrap
import torch

from magi_backend import _torch_compat
from magi_backend._passes import chosen_passes, inductor_options
from magi_backend._repairs._listing import active_defects
from magi_backend._repairs._scope import repaired
from magi_backend._settings.options import read_request
from magi_backend.errors import OptionError, PackageError, family

from .bodies import NoPythonLeft, with_bodies
from .program import exported


if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.export import ExportedProgram

    from magi_backend._settings.options import Request

NOT_AHEAD = ("check", "boundary_ops", "compile_sizes", "hot_sizes", "memory_budget", "report")
"""Settings that have an effect with `torch.compile` only: on calls, pieces, a backward, or the record of a run."""


def aot_compile(
    exported_program_or_module: ExportedProgram | torch.nn.Module,
    path: str | Path,
    example_inputs: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compile a model ahead of time, for inference, into a package that runs without Python.

    ``torch._inductor.aoti_load_package(path)`` loads it and needs none of our packages; neither does C++. The bodies of
    operators that ``magi_register_custom_op`` registered are part of it: they are traced on a CPU, or replaced by their
    Triton launches if the compiler sees through them.

    Args:
        exported_program_or_module: What ``torch.export.export`` returned, or a module to export.
        path: The file to write; its name ends in ``.pt2``.
        example_inputs: The arguments to export a module with; an exported program has its own.
        dynamic_shapes: The sizes that vary, as for ``torch.export.export``; only for a module.
        options: As for ``torch.compile``: settings of :class:`CompileConfig` as ``magi.*``, and keys of Inductor.

    Returns:
        The path of the package.

    Raises:
        PackageError: The model calls an operator that cannot be part of a package: its body cannot be traced, it takes
            an object handle, or it is implemented in Python and not registered here.
        TargetTypeError: The model or its inputs have another type.
        OptionError: An unknown option, or one that has no meaning ahead of time; a path that is not that of a package.

    Example:
        >>> import tempfile
        >>> batch = torch.export.Dim("batch", min=2, max=64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = aot_compile(torch.nn.ReLU(), f"{folder}/relu.pt2", (torch.ones(4, 3),), ({0: batch},))
        ...     torch._inductor.aoti_load_package(path)(-torch.ones(7, 3)).shape
        torch.Size([7, 3])
    """
    place = os.fspath(path)
    if not place.endswith(".pt2"):
        msg = f"aot_compile: path={place!r} does not end in .pt2, as the names of packages do."
        raise OptionError(msg)
    request = read_request(options=options)
    _refuse_what_needs_the_process(request)
    with torch.no_grad(), _torch_compat.copying_programs():
        try:
            program = with_bodies(exported(exported_program_or_module, example_inputs, dynamic_shapes))
            return _packaged(program, place, request)
        except Exception as error:
            ours = _first_of_ours(error)
            if ours is None or ours is error:
                raise
            raise ours from error


def _refuse_what_needs_the_process(request: Request) -> None:
    for name in NOT_AHEAD:
        if request.config.origin(name) == "options":
            msg = f"aot_compile: magi.{name} has no meaning ahead of time, only in torch.compile. Leave it out."
            raise OptionError(msg)


def _packaged(program: ExportedProgram, path: str, request: Request) -> str:
    defects = active_defects(_torch_compat.torch_release())
    names, schemas = tuple(defect.name for defect in defects), _torch_compat.operator_schemas(program.graph_module)
    passes = (*chosen_passes(request.config, names, (), schemas), NoPythonLeft())
    with magi_tritonwrap.unsupported_launches(request.config.on_unsupported), repaired(defects, lambda _: None):
        return _torch_compat.package(program, path, inductor_options(passes, dict(request.inductor)))


def _first_of_ours(error: BaseException | None) -> BaseException | None:
    """The error of one of our packages among the causes of *error*; a `PackageError` is preferred."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    for kind in (PackageError, family()):
        for each in found:
            if isinstance(each, kind):
                return each
    return None
