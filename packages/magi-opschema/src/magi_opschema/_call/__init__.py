# SPDX-License-Identifier: Apache-2.0
"""What happens around one call, at run time and outside the generated code.

| module | what it holds |
|---|---|
| `bridge` | values, dimensions and placements between the user's signature and the flat one |
| `misfit` | calls that do not fit the signature, and why the dispatcher refused the arguments |
| `checks` | what is verified on an op's first real call |
| `conditions` | which calls a body serves |
| `direct` | calls of a body from the code that Inductor generates |
"""
