# SPDX-License-Identifier: Apache-2.0
"""The source of the surface: from ATen's schemas and an allowlist to Python files. Torch is imported only to verify.

| module | what it holds |
|---|---|
| `schema` | a model of schemas and their names; what the installed torch and an allowlist have |
| `emit` | which variant of a base a call means; the text of functions and of their types |
| `surface` | all files of a surface, and their folder |
"""
