# SPDX-License-Identifier: Apache-2.0
"""Objects behind integers, and classes whose objects are taken apart: `ObjectHandle[T]`.

| module | what it holds |
|---|---|
| `handle` | the objects that have a handle; `ObjectHandle[T]`, and how Dynamo reads handles and parts of objects |
| `declared` | classes that declare their fields, so that ops take their objects apart |
"""
