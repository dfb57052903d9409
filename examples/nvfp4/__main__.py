# SPDX-License-Identifier: Apache-2.0
"""Quantise the linears of a small Llama, compile it whole, and compare it with eager and with bfloat16."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from . import quantise_


def bytes_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def main() -> int:
    """Run the comparison; 0 if compiled and eager agree and the error is within the format's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    model.to(device=device, dtype=torch.bfloat16)
    model.train(mode=False)
    quantised = copy.deepcopy(model)
    report = quantise_(quantised, lambda name, _: name != "lm_head")
    tokens = torch.randint(0, config.vocab_size, (1, 24), device=device)
    compiled: Any = torch.compile(quantised, fullgraph=True)
    with torch.no_grad():
        expected = model(tokens).logits
        eager = quantised(tokens).logits
        fast = compiled(tokens).logits
    against_eager, against_model = relative_error(fast, eager), relative_error(fast, expected)
    print(report)
    print(f"{len(report.layers)} linears quantised, one graph, on {device}")
    print(f"memory             {bytes_of(model) / 2**20:.2f} MiB bfloat16, {bytes_of(quantised) / 2**20:.2f} MiB NVFP4")
    print(f"compiled and eager {against_eager:.4f} relative error")
    print(f"NVFP4 and bfloat16 {against_model:.4f} relative error")
    return 0 if against_eager < 0.02 and against_model < 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
