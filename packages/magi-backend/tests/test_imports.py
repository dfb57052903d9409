# SPDX-License-Identifier: Apache-2.0
"""Loading the entry point is cheap, and importing registers, patches and reads nothing."""

from __future__ import annotations

import subprocess
import sys

import magi_backend
import pytest
import torch


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_loads_no_torch() -> None:
    heavy = ("torch", "triton", "pydantic", "rich", "click", "magi_opschema", "magi_passes", "magi_tritonwrap")

    assert run(f"import sys, magi_backend; magi_backend.magi; print([n for n in {heavy} if n in sys.modules])") == "[]"


def test_threads_may_be_the_first_to_name_the_backend() -> None:
    """Each loads the entry point and registers it, for torch has no lock there."""
    program = """
import threading, torch

start, outcomes = threading.Barrier(8), []

def name_it():
    start.wait()
    try:
        torch.compile(torch.sin, backend="magi")
        outcomes.append("found")
    except Exception as error:
        outcomes.append(repr(error))

threads = [threading.Thread(target=name_it) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
registered = torch._dynamo.lookup_backend("magi")
print(set(outcomes), registered.__module__, "magi" in torch._dynamo.list_backends())
"""
    assert run(program) == "{'found'} magi_backend._backend True"


@pytest.mark.parametrize("before", ["", "import torch._inductor.codegen.cuda.device_op_overrides"], ids=["", "others"])
def test_a_repair_of_one_device_leaves_the_others_to_inductor(before: str) -> None:
    program = f"""
{before}
from magi_backend._repairs._defect import known_defects
from torch._inductor.codegen import common

for defect in known_defects():
    defect.patch()
print(sorted({{"cpu", "cuda", "mps", "xpu"}} - common.device_op_overrides_dict.keys()))
"""
    assert run(program) == "[]"


def test_an_unknown_backend_is_still_refused() -> None:
    torch.compile(torch.sin, backend="magi")  # names the backend, which registers it

    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="magie"):
        torch.compile(torch.sin, backend="magie")


def test_a_malformed_environment_does_not_break_the_import() -> None:
    program = "import os; os.environ['MAGI_COMPILE_CHECK'] = 'maybe'; import magi_backend as m; print(m.CompileConfig)"

    assert "CompileConfig" in run(program)


def test_public_names() -> None:
    assert magi_backend.__all__ == sorted(magi_backend.__all__)
    for name in magi_backend.__all__:
        assert getattr(magi_backend, name) is not None
    assert set(magi_backend.__all__) <= set(dir(magi_backend))
