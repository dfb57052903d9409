# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from aten_harness.workers import run_tasks


if TYPE_CHECKING:
    from aten_harness.workers import Death, Note


def outcomes(
    tasks: list[int], work: object, *, seconds: float = 60.0, retries: int = 12
) -> dict[int, tuple[object, list[Death]]]:
    run = run_tasks(tasks, work, jobs=2, seconds=seconds, retries=retries)  # type: ignore[arg-type]
    return {task: (result, deaths) for task, result, deaths in run}


def test_a_crash_costs_one_check_of_one_task() -> None:
    def work(task: int, note: Note, left_out: frozenset[str]) -> list[str]:
        done = []
        for check in ("first", "second", "third"):
            if check in left_out:
                continue
            note.write(check)
            if task == 3 and check == "second":
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(check)
        return done

    found = outcomes(list(range(6)), work)

    assert found[3][0] == ["first", "third"]
    assert [(death.doing, death.how) for death in found[3][1]] == [("second", "crashed with SIGKILL")]
    assert all(found[task] == (["first", "second", "third"], []) for task in (0, 1, 2, 4, 5))


def test_a_hang_is_a_death_and_a_hopeless_task_is_given_up() -> None:
    def work(task: int, note: Note, left_out: frozenset[str]) -> int:
        note.write(f"try {len(left_out)}")
        while task == 1:
            time.sleep(1)
        return task

    found = outcomes([0, 1], work, seconds=0.3, retries=2)

    assert found[0] == (0, [])
    assert found[1][0] is None
    assert [(death.doing, death.how) for death in found[1][1]] == [("try 0", "hung for 0 s"), ("try 1", "hung for 0 s")]
