# SPDX-License-Identifier: Apache-2.0
"""magi-passes and magi-tritonwrap may not import each other, so some functions are in both: a fix reaches both.

They compute what code does: for the uuid of a pass, and for the cache key of an op.
"""

from __future__ import annotations

import ast

import pytest
from _layers import folder_of


PASSES, TRITONWRAP = folder_of("magi_passes"), folder_of("magi_tritonwrap")

# Methods and functions of the same name that have to differ, of modules that are otherwise alike. A pass notes what it
# reads, in its footprint, and raises an error for a value without a stable form; an op has kernels and inner ops, and
# lists such values together with the reason.
DIFFERENT = {
    ("_identity/code.py", "_identity/code.py"): set(),
    ("_identity/members.py", "_identity/members.py"): set(),
    ("_identity/library.py", "_library.py"): set(),
    ("_identity/value_forms.py", "_identity/value_forms.py"): {
        *("Walk.unstable", "container_form", "instance_form", "library_instance_form"),
        *("plain_form", "runtime_form", "tensor_form"),
    },
    ("_identity/walk.py", "_identity/fingerprint.py"): {
        *("_Walk.__init__", "_Walk._class", "_Walk._description", "_Walk._distribution", "_Walk._function"),
        *("_Walk._imported", "_Walk._module", "_Walk._read_by", "_Walk.unstable"),
    },
}


def functions(text: str) -> dict[str, str]:
    """The text of each function and method in the source *text*, by its qualified name."""
    found = {}
    for node in ast.parse(text).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef):
                first = min([member.lineno, *(decorator.lineno for decorator in member.decorator_list)])
                lines = text.splitlines()[first - 1 : member.end_lineno]
                found[prefix + member.name] = "\n".join(lines)
    return found


def differences(one: str, other: str) -> set[str]:
    """The names of the functions that are in both texts and are not the same."""
    ours, theirs = functions(one), functions(other)
    return {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


@pytest.mark.parametrize(("one", "other"), list(DIFFERENT), ids=[one for one, _ in DIFFERENT])
def test_functions_of_one_name_are_the_same_text_in_both_packages(one: str, other: str) -> None:
    assert differences((PASSES / one).read_text(), (TRITONWRAP / other).read_text()) == DIFFERENT[one, other]


@pytest.mark.parametrize("module", ["_identity/code.py", "_identity/members.py"])
def test_modules_without_a_difference_are_the_same_text(module: str) -> None:
    assert (PASSES / module).read_text() == (TRITONWRAP / module).read_text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return value", "return str(value)"),
        ('"""A form."""', '"""Another form."""'),
        ("# plain", "# not plain"),
        ("@staticmethod", "@classmethod"),
        ("value: int", "value: float"),
    ],
)
def test_a_fix_in_one_place_is_noticed(before: str, after: str) -> None:
    text = '''
class Walk:
    @staticmethod
    def form(value: int):
        """A form."""
        return value  # plain
'''
    assert differences(text, text) == set()
    assert differences(text, text.replace(before, after)) == {"Walk.form"}
