# SPDX-License-Identifier: Apache-2.0
"""Which calls a body serves, by their tensors and by a function of their arguments: for ops, and for slots of ATen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast

import torch

from magi_opschema._model.schema import tensors_in
from magi_opschema._text import show_value
from magi_opschema.errors import OpSchemaError


@dataclass(frozen=True)
class Condition:
    """The calls that a body serves; None leaves something open.

    Attributes:
        devices: The device types on which every tensor of a call must be.
        dtypes: The dtypes that its first tensor may have.
        capability: The least compute capability of the GPU of its tensors, such as (9, 0).
        when: Called with the arguments of the call; it serves those for which that is true.
    """

    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    capability: tuple[int, int] | None = None
    when: Callable[..., bool] | None = None

    @classmethod
    def of(
        cls,
        devices: Iterable[str] | None,
        dtypes: Iterable[torch.dtype] | None,
        capability: tuple[int, int] | None,
        when: Callable[..., bool] | None,
        refused: Callable[[str], OpSchemaError],
    ) -> Condition:
        """The condition of these options; raises what *refused* makes of the sentence about one that is wrong."""
        if capability is not None:
            parts: list[object] = list(capability) if isinstance(cast("object", capability), (tuple, list)) else []
            if len(parts) != 2 or not all(type(part) is int for part in parts):
                raise refused(f"capability={show_value(capability)} must be two ints, such as (9, 0)")
            capability = (capability[0], capability[1])
        return cls(
            _frozen(devices, str, "devices", refused), _frozen(dtypes, torch.dtype, "dtypes", refused), capability, when
        )

    @cached_property
    def is_open(self) -> bool:
        """Whether it holds for every call."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def holds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it holds for a call; of one without tensors, the device and the dtype are those it asks for."""
        tensors = list(tensors_in((args, kwargs)))
        if self.devices is not None or self.capability is not None:
            devices = {t.device for t in tensors} or {_device_asked_for(args, kwargs)}
            if self.devices is not None and not {device.type for device in devices} <= self.devices:
                return False
            known = (torch.cuda.get_device_capability(d) if d.type == "cuda" else (0, 0) for d in devices)
            if self.capability is not None and any(capability < self.capability for capability in known):
                return False
        if self.dtypes is not None:
            dtype = tensors[0].dtype if tensors else kwargs.get("dtype")
            if (dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()) not in self.dtypes:
                return False
        return self.when is None or bool(self.when(*args, **kwargs))


def _device_asked_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    given = kwargs.get("device") or next((value for value in args if isinstance(value, torch.device)), None)
    return torch.get_default_device() if given is None else torch.device(given)


def _frozen(values: object, kind: type, name: str, refused: Callable[[str], OpSchemaError]) -> frozenset[Any] | None:
    if values is None:
        return None
    if isinstance(values, str):
        raise refused(f"{name}={values!r} is a string; give a collection, {name}=({values!r},)")
    found = list(values) if isinstance(values, Iterable) else []
    if not found or not all(isinstance(value, kind) for value in found):
        raise refused(f"{name}={show_value(values)} must be a collection of {kind.__name__}")
    return frozenset(found)
