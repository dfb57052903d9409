# SPDX-License-Identifier: Apache-2.0
"""The source of the surface: from ATen's schemas and an allowlist to Python files. Torch is imported only to verify.

| module | what it holds |
|---|---|
| `torchgen`, `schema` | the installed schemas, and a model of them |
| `allowlist`, `names` | which operators, and what they are called here |
| `choice` | which variant of a base a call means |
| `emit`, `python_text` | the text of functions and of their types |
| `surface`, `metadata`, `coverage_page` | all files of a surface |
| `files` | a folder written atomically |
| `scaffold`, `verify` | what `aten new` and `aten gen --verify` do |
"""
