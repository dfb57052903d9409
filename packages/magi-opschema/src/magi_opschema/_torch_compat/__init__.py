# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that magi-opschema uses, one function or constant for each quirk.

dispatch.py   the keys of the dispatcher, and what runs at them
tensors.py    the memory of Tensors, and the count of writes
tracing.py    Dynamo and FakeTensors
overloads.py  operators, and calls of them whose errors are translated
entries.py    names that the dispatcher knows, the end and the replacement of an op
pytrees.py    pytree nodes, and the names they are saved under

Each one works with torch 2.10 to 2.15 unless it says otherwise.
"""

from .dispatch import (
    any_requires_grad,
    apply_in_eager,
    are_transforms_active,
    below_adinplaceorview,
    below_adinplaceorview_pool,
    below_autograd,
    below_autograd_pool,
    dispatch,
    dispatch_key_of,
    forward_ad,
    handle_of,
    has_torch_function,
    has_torch_function_among,
    is_dispatch_plain,
    is_forward_ad_active,
    is_functionalizing,
    run_functionalized,
    tracing_state,
)
from .entries import destroy, is_registered, keep_entry, reserved_part, restore_packet, speak_for_earlier
from .overloads import CustomOpDef, OpOverload, OpOverloadPacket, functionalize_by, translate_errors
from .pytrees import (
    GetAttrKey,
    class_saved_as,
    has_saved_name,
    is_pytree_node,
    pytree_lock,
    register_pytree_node,
    register_saved_namedtuple,
    save_as,
)
from .tensors import counting_writes, increment_version, is_capturing, storage_id, writes_counted
from .tracing import (
    answer_class,
    fix_local,
    guard_type,
    hide_from_dynamo,
    is_dynamo_compiling,
    register_fake,
    run_at_trace_time,
    run_on_fakes,
    symbolic_when_traced,
    traced_object,
)


__all__ = [
    "CustomOpDef",
    "GetAttrKey",
    "OpOverload",
    "OpOverloadPacket",
    "answer_class",
    "any_requires_grad",
    "apply_in_eager",
    "are_transforms_active",
    "below_adinplaceorview",
    "below_adinplaceorview_pool",
    "below_autograd",
    "below_autograd_pool",
    "class_saved_as",
    "counting_writes",
    "destroy",
    "dispatch",
    "dispatch_key_of",
    "fix_local",
    "forward_ad",
    "functionalize_by",
    "guard_type",
    "handle_of",
    "has_saved_name",
    "has_torch_function",
    "has_torch_function_among",
    "hide_from_dynamo",
    "increment_version",
    "is_capturing",
    "is_dispatch_plain",
    "is_dynamo_compiling",
    "is_forward_ad_active",
    "is_functionalizing",
    "is_pytree_node",
    "is_registered",
    "keep_entry",
    "pytree_lock",
    "register_fake",
    "register_pytree_node",
    "register_saved_namedtuple",
    "reserved_part",
    "restore_packet",
    "run_at_trace_time",
    "run_functionalized",
    "run_on_fakes",
    "save_as",
    "speak_for_earlier",
    "storage_id",
    "symbolic_when_traced",
    "traced_object",
    "tracing_state",
    "translate_errors",
    "writes_counted",
]
