# SPDX-License-Identifier: Apache-2.0
"""Each launch pattern is seen through: in the AOT graph, the launch is in the place of the op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import tritonwrap_patterns as patterns
from magi_tritonwrap import find_kernels, make_see_through, see_through_report
from magi_tritonwrap.testing import aot_graphs, launches_of


if TYPE_CHECKING:
    from conftest import Ops


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_op_becomes_its_launches(ops: Ops, name: str, dynamic: bool) -> None:
    pattern = patterns.PATTERNS[name]
    op = ops.define(name, pattern.body)
    make_see_through(op, pattern.body)

    (graph,) = aot_graphs(lambda x: op(x.relu()) + 1, torch.ones(300), dynamic=dynamic)

    assert op not in {node.target for node in graph.graph.nodes}
    launches = launches_of(graph)
    assert len(launches) == pattern.launches
    assert all(tuple(launch.cloned) == pattern.cloned for launch in launches)
    report = see_through_report(op)
    assert report.see_through
    assert not report.fallbacks


@pytest.mark.usefixtures("stub")
def test_without_see_through_the_op_stays(ops: Ops) -> None:
    op = ops.define("opaque", patterns.module_level)

    (graph,) = aot_graphs(op, torch.ones(300))

    assert op in {node.target for node in graph.graph.nodes}
    assert launches_of(graph) == []


@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_source_tells_the_kernels(name: str) -> None:
    report = find_kernels(patterns.PATTERNS[name].body)

    assert report.kernels, str(report)
    assert report.unresolved == (), str(report)
    for kernel in report.kernels:
        assert kernel.file == patterns.__file__
        assert kernel.launches
