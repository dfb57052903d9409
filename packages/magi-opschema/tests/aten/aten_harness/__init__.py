# SPDX-License-Identifier: Apache-2.0
"""The test harness of the ATen surface: inputs, layouts, checks, and the processes that run them.

| module | what it holds |
|---|---|
| `run`, `workers` | bases and slots in, rows out; the processes |
| `subject` | what is called, and the forms of arguments |
| `providers` | where inputs come from |
| `checks`, `known` | what is checked for each call; what is known to differ |
"""
