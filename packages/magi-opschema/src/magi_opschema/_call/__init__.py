# SPDX-License-Identifier: Apache-2.0
"""What happens around one call, at run time and outside the generated code.

| module | what it holds |
|---|---|
| `structure` | flat outputs in the structure of what the user's function returns |
| `bridge` | values, dimensions and placements between the user's signature and the flat one |
| `misfit` | calls that do not fit the signature |
| `checks` | what is verified on an op's first real call; `writes` is a part of it |
| `translation` | why the dispatcher refused the arguments |
| `vmap` | torch.vmap over an op |
"""
