# SPDX-License-Identifier: Apache-2.0
"""``magi.buckets`` with models of transformers: each size gives what eager gives, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor


SIZES = (7, 2, 4, 9, 10)
BUCKETS = (4, 9)


def padded(call: Callable[..., Any], dim: int) -> Any:
    """*call*, compiled, with dimension *dim* of its `ids` padded."""
    torch.compiler.reset()
    options: dict[str, Any] = {"magi.buckets": {"ids": {dim: BUCKETS}}}
    return torch.compile(call, backend="magi", dynamic=True, options=options)


@pytest.fixture
def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("dim", [0, 1])
@torch.no_grad()
def test_a_prefill_is_padded_by_batches_and_by_steps(llama: Any, dim: int) -> None:
    def prefill(ids: Tensor, mask: Tensor) -> Any:
        return llama(ids, attention_mask=mask, use_cache=False).logits

    compiled = padded(prefill, dim)
    for size in SIZES:
        ids = torch.randint(0, 64, (size, 5) if dim == 0 else (3, size))
        mask = torch.ones_like(ids)
        mask[0, :1] = 0
        torch.testing.assert_close(compiled(ids, mask), prefill(ids, mask), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_decode_is_padded_by_batches(llama: Any) -> None:
    def decode(ids: Tensor, mask: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Any, ...]:
        cache = transformers.DynamicCache()
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            cache.update(*pair, layer)
        found = llama(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        return found.logits, [layer.keys for layer in found.past_key_values.layers]

    compiled = padded(decode, 0)
    for size in SIZES:
        past = [torch.randn(size, 1, 12, 8) for _ in range(2)], [torch.randn(size, 1, 12, 8) for _ in range(2)]
        inputs = (torch.randint(0, 64, (size, 1)), torch.ones(size, 13, dtype=torch.long), *past)
        torch.testing.assert_close(compiled(*inputs), decode(*inputs), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_bert_is_padded_by_batches_and_refused_by_steps() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).eval()

    def encode(ids: Tensor, mask: Tensor) -> Any:
        return model(ids, attention_mask=mask).last_hidden_state

    compiled = padded(encode, 0)
    for size in SIZES:
        ids = torch.randint(0, 64, (size, 5))
        mask = (torch.rand(size, 5) < 0.7).long().index_fill(1, torch.tensor([0]), 1)
        torch.testing.assert_close(compiled(ids, mask), encode(ids, mask), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match=r"magi.buckets: ids.shape\[1\] cannot be padded"):
        padded(encode, 1)(torch.randint(0, 64, (3, 7)), torch.ones(3, 7, dtype=torch.long))
