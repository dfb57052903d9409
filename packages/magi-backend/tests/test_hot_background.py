# SPDX-License-Identifier: Apache-2.0
"""Code for sizes that come back is made on a thread of its own, and the calls do not wait for it."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from magi_backend import explain, wait
from magi_backend._hot import background
from magi_backend._hot.background import jobs
from magi_backend._torch_compat.state import compile_lock
from torch import Tensor, nn


OPTIONS: dict[str, Any] = {"magi.hot_sizes": 2, "magi.hot_after": 2, "magi.hot_in_background": True}
Made = Callable[[], list[tuple[int, ...]]]


def gram(x: Tensor) -> Tensor:
    return x @ x.t()


def call(compiled: Callable[[Tensor], Tensor], *counts: int) -> None:
    for count in counts:
        x = torch.randn(count, 3)
        torch.testing.assert_close(compiled(x), gram(x))


def test_calls_run_the_code_for_any_size_until_their_own_is_made(made: Made) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=OPTIONS)
    call(compiled, 7)
    before = (sys.getswitchinterval(), gc.get_threshold())

    with compile_lock():  # as a compilation that goes on
        call(compiled, 4, 4, 4, 4, 5)
        assert not wait(seconds=0.01)
        assert made() == []
    assert wait()

    assert [size[0] for size in made()] == [4]
    assert (sys.getswitchinterval(), gc.get_threshold()) == before
    call(compiled, 4, 5, 4)
    assert wait()
    assert [size[0] for size in made()] == [5]


def test_no_full_garbage_collection_stops_the_calls_until_nothing_was_made_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, before = list[int](), gc.get_threshold()
    monkeypatch.setattr(background, "_SECONDS_TO_COLLECT", 0.3)
    jobs.add("a", lambda: seen.append(gc.get_threshold()[2]))
    while jobs._thread is not None:
        time.sleep(0.001)
    seen.append(gc.get_threshold()[2])
    assert seen[0] == seen[1] > 10**6
    time.sleep(0.6)
    assert gc.get_threshold() == before


def test_an_error_of_a_job_ends_neither_the_thread_nor_what_waits(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def fails() -> None:
        raise OSError("the disk is full")

    with compile_lock():
        jobs.add("first", fails)
        jobs.add("second", lambda: done.append("second"))
    assert wait(seconds=10)
    jobs.add("first", lambda: done.append("first"))
    assert wait(seconds=10)

    assert done == ["second", "first"]
    assert "the disk is full" in caplog.text


def test_the_report_counts_the_calls_of_both_kinds() -> None:
    explained = explain(gram, options=OPTIONS, dynamic=True)
    explained(torch.randn(7, 3))
    with compile_lock():
        for _ in range(3):
            explained(torch.randn(4, 3))
    assert wait()

    for _ in range(3):
        report = explained(torch.randn(4, 3))

    sizes = report.compilations[0].sizes
    assert sizes is not None
    (use,) = (use for use in sizes.uses if use.sizes[0][1] == 4)
    assert use.has_code
    assert 3 <= use.hits < use.calls


def test_no_more_sizes_get_code_than_may_have_it(made: Made) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=OPTIONS)
    call(compiled, 20)

    with compile_lock():
        call(compiled, *range(4, 12), *range(4, 12))
    assert wait()

    assert len(made()) == 2


def test_a_failure_leaves_the_code_for_any_size(made: Made, tried: list[object]) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=OPTIONS)

    call(compiled, 4, 4, 4)
    assert wait()

    assert (made(), len(tried)) == ([], 1)
    call(compiled, 4, 4)


def test_what_belongs_to_the_process_is_left_alone(made: Made) -> None:
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=OPTIONS)
    call(compiled, 7)
    with compile_lock():
        call(compiled, 4, 4)
        torch.set_default_dtype(torch.float64)
    try:
        assert wait()
        assert torch.get_default_dtype() is torch.float64
        assert made() == []
    finally:
        torch.set_default_dtype(torch.float32)

    call(compiled, 4)
    assert wait()
    assert [size[0] for size in made()] == [4]


@pytest.mark.kernels
def test_random_numbers_that_are_drawn_meanwhile_are_not_drawn_again(made: Made) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.ReLU())
    compiled = torch.compile(model, backend="magi", dynamic=True, options=OPTIONS)
    compiled(torch.randn(7, 3)).sum().backward()
    drawn: list[tuple[float, ...]] = []

    with compile_lock():
        for _ in range(2):
            compiled(torch.randn(4, 3)).sum().backward()
    while not wait(seconds=0.001):
        drawn.append((*torch.rand(2, dtype=torch.float64).tolist(), random.random()))

    assert made() != []
    assert len(drawn) > 1
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == len(drawn)


def test_a_child_process_does_not_wait_for_the_thread_of_its_parent(made: Made) -> None:
    thresholds = gc.get_threshold()
    compiled = torch.compile(gram, backend="magi", dynamic=True, options=OPTIONS)
    call(compiled, 7)
    lock_is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with compile_lock():
            lock_is_held.set()
            go_on.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    lock_is_held.wait()
    call(compiled, 4, 4)
    assert not wait(seconds=0.01)

    if (child := os.fork()) == 0:
        status = 1
        try:
            assert wait(seconds=0.0)
            torch.compile(gram, backend="eager")(torch.randn(4, 3))
            call(compiled, 4, 4)
            assert wait()
            assert gc.get_threshold() == thresholds, "those that the parent had before it made code"
            status = 0
        finally:
            os._exit(status)
    go_on.set()
    holder.join()
    end = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)

    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)
    assert wait()
    assert [size[0] for size in made()] == [4]


ENDS = """
import torch
from magi_backend import wait

options = {"magi.hot_sizes": 32, "magi.hot_after": 2, "magi.hot_in_background": True}
compiled = torch.compile(lambda x: x @ x.t(), backend="magi", dynamic=True, options=options)
for count in (*range(4, 36), *range(4, 36)):
    compiled(torch.randn(count, 3))
assert not wait(seconds=0.2)
print("at the end")
"""


def test_the_process_ends_in_the_middle_of_a_compilation(fresh_caches: object) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)

    assert (ended.returncode, ended.stdout) == (0, "at the end\n"), ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
