# SPDX-License-Identifier: Apache-2.0
"""Process groups: their ranks, what they count, and the store in which ranks leave word for each other."""

from __future__ import annotations

from typing import Any

import torch


def ranks() -> int:
    """How many processes work together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return torch.distributed.get_rank()


def store() -> Any:
    """The store of the default process group, by a connection of its own: another thread may wait on the other one."""
    default: Any = torch.distributed.distributed_c10d._get_default_store()
    return default.clone()


def members(group: str) -> tuple[int, ...]:
    """The ranks of the process group of this name.

    Raises:
        Exception: There is none.
    """
    return tuple(torch.distributed.get_process_group_ranks(_named(group)))


def operations(group: str, device: str) -> int:
    """How many operations this rank has begun in *group* on tensors of *device*, a type of devices. It takes 0.3 µs.

    The same number means the same place of the program on every rank, since all of them begin the same operations in
    the same order. gloo counts messages between two ranks too, NCCL does not (2.10 to 2.15).

    Raises:
        Exception: The group is gone, or what carries out its operations does not count them.
    """
    return int(_named(group)._get_backend(torch.device(device))._get_sequence_number_for_group())


def _named(group: str) -> Any:
    functions: Any = torch.distributed.distributed_c10d
    return functions._resolve_process_group(group)


def group_of_wrapper(tensor: torch.Tensor) -> str | None:
    """The name of the process group over whose ranks *tensor* lies; None if it is no DTensor on a mesh of one dim."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim != 1:
        return None
    return str(tensor.device_mesh.get_group().group_name)


WAITS_FOR_RANKS = ("all_gather_object", "barrier")
"""The functions of `torch.distributed` with which a compilation begins where it waits for other ranks (2.10 to 2.15).

It does under options such as ``_sync_decision_cross_ranks`` or ``enable_overlap_scheduling``.
"""
