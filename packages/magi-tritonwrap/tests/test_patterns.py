# SPDX-License-Identifier: Apache-2.0
"""Each launch pattern is seen through: in the AOT graph, the launch is in the place of the op."""

from __future__ import annotations

import pytest
import torch
import tritonwrap_patterns as patterns
from graph_questions import Ops, op_stays
from magi_tritonwrap import capture_launches, find_kernels, see_through_report
from magi_tritonwrap._cache_key import fingerprint
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_op_becomes_its_launches(ops: Ops, name: str, dynamic: bool) -> None:
    pattern = patterns.PATTERNS[name]
    op = ops.seen(name, pattern.body)

    (graph,) = aot_graphs(lambda x: op(x.relu()) + 1, torch.ones(300), dynamic=dynamic)

    assert op not in {node.target for node in graph.graph.nodes}
    launches = launches_of(graph)
    assert len(launches) == pattern.launches
    assert all(launch.cloned == ["out"] for launch in launches)
    report = see_through_report(op)
    assert report.see_through
    assert not report.fallbacks
    assert report.kernels
    assert all(kernel.file == site[0] == patterns.__file__ for kernel in report.kernels for site in kernel.launches)
    assert {launch.kernel.fn.__name__ for launch in launches if isinstance(launch.kernel, JITFunction)} <= {
        kernel.name.rpartition(".")[2] for kernel in report.kernels if kernel.launches
    }


@pytest.mark.usefixtures("stub")
def test_without_see_through_the_op_stays(ops: Ops) -> None:
    op = ops.define("opaque", patterns.module_level)
    assert op_stays(op)


@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_a_body_is_its_own_fake_and_names_lead_to_its_kernels(name: str) -> None:
    """Without a driver. The kernels it launches are among those found, and the walk of the cache key meets them too."""
    pattern = patterns.PATTERNS[name]
    with FakeTensorMode(), capture_launches(drop=True) as log:
        x = torch.ones(300, device="cuda")
        out = pattern.body(x)
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    assert len(log.launches) == pattern.launches
    assert all(launch.file == patterns.__file__ for launch in log.launches)

    report = find_kernels(pattern.body)
    found = {(kernel.file, kernel.line) for kernel in report.kernels}
    assert {(launch.kernel.file, launch.kernel.line) for launch in log.launches} <= found
    covered = fingerprint([pattern.body], "body").kernels
    assert all(any(kernel.kernel is one for one in covered) for kernel in report.kernels if kernel.kernel is not None)
