# SPDX-License-Identifier: Apache-2.0
"""Compile a model with Liger's kernels and print what the compile caches answered, as JSON.

`python tests/_warm_library.py (forward|training|version) PAGE FOLDER`: `forward` compiles the model of the page, from a
module in the folder. No GPU is needed: a kernel that does nothing stands for each that Inductor would compile for one,
so outputs mean nothing, and the graphs, their keys and what the caches keep are those of a GPU.
"""

from __future__ import annotations

import importlib
import json
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _library_scan import pretended_gpu
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile


with pretended_gpu():
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
    from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward
    from liger_kernel.ops.utils import compare_version

from magi_backend import magi_register_custom_op


LAUNCHES: list[str] = []


class NoKernel:
    """A kernel that Inductor takes for compiled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *_args: Any, **_options: Any) -> None:
        """Note that it was launched."""
        LAUNCHES.append(self.name)


@contextmanager
def kernels_that_do_nothing() -> Iterator[None]:
    """Let Inductor compile and load user kernels without a GPU."""
    compiled = mock.patch.object(AsyncCompile, "triton", lambda _self, name, *_args, **_options: NoKernel(name))
    with pretended_gpu(is_available=False), compiled:
        yield


@magi_register_custom_op("warm_library::rms_norm_backward")
def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_backward(grad, x, weight, rstd, 0.0, "llama", 1024, 4, False, None)  # type: ignore[no-any-return]


@magi_register_custom_op(
    "warm_library::rms_norm",
    setup_context_fn=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
    backward_fn=lambda ctx, grad, _: norm_backward(grad, *ctx.saved_tensors),
)
def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, _, rstd, *_ = rms_norm_forward(x, weight, 1e-6, 0.0, "llama", None)
    return y, rstd


@magi_register_custom_op("warm_library::swiglu_backward")
def gate_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward(gate.clone(), up.clone(), grad)  # type: ignore[no-any-return]


@magi_register_custom_op(
    "warm_library::swiglu",
    setup_context_fn=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward_fn=lambda ctx, grad: gate_backward(grad, *ctx.saved_tensors),
)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu_forward(gate, up)[2]  # type: ignore[no-any-return]


@magi_register_custom_op("warm_library::by_version")
def by_version(gate: Tensor, up: Tensor) -> Tensor:
    if compare_version("torch", operator.ge, "2.4.0"):
        return swiglu_forward(gate, up)[2]  # type: ignore[no-any-return]
    return gate


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=256, use_cache=False))


def forward(page: str, folder: Path) -> None:
    """The model of the page on adopting a library."""
    from _pages import read_page

    (block,) = [block for block in read_page(Path(page)) if block.language == "python"]
    (folder / "adopted_page.py").write_text(block.code)
    sys.path.insert(0, str(folder))
    import adopted_page  # type: ignore[import-not-found]

    with torch.no_grad():
        adopted_page.compiled(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)


def training() -> None:
    """A step of a Llama whose norms and products are Liger's, forward and backward."""
    modeling_llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    modeling_llama.LlamaRMSNorm.forward = lambda self, x: norm(x, self.weight)[0]
    modeling_llama.LlamaMLP.forward = lambda self, x: self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
    compiled: Any = torch.compile(llama().train(), backend="magi")
    ids = torch.zeros(1, 8, dtype=torch.long)
    compiled(input_ids=ids, labels=ids).loss.backward()


def version() -> None:
    """An op whose body asks for the version of a distribution, as helpers of Liger do."""

    def program(x: Tensor) -> Tensor:
        return by_version(x, x * 2) + x

    compiled: Any = torch.compile(program, backend="magi", fullgraph=True)
    with torch.no_grad():
        compiled(torch.randn(4, 64))


def main(mode: str, page: str, folder: str) -> None:
    """Compile one of the three, and print what was launched and what the caches answered."""
    with kernels_that_do_nothing():
        if mode == "forward":
            forward(page, Path(folder))
        else:
            {"training": training, "version": version}[mode]()
    seen = {"autograd": counters["aot_autograd"], "fxgraph": counters["inductor"]}
    found = {
        what: {cache: each[f"{cache}_cache_{ending}"] for cache, each in seen.items()}
        for what, ending in (("hits", "hit"), ("misses", "miss"), ("bypasses", "bypass"))
    }
    bypasses = sum(found.pop("bypasses").values())
    sys.stdout.write(json.dumps({"launches": LAUNCHES, "bypasses": bypasses, **found}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
