# SPDX-License-Identifier: Apache-2.0
"""The scratch memory that generated C++ allocates for a Triton kernel."""

from __future__ import annotations

from typing import Any

import pytest
from magi_backend._repairs._defect import repaired
from magi_backend._repairs.kernels import SCRATCH_FOR_EACH_PROGRAM
from torch._inductor.codegen.common import TritonScratchWorkspace
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides


WHOLE_GRID = "int64_t global_scratch_scratch_3_size[] = {static_cast<int64_t>(128) * grid_0 * grid_1 * grid_2};"
OF_ONE_PROGRAM = "int64_t global_scratch_scratch_3_size[] = {128};"


class OlderOverrides(CUDADeviceOpOverrides):
    """What torch 2.10 and 2.11 write."""

    def cpp_scratch(self, idx: int, workspace: Any, prefix: str | None = None) -> Any:
        name = f"{prefix}_scratch_{idx}"
        if workspace.size == 0:
            return [f"CUdeviceptr {name} = 0;"], name
        return [f"int64_t {name}_size[] = {{{workspace.size}}};", f"int64_t {name}_stride[] = {{1}};"], name


@pytest.fixture
def overrides(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's class with the older method, and with the repair in its place from the first use on."""
    monkeypatch.setattr(CUDADeviceOpOverrides, "cpp_scratch", OlderOverrides.cpp_scratch)
    return CUDADeviceOpOverrides()


def allocation(overrides: Any, size: int) -> str:
    lines, _ = overrides.cpp_scratch(3, TritonScratchWorkspace(size, lambda: "uint8"), prefix="global_scratch")
    return str(lines[0])


def test_there_is_scratch_for_each_program_of_the_grid(overrides: Any) -> None:
    reported: list[str] = []
    assert allocation(overrides, 128) == OF_ONE_PROGRAM
    with repaired([SCRATCH_FOR_EACH_PROGRAM], reported.append):
        assert allocation(overrides, 128) == WHOLE_GRID
    assert allocation(overrides, 128) == OF_ONE_PROGRAM
    assert reported == [SCRATCH_FOR_EACH_PROGRAM.name]


def test_a_kernel_without_scratch_needs_no_repair(overrides: Any) -> None:
    with repaired([SCRATCH_FOR_EACH_PROGRAM], pytest.fail):
        assert allocation(overrides, 0) == "CUdeviceptr global_scratch_scratch_3 = 0;"


def test_what_torch_writes_has_room_for_each_program() -> None:
    """With the repair where the installed release needs it, without it where torch does so itself."""
    with repaired([SCRATCH_FOR_EACH_PROGRAM], lambda _: None):
        assert allocation(CUDADeviceOpOverrides(), 128) == WHOLE_GRID
