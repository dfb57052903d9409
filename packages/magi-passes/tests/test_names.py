# SPDX-License-Identifier: Apache-2.0
"""A misspelt name is an error that names the nearest, or one warning where an error would stop a process."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass, replace
from typing import Any, ClassVar

import pytest
from made_passes import HOOK, Holds
from magi_passes import ConvChooser, MagiInductorPass, MagiPassesError, PassContext, PassPipeline
from magi_passes.errors import UnknownVariableWarning


def _pass(bases: tuple[type, ...] = (MagiInductorPass,), /, **members: Any) -> Any:
    namespace = {"__call__": _does_nothing, **members}
    return make_dataclass("Bad", [], bases=bases, namespace=namespace, frozen=True)


def _does_nothing(self: object, graph: object, *context: object) -> None:
    pass


def _with_keyword() -> None:
    class Bad(MagiInductorPass, hok=HOOK):
        pass


KEYS = "inductor_config_keys_potentially_mutated_by_this_pass"
KEY = KEYS.replace("keys", "key")
CALL = r"^Bad\.__call_ is almost '__call__', which Bad does not define"
ALMOST = (
    r"^Bad\.is_aplicable is almost 'is_applicable', which Bad does not define\. Rename it, or give what is not meant "
    r"as 'is_applicable' another name\. \(\S+\)$"
)
# What a user writes, and what the error says.
DOORS: dict[str, tuple[Callable[[], object], str]] = {
    "a method": (lambda: _pass(is_aplicable=_does_nothing), ALMOST),
    "a method with two mistakes": (lambda: _pass(is_aplicabel=_does_nothing), "'is_applicable'"),
    "a method in another case": (lambda: _pass(isApplicable=_does_nothing), "'is_applicable'"),
    "a static method": (lambda: _pass(is_aplicable=staticmethod(_does_nothing)), "'is_applicable'"),
    "a call": (lambda: type("Bad", (Holds,), {"__cal__": _does_nothing}), r"^Bad\.__cal__ is almost '__call__'"),
    "a call with one underscore": (lambda: type("Bad", (Holds,), {"_Bad__call_": _does_nothing}), CALL),
    "a uuid": (lambda: _pass(uuids=lambda self: "1"), r"^Bad\.uuids is almost 'uuid'"),
    "the attribute of the hook": (lambda: _pass(hok=HOOK), r"^Bad\.hok is almost 'hook'"),
    "the attribute of the keys": (lambda: _pass(**{KEY: ("size_asserts",)}), rf"^Bad\.{KEY} is almost '{KEYS}'"),
    "a class keyword": (_with_keyword, r"Bad: 'hok' is not a keyword .* body of the class\. Did you mean 'hook'\?"),
    "a hook": (lambda: _pass(hook="post_grad_custom_pas"), r"^Bad\.hook is .*Did you mean 'post_grad_custom_p\w+'\?"),
    "a key that is declared": (
        lambda: PassPipeline([_pass(**{KEYS: ("triton.max_tile",)})()]),
        r"^Bad declares the Inductor key 'triton.max_tile', which .* Did you mean 'triton.max_tiles'",
    ),
    "a key that is read": (
        lambda: PassContext().config["layout_optimisation"],
        r"^Inductor's configuration has no key 'layout_optimisation' in torch \S+ Did you mean 'layout_optimization'\?",
    ),
    "an option": (
        lambda: PassPipeline([Holds()]).inductor_options({"triton.max-tile": 2}),
        r"^inductor_options: base has 'triton\.max_tile', which is not an option .*Did you mean 'triton\.max_tiles'\?",
    ),
    "a field": (
        lambda: ConvChooser(tuen=True),  # type: ignore[call-arg]
        r"^ConvChooser has no field 'tuen'\. Did you mean 'tune'\? Its fields are tune, cache_dir, .*min_share\.$",
    ),
    "a field of the user's": (lambda: Holds(vlaue=1), r"^Holds has no field 'vlaue'\. Did you mean 'value'\?"),  # type: ignore[call-arg]
    "a field that is replaced": (lambda: replace(Holds(), valu=1), r"no field 'valu'\. Did you mean 'value'\?"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("door", DOORS)
def test_a_misspelt_name_is_an_error_that_names_the_nearest(door: str) -> None:
    write, sentence = DOORS[door]
    with pytest.raises(MagiPassesError, match=sentence):
        write()


@dataclass(frozen=True)
class Good(MagiInductorPass):
    """Helpers beside a hook that is defined, values of another kind, private names, and names less like a hook."""

    HOOKS: ClassVar[str] = "no hook of Inductor's"
    hooks: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    uid: int = 1

    def is_applicable(self, graph: object, context: object) -> bool:
        return self.is_applicable_()

    def __call__(self, graph: object) -> None: ...
    def __call(self) -> None: ...
    def is_applicable_(self) -> bool: ...  # type: ignore[empty-body]
    def _is_aplicable(self) -> None: ...
    def call(self) -> None: ...
    def hook_of(self) -> None: ...
    def process(self) -> None: ...


class Child(Good):
    def is_applicable_to(self) -> None: ...
    def applicable(self) -> None: ...
    def is_applied(self) -> None: ...
    def uid_of(self) -> None: ...


def test_other_names_are_the_author_s() -> None:
    for good in (Good(hooks=("a",), uid=2), Child(hooks=("a",), uid=2)):
        assert good == copy.deepcopy(good) == pickle.loads(pickle.dumps(good)) == replace(good, uid=2)


def test_an_init_of_the_author_s_takes_what_it_likes() -> None:
    @dataclass(frozen=True, init=False)
    class Own(MagiInductorPass):
        tiles: int

        def __init__(self, **settings: int) -> None:
            object.__setattr__(self, "tiles", settings.get("tile", 0))

        def __call__(self, graph: object) -> None: ...

    assert Own(tile=3).tiles == 3


def test_options_that_are_not_like_any_are_torch_s_to_refuse() -> None:
    """`guard_filter_fn` is an option of `torch.compile`, and not a key of Inductor's configuration."""
    options = PassPipeline([Holds()]).inductor_options({"guard_filter_fn": list, "triton.max_tiles": 2})
    assert options["guard_filter_fn"] is list


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("MAGI_PASSES_DISABL", " Did you mean 'MAGI_PASSES_DISABLE'?"),
        ("MAGI_PASS_DISABLE", " Did you mean 'MAGI_PASSES_DISABLE'?"),
        ("magi_passes_disable", " Did you mean 'MAGI_PASSES_DISABLE'?"),
        ("MAGI_PASSES_AND_SOMETHING_ELSE_ENTIRELY", ""),
    ],
)
def test_an_unknown_variable_is_one_warning(monkeypatch: pytest.MonkeyPatch, variable: str, hint: str) -> None:
    monkeypatch.setenv(variable, "all")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            PassPipeline([Holds()]).inductor_options()[HOOK].uuid()
    (warning,) = caught
    assert warning.category is UnknownVariableWarning
    assert str(warning.message) == (
        f"The environment variable {variable} is not read by magi-passes.{hint} The variables are: MAGI_PASSES_DISABLE"
    )


def test_variables_of_others_are_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MAGI_PASSES_DISABLE", "MAGI_COMPILE_MODE", "MAGI", "PASSES_DISABLE"):
        monkeypatch.setenv(variable, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PassPipeline([Holds()])
