# SPDX-License-Identifier: Apache-2.0
"""From a decorator to a registered op, and what can be done with one.

| module | what it holds |
|---|---|
| `decorator` | `magi_register_custom_op`, and the type of what it returns: check, compute, register, remember |
| `registration` | the only module that registers anything with torch |
| `catalogue` | what is known of each op: `op_def`, `annotate`, `opcheck` |
| `implementations` | several bodies of one op, and which of them a call runs |
| `rules` | fake, gradient, bodies, vmap, autocast and sharding, checked |
| `pytrees` | records as nodes of torch's pytrees |
"""
