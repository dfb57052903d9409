# SPDX-License-Identifier: Apache-2.0
"""Inputs that are padded to buckets: the outputs are those of eager for every size, and what mixes rows is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from magi_backend import CompileConfig, explain, wait
from magi_backend._hot.buckets import with_buckets
from magi_backend._records.log import CompilationLog
from magi_backend.errors import BucketsError, ConfigError
from magi_backend.records import Compilation
from torch import Tensor, nn
from torch.nn import functional as F


BUCKETS = (4, 9)
SIZES = (7, *range(2, 11))


def behind(fn: Any, buckets: Any) -> tuple[Any, list[Any]]:
    """*fn* behind the padding, run by eager, so that nothing is compiled; and the sizes that ran."""
    ran: list[Any] = []

    def backend(gm: Any, example_inputs: Sequence[Any]) -> Any:
        log = CompilationLog(Compilation(0, "graph", 0, (), ()), fresh=True)
        padding = with_buckets(gm, example_inputs, buckets, log, eager_random=False)

        def run(*inputs: Any) -> Any:
            ran.append([each for each in inputs if isinstance(each, int)])
            return gm.forward(*inputs)

        return padding.around(run) if padding else run

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=True), ran


def assert_same(have: Any, want: Any) -> None:
    torch.testing.assert_close(have, want, equal_nan=True)
    for one, other in zip(*(torch.utils._pytree.tree_leaves(each) for each in (have, want)), strict=True):
        if isinstance(one, Tensor):
            assert one.stride() == other.stride()


@torch.no_grad()
def assert_right(fn: Any, dim: int, make: Callable[[int], tuple[Any, ...]], name: str = "x") -> None:
    """*fn* pads dimension *dim* of *name*, and gives what eager gives for each size."""
    padded, ran = behind(fn, {name: {dim: BUCKETS}})
    for size in SIZES:
        torch.manual_seed(size)
        ours = make(size)
        torch.manual_seed(size)
        theirs = make(size)
        assert_same(padded(*ours), fn(*theirs))
        assert_same(ours, theirs)
        assert (4 if size <= 4 else max(9, size)) in ran[-1]
    assert len({tuple(sizes) for sizes in ran[1:]}) == 3


torch.manual_seed(0)
linear = nn.Linear(6, 6)
norms = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()).eval()
convolutions = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1),
    nn.BatchNorm2d(4),
    nn.GroupNorm(2, 4),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.AdaptiveAvgPool2d(1),
).eval()
table = nn.Embedding(12, 6)
positions = nn.Embedding(9, 6)
experts = torch.randn(4, 6, 6)
encoder = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.0)
lookup = torch.randn(12, 5)


def of(fn: Any) -> Any:
    def call(x: Tensor) -> Any:  # the name of its argument
        return fn(x)

    return call


def rows(size: int) -> tuple[Tensor]:
    return (torch.randn(size, 5, 6),)


def steps(size: int) -> tuple[Tensor]:
    return (torch.randn(3, size, 6),)


def heads(x: Tensor) -> Any:
    return linear(x).view(x.shape[0], x.shape[1], 2, 3).transpose(1, 2)


def attended(x: Tensor) -> Tensor:
    found = F.scaled_dot_product_attention(heads(x), heads(x), heads(x))
    return found.transpose(1, 2).reshape(x.shape[0], x.shape[1], 6)


def causal(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)


def causal_by_mask(x: Tensor) -> Any:
    q, n = heads(x), x.shape[1]
    scores = (q @ q.transpose(-1, -2)).masked_fill(torch.tril(torch.ones(n, n)) == 0, float("-inf"))
    return (scores.softmax(-1) @ q).transpose(1, 2).flatten(2)


def causal_by_bias(x: Tensor) -> Any:
    q, n = heads(x), x.shape[1]
    scores = q @ q.transpose(-1, -2) + torch.full((n, n), float("-inf")).triu(1)
    return (scores.softmax(-1) @ q).transpose(1, 2).reshape(-1, x.shape[1], 6)


def causal_with_input(x: Tensor, mask: Tensor) -> Tensor:
    q, n = heads(x), x.shape[1]
    places = torch.arange(n)
    seen = (places[None, :] <= places[:, None]) & mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=seen)


def positioned(x: Tensor) -> Any:
    return positions(torch.arange(x.shape[1])) + x


def mixture(x: Tensor) -> Any:
    weights, chosen = linear(x).softmax(-1)[..., :4].topk(2, -1)
    return (torch.einsum("bsh,bskhd->bskd", x, experts[chosen]) * weights[..., None]).sum(2)


def written(x: Tensor) -> Tensor:
    x.mul_(2)
    x[:, 1] = x[:, 0] + 1
    return x + 1


def cached(x: Tensor, cache: Tensor, place: Tensor) -> Tensor:
    cache.index_copy_(1, place, x)
    return cache.sum(1)


RIGHT: list[tuple[str, Any, int, Any]] = [
    ("linear", of(linear), 0, lambda n: (torch.randn(n, 6),)),
    ("norms", of(norms), 0, rows),
    ("norms over steps", of(norms), 1, steps),
    ("convolutions", of(convolutions), 0, lambda n: (torch.randn(n, 3, 8, 8),)),
    ("embedding", of(table), 0, lambda n: (torch.randint(0, 12, (n, 3)),)),
    ("embedding over steps", lambda x: table(x).cumsum(-1), 1, lambda n: (torch.randint(0, 12, (3, n)),)),
    ("attention over batches", attended, 0, rows),
    ("encoder over batches", of(encoder), 0, rows),
    ("causal attention", causal, 1, steps),
    ("causal attention by a mask", causal_by_mask, 1, steps),
    ("causal attention by a bias", causal_by_bias, 1, steps),
    ("causal attention and a mask", causal_with_input, 1, lambda n: (torch.randn(3, n, 6), torch.rand(3, n) < 2)),
    ("mixture of experts", mixture, 0, rows),
    ("mixture of experts over steps", mixture, 1, steps),
    ("a write to it", written, 0, rows),
    ("a cache", cached, 0, lambda n: (torch.randn(n, 2, 6), torch.zeros(n, 11, 6), torch.tensor([1, 4]))),
    ("softmax", lambda x: x.softmax(-1) + x.log_softmax(1), 0, rows),
    ("reductions", lambda x: (x.amax(1), x.var(-1), x.norm(dim=(1, 2)), x.any(-1), x.argmax(2)), 0, rows),
    ("sorts", lambda x: (x.sort(1), x.topk(2, -1), x.median(1), x.flip(1), x.roll(1, 2)), 0, rows),
    ("cuts", lambda x: tuple(each + 1 for each in (*x.chunk(2, -1), *x.unbind(1), x[:, 1:, ::2], x[..., -1])), 0, rows),
    ("first rows", lambda x: x[0] + x[:2].sum(0), 0, rows),
    ("joins", lambda x: torch.cat([torch.stack([x, x * 2], 1).flatten(1, 2), x], 1), 0, rows),
    ("a token", lambda x: torch.cat([linear.weight[:1].expand(x.shape[0], 1, 6), x], 1), 0, rows),
    ("flat rows", lambda x: linear(x.flatten(0, 1)).softmax(-1), 0, rows),
    ("flat steps", lambda x: linear(x.reshape(-1, 6)), 1, steps),
    ("flat steps and batches", lambda x: linear(x.flatten(0, 1)).unflatten(0, (x.shape[0], -1)).amax(0), 1, steps),
    ("transposed", lambda x: linear(x).permute(2, 0, 1), 1, steps),
    ("einsum", lambda x: torch.einsum("bsh,bth->bst", x, x), 0, rows),
    ("pairs of steps", lambda x: x @ x.transpose(1, 2), 1, steps),
    (
        "masks",
        lambda x: torch.where(x > 0, x, x.new_zeros(x.shape)).masked_fill(x > 1, 0) + torch.ones_like(x),
        0,
        rows,
    ),
    ("created", lambda x: torch.zeros(x.shape[0], 6) + torch.arange(x.shape[0])[:, None] + x[:, 0], 0, rows),
    ("looked up", lambda x: lookup[x] + lookup[:, 2][x][:, None], 0, lambda n: (torch.randint(0, 12, (n,)),)),
    (
        "gathered",
        lambda x, i: x.log_softmax(-1).gather(-1, i),
        0,
        lambda n: (torch.randn(n, 6), torch.randint(0, 6, (n, 1))),
    ),
    ("padded", lambda x: F.pad(x, (1, 2)), 0, rows),
    ("no rows left", lambda x: (linear.weight * 2, x + 1), 0, rows),
    ("the number", lambda x: (x * 2, x.shape[0]), 0, rows),
    (
        "channels last",
        of(convolutions[0]),
        0,
        lambda n: (torch.randn(n, 3, 8, 8).to(memory_format=torch.channels_last),),
    ),
    ("an expanded input", of(linear), 0, lambda n: (torch.randn(n, 1, 6).expand(n, 5, 6),)),
    ("an input of equal rows", of(linear), 0, lambda n: (torch.randn(1, 5, 6).expand(n, 5, 6),)),
    ("a transposed input", of(linear), 1, lambda n: (torch.randn(n, 3, 6).transpose(0, 1),)),
    ("a view of an input", of(linear), 0, lambda n: (torch.randn(n, 11, 6)[:, 1:6],)),
    (
        "several inputs",
        lambda x, y, m: (x + y[:, None]) * m,
        0,
        lambda n: (torch.randn(n, 5, 6), torch.randn(n, 6), torch.rand(n, 1, 1)),
    ),
]


@pytest.mark.parametrize(("fn", "dim", "make"), [pytest.param(*case, id=name) for name, *case in RIGHT])
def test_outputs_are_those_of_eager_for_every_size(fn: Any, dim: int, make: Any) -> None:
    assert_right(fn, dim, make)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


@torch.library.custom_op("bucketed::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


unknown.register_fake(torch.empty_like)
kernel = torch.randn(6, 6, 3)
HOSTILE: list[tuple[str, Any, str]] = [
    ("mean", lambda x: x - x.mean(1, keepdim=True), "mean.dim"),
    ("mean of all", lambda x: x / x.mean(), "mean"),
    ("sum", lambda x: x * x.sum(1, keepdim=True).sigmoid(), "sum.dim"),
    ("softmax", lambda x: x.softmax(1), "_softmax"),
    ("norm", lambda x: F.normalize(x, dim=1), "mixes rows"),
    ("standard deviation", lambda x: x / x.std((0, 1)), "mixes rows"),
    ("maximum", lambda x: x - x.max(1, keepdim=True).values, "mixes rows"),
    ("argmax", lambda x: x.argmax(1), "mixes rows"),
    ("topk", lambda x: x.topk(2, 1).values, "mixes rows"),
    ("sort", lambda x: x.sort(1).values, "mixes rows"),
    ("median", lambda x: x.median(1).values, "mixes rows"),
    ("cumsum", lambda x: x.cumsum(1), "mixes rows"),
    ("flip", lambda x: x.flip(1), "mixes rows"),
    ("roll", lambda x: x.roll(1, 1), "mixes rows|rows"),
    ("contraction", lambda x: x.transpose(1, 2) @ x, "sums over the rows"),
    ("einsum", lambda x: torch.einsum("bsh,bsk->bhk", x, x), "sums over the rows"),
    ("pairs", lambda x: (x @ x.transpose(1, 2)).softmax(-1), "mixes rows"),
    ("attention", attended, "attend to the keys of added rows"),
    ("encoder", of(encoder), "attend to the keys of added rows|mixes rows"),
    ("convolution", lambda x: F.conv1d(x.transpose(1, 2), kernel, padding=1), "mixes rows"),
    ("pooling", lambda x: F.avg_pool1d(x.transpose(1, 2), 2, 1), "rows"),
    (
        "interpolation",
        lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2),
        "mixes rows|number of whole rows|rows cannot be told apart|fixes the size",
    ),
    ("padding", lambda x: F.pad(x, (0, 0, 1, 1)), "mixes rows"),
    ("group norm", lambda x: F.group_norm(x.transpose(1, 2), 2), "mixes rows"),
    ("batch norm", lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True), "mixes rows"),
    ("last row", lambda x: x[:, -1], "counted from the end"),
    ("last rows", lambda x: x[:, -2:], "rows"),
    ("later rows", lambda x: x[:, 1:] * 2, "rows"),
    ("every second row", lambda x: x[:, ::2] * 2, "rows"),
    ("differences", lambda x: x.diff(dim=1), "rows"),
    ("the size", lambda x: x / x.shape[1], "follows from the size"),
    ("arithmetic with the size", lambda x: x * (x.shape[1] ** 0.5), "follows from the size"),
    ("a value of the size", lambda x: x + torch.full((1,), x.shape[1]), "follows from the size"),
    ("counted from the end", lambda x: x + (x.shape[1] - torch.arange(x.shape[1]))[:, None], "follows from the size"),
    ("size in a result", lambda x: (x * 2, x.shape[1] + 1), "follows from the size"),
    ("joined", lambda x: torch.cat([x, x], 1), "mixes rows"),
    ("repeated", lambda x: x.repeat(1, 2, 1), "rows"),
    ("regrouped", lambda x: x.reshape(-1, 3, 2).sum(1), "rows"),
    ("flat", lambda x: x.flatten(1).softmax(-1), "mixes rows"),
    ("flat and transposed", lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[1], 6) + x, "rows"),
    ("permuted rows", lambda x: x[:, torch.randperm(x.shape[1])], "rows"),
    ("rows by number", lambda x: x[:, x[0, 0].long() * 0], "rows"),
    (
        "Fourier",
        lambda x: torch.fft.fft(x, dim=1).real,
        "mixes rows|number of whole rows|rows cannot be told apart|fixes the size",
    ),
    ("custom operator", of(unknown), "nothing is known"),
    ("positions beyond a table", positioned, "bucket 12 is too large"),
    (
        "an index that may be zero",
        lambda x: x.long() // (torch.arange(x.shape[1]) - 9)[:, None],
        "is zero in added rows",
    ),
    ("a view", lambda x: x.transpose(1, 2), "view of an input"),
    ("two views", lambda x: ((y := x * 2), y[0]), "two views of a tensor"),
    ("random masks", lambda x: torch.bernoulli(torch.zeros(x.shape[1], x.shape[1])) @ x, "sums over the rows"),
    ("less infinity", lambda x: torch.add(x @ x.mT, torch.full((), -torch.inf), alpha=-1).softmax(-1), "mixes rows"),
    (
        "a mask that is an input",
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=(x[..., 0] > 0)[:, None]),
        "added rows|mixes rows",
    ),
    (
        "anticausal",
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(x.shape[1], x.shape[1]).triu() > 0),
        "added rows|mixes rows",
    ),
    (
        "causal by a smallest number",
        lambda x: ((x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9)).softmax(-1),
        "mixes rows",
    ),
    ("distances", lambda x: torch.cdist(x, x).softmax(-1), "rows"),
    ("cross entropy", lambda x: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1)), "mixes rows"),
    ("loss", lambda x: F.mse_loss(x, x * 2), "mixes rows"),
    ("scatter", lambda x: torch.zeros(3, 4, 6).scatter_add(1, x.long() % 4, x), "rows"),
    ("writes into a buffer", lambda x: lookup.clone().index_put_((x[0, :, 0].long(),), x[0, :, :5]), "rows"),
]


@pytest.mark.parametrize(("fn", "sentence"), [pytest.param(*case, id=name) for name, *case in HOSTILE])
def test_what_mixes_rows_is_refused(fn: Any, sentence: str) -> None:
    padded, _ = behind(fn, {"x": {1: (4, 12)}})
    with torch.no_grad(), pytest.raises(Exception, match=sentence) as caught:
        padded(torch.randn(3, 5, 6))
    assert "magi.buckets: x.shape[1] cannot be padded" in str(caught.value)


def test_random_programs_are_right_or_refused() -> None:
    """Programs of steps that keep rows apart, mix them, or move them; a wrong rule would show as another result."""
    steps_of: list[Callable[[Tensor], Tensor]] = [
        linear,
        norms,
        torch.relu,
        lambda x: x.softmax(-1),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.flatten(0, 1).unflatten(0, (x.shape[0], x.shape[1])),
        lambda x: x.reshape(-1, 6).view(x.shape),
        lambda x: x.transpose(0, 1).reshape(-1, 6).reshape(x.shape),
        lambda x: x + x[:, :1],
        lambda x: x * torch.arange(x.shape[1])[:, None],
        lambda x: x - x.mean(-1, keepdim=True),
        causal,
        causal_by_mask,
        lambda x: (x @ x.mT).tril() @ x,
        lambda x: (x @ x.mT).triu() @ x,
        lambda x: x @ (x.mT @ x),
        lambda x: x.cumsum(1),
        lambda x: x + x[:, -1:],
        lambda x: x.roll(1, 1),
        lambda x: x - x.amax(1, keepdim=True),
        lambda x: torch.where(torch.arange(x.shape[1])[:, None] < 3, x, x * 2),
        lambda x: x[:, torch.arange(x.shape[1])],
        lambda x: x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])],
        lambda x: (
            x.view(x.shape[0], x.shape[1], 2, 3)
            .permute(0, 2, 1, 3)
            .reshape(-1, x.shape[1], 3)
            .mT.flatten(0, 1)[:6]
            .t()
            .expand(x.shape)
        ),
        lambda x: torch.cat([x[..., :3], x[..., 3:] * 2], -1),
        lambda x: F.pad(x, (0, 0, 1, 0))[:, : x.shape[1]],
    ]
    drawn, refused = random.Random(1), 0
    for number in range(24):
        chosen = drawn.choices(steps_of, k=drawn.randint(1, 4))

        def program(x: Tensor, chosen: Any = tuple(chosen)) -> Tensor:
            for step in chosen:
                x = step(x)
            return x + 1

        padded, _ = behind(program, {"x": {1: BUCKETS}})
        with torch.no_grad():
            for size in (7, 2, 5, 9, 10):
                x = torch.randn(3, size, 6)
                try:
                    have = padded(x)
                except Exception as error:  # noqa: BLE001 - of which class Dynamo wraps it
                    assert "magi.buckets" in str(error), number  # noqa: PT017 - it may also be right
                    refused += 1
                    break
                torch.testing.assert_close(have, program(x), msg=f"program {number} with {size} rows")
    assert 0 < refused < 24


@pytest.mark.parametrize(
    ("fn", "dim", "make"), [(norms, 0, rows), (causal, 1, steps), (mixture, 0, rows), (attended, 0, rows)]
)
def test_gradients_are_those_of_eager(fn: Any, dim: int, make: Any) -> None:
    padded, _ = behind(of(fn), {"x": {dim: BUCKETS}})
    for size in (7, 2, 3, 9, 10):
        x = make(size)[0].requires_grad_()
        weight = torch.randn_like(fn(x))
        parameters = [x, linear.weight, *norms.parameters()]
        want: Any = torch.autograd.grad((fn(x) * weight).sum(), parameters, allow_unused=True)
        have: Any = torch.autograd.grad((padded(x) * weight).sum(), parameters, allow_unused=True)
        torch.testing.assert_close(
            [each for each in have if each is not None], [each for each in want if each is not None]
        )
        assert [each is None for each in have] == [each is None for each in want]


def test_a_gradient_of_its_own_is_refused() -> None:
    padded, _ = behind(of(Doubled.apply), {"x": {0: BUCKETS}})
    with pytest.raises(Exception, match="nothing is known of the gradient of autograd_function_apply"):
        padded(torch.randn(7, 6, requires_grad=True))
    with torch.no_grad():
        assert_right(of(Doubled.apply), 0, lambda n: (torch.randn(n, 6),))


def test_a_write_while_gradients_are_computed_is_refused() -> None:
    padded, _ = behind(lambda x, y: x.mul_(y), {"x": {0: BUCKETS}})
    with pytest.raises(Exception, match="the graph writes to x"):
        padded(torch.randn(7, 6), torch.randn(7, 6, requires_grad=True))


def test_batch_and_steps_are_padded_together() -> None:
    padded, ran = behind(causal, {"x": {0: (4,), 1: BUCKETS}})
    with torch.no_grad():
        padded(torch.randn(2, 7, 6))
        for batch in (2, 3, 4, 5):
            for size in (2, 4, 7, 9, 10):
                x = torch.randn(batch, size, 6)
                assert_same(padded(x), causal(x))
    assert {tuple(sizes[:2]) for sizes in ran} == {(b, n) for b in (4, 5) for n in (4, 9, 10)}


def test_a_size_that_is_by_chance_another_one_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    padded, ran = behind(attended, {"x": {0: BUCKETS}})
    with torch.no_grad():
        x = torch.randn(7, 7, 6)
        assert_same(padded(x), attended(x))
        assert "in this graph it is the size of several dimensions" in caplog.text
        padded(torch.randn(7, 5, 6))
        x = torch.randn(6, 5, 6)
        assert_same(padded(x), attended(x))
    assert 9 in ran[-1]


def test_a_bucket_that_breaks_a_guard_is_not_used() -> None:
    def short(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < 8 else x * 3

    padded, ran = behind(short, {"x": {0: BUCKETS}})
    with torch.no_grad():
        for size in SIZES:
            x = torch.randn(size, 6)
            assert_same(padded(x), short(x))
    assert sorted({sizes[0] for sizes in ran}) == [4, 5, 6, 7, 9, 10]


@pytest.mark.parametrize(
    ("buckets", "sentence"),
    [
        ({"y": {0: (4,)}}, "no input of the graph is called 'y'. Name an input"),
        ({"xs": {0: (4,)}}, "no input of the graph is called 'xs' Did you mean 'x'?"),
        ({"x": {3: (4,)}}, r"x has no dimension 3\. Name an input"),
        ({"n": {0: (4,)}}, "n has no dimension 0"),
        ({"x": {0: (4,)}, "y": {0: (8,)}, "z": {0: (8,)}}, ""),
    ],
)
def test_what_fits_no_graph_is_an_error(buckets: Any, sentence: str) -> None:
    padded, _ = behind(lambda x, z, n: (x + z) * n, buckets)
    with pytest.raises(Exception, match=sentence or r"z.shape\[0\] and x.shape\[0\] are the same size"):
        padded(torch.randn(7, 6), torch.randn(7, 6), 3)


def test_settings_take_ascending_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CompileConfig(buckets={"x": {1: [8, 4, 8]}}).buckets == {"x": {1: (4, 8)}}
    monkeypatch.setenv("MAGI_COMPILE_BUCKETS", '{"x": {"1": [8, 4]}}')
    assert CompileConfig().buckets == {"x": {1: (4, 8)}}
    refused: tuple[Any, ...] = ({"x": {}}, {"x": {1: ()}}, {"x": {1: (0,)}}, {"x": (4,)}, {"x": {"a": (4,)}})
    for bad in refused:
        with pytest.raises(ConfigError, match="buckets = .*takes a dict of input to dimension to sizes"):
            CompileConfig(buckets=bad)


def compiled_with(fn: Any, **options: Any) -> Any:
    return torch.compile(
        fn, backend="magi", dynamic=True, options={f"magi.{name}": value for name, value in options.items()}
    )


def test_hot_sizes_and_named_sizes_are_those_of_buckets(made: Any) -> None:
    compiled = compiled_with(
        of(norms), buckets={"x": {0: (4, 8)}}, hot_sizes=2, hot_after=2, compile_sizes=({"x": (7, 6)},)
    )
    with torch.no_grad():
        for size in (3, 2, 3, 5, 7, 8, 9):
            x = torch.randn(size, 6)
            torch.testing.assert_close(compiled(x), norms(x))
    assert made() == [(8,), (4,)]


def test_eager_answers_padded_first_calls() -> None:
    compiled = compiled_with(of(norms), buckets={"x": {0: (4, 8)}}, first_call="eager", check=True)
    with torch.no_grad():
        for size in (3, 5, 7):
            x = torch.randn(size, 6)
            torch.testing.assert_close(compiled(x), norms(x))
        assert wait(60)
        for size in range(2, 10):
            x = torch.randn(size, 6)
            torch.testing.assert_close(compiled(x), norms(x))


def test_the_report_says_what_was_padded() -> None:
    explained = explain(of(norms), {"magi.buckets": {"x": {0: (4, 8)}}}, dynamic=True)
    with torch.no_grad():
        explained(torch.randn(3, 6))
        report = explained(torch.randn(9, 6))
    (use,) = report.compilations[0].buckets
    assert (use.path, use.buckets, use.calls, use.rows, use.run, use.too_large) == ("x.shape[0]", (4, 8), 6, 36, 39, 3)
    assert "x.shape[0]   4, 8      6       3" in str(report)


def test_dropout_is_not_padded_where_eager_is_compared() -> None:
    explained = explain(lambda x: F.dropout(x, 0.5), {"magi.buckets": {"x": {0: (4, 8)}}}, dynamic=True)
    (use,) = explained(torch.randn(3, 6)).compilations[0].buckets
    assert (use.rows, use.run) == (9, 9)
    assert use.note == "not padded, because its random numbers must be those of eager"


def test_a_refusal_reaches_the_caller_as_itself() -> None:
    with pytest.raises(
        BucketsError, match="sum.dim_IntList .*test_buckets.py.*it mixes rows, which lie in dimension 0 of x"
    ):
        compiled_with(lambda x: x - x.sum(0), buckets={"x": {0: (4, 8)}})(torch.randn(3, 6))


def test_a_graph_after_a_break_is_left_alone() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y.sum(0)

    compiled = compiled_with(broken, buckets={"x": {0: (4, 8)}})
    with torch.no_grad():
        for size in (3, 5):
            x = torch.randn(size, 6)
            torch.testing.assert_close(compiled(x), broken(x))


def test_training_under_checkpoint_with_hot_sizes(made: Any) -> None:
    def remembered(x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(norms, x, use_reentrant=False)

    compiled = compiled_with(remembered, buckets={"x": {0: (4, 8)}}, hot_sizes=2, hot_after=2)
    for size in (3, 5, 6, 7, 2, 4):
        x = torch.randn(size, 5, 6, requires_grad=True)
        (have,), (want,) = (torch.autograd.grad(fn(x).square().sum(), x) for fn in (compiled, remembered))
        torch.testing.assert_close(have, want)
    assert len(made()) == 2
