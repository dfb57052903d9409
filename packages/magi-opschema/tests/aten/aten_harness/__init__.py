# SPDX-License-Identifier: Apache-2.0
"""The test harness of the ATen surface: inputs, layouts, checks, and the processes that run them.

| module | what it holds |
|---|---|
| `check`, `run`, `workers` | bases and slots in, rows out; the processes |
| `rows`, `reasons`, `divergences` | results, and what is known to differ |
| `subject`, `samples`, `layouts`, `devices` | what is called, and the arguments |
| `providers`, `recipes`, `op_db`, `fuzz` | where inputs come from |
| `checks`, `compare`, `gradients`, `outs`, `library_checks` | what is checked for each call |
"""
