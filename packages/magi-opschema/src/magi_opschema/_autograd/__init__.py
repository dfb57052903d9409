# SPDX-License-Identifier: Apache-2.0
"""Derivatives of an op, by the user's gradient functions.

| module | what it holds |
|---|---|
| `functions` | the two autograd.Functions of an op |
| `kernels` | what the dispatcher runs at the keys of autograd and of torch.func |
| `gradients` | what `backward_fn` returned, checked and taken apart |
"""
