# SPDX-License-Identifier: Apache-2.0
"""What is given to or declared by a pass, and the sentence for what does not fit, or is misspelt.

Then passes that are interrupted, raise, or spoil the graph: what arrives, what it names, and what is left behind.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from made_passes import HOOK, Holds, Manager, Spy, product, train
from magi_passes import (
    ConvChooser,
    ConvLayoutPass,
    ConvPaddingPass,
    MagiInductorPass,
    MagiPassesError,
    NDTilingWorkaroundPass,
    PassContext,
    PassFailedError,
    PassPipeline,
    Reason,
    TemporalConvPass,
    adapt,
    collect_records,
)
from magi_passes.errors import (
    BrokenGraphError,
    PassArgumentError,
    PassArgumentTypeError,
    PassDefinitionError,
    UnknownConfigKeyError,
    UnknownPassNameError,
    UnknownVariableWarning,
)
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx


TYPE, VALUE = PassArgumentTypeError, PassArgumentError
FIELDS: list[tuple[Callable[..., object], dict[str, Any], type[MagiPassesError], str]] = [
    (ConvChooser, {"tune": 1}, TYPE, r"tune must be bool, not 1 of type int\. Write bool\(\.\.\.\) around it\.$"),
    (ConvChooser, {"tune": np.True_}, TYPE, r"tune must be bool, not .*True.* of type bool_?\. Write bool"),
    (ConvChooser, {"cache_dir": Path("x")}, TYPE, r"cache_dir must be str or None, .* Write str\(\.\.\.\) around it"),
    (ConvChooser, {"layout": ConvLayoutPass}, TYPE, "layout must be bool, .* Give an instance, not the class"),
    (ConvChooser, {"max_tiles": True}, TYPE, "max_tiles must be int, not True of type bool"),
    (ConvChooser, {"max_tiles": torch.tensor(3)}, TYPE, r"max_tiles must be int, .* of type Tensor\. Write int"),
    (ConvChooser, {"min_share": np.float64(0.5)}, TYPE, r"min_share must be float, .* of type float64\. Write float"),
    (ConvChooser, {"min_share": "0.5"}, TYPE, r"min_share must be float, not '0.5' of type str\.$"),
    (NDTilingWorkaroundPass, {"max_torch": 2.11}, TYPE, "max_torch must be str or None, not 2.11 of type float"),
    (Reason, {"applies": torch.tensor(True), "text": "x"}, TYPE, r"applies must be bool, .* Write bool"),
    (ConvChooser, {"max_tiles": 4}, VALUE, "max_tiles=4: a Triton grid has up to three dimensions; use 2 or 3$"),
    (ConvChooser, {"min_share": 1.5}, VALUE, "min_share=1.5: it is a share of the .*; use a number from 0 to 1$"),
    (ConvChooser, {"min_share": float("nan")}, VALUE, "min_share=nan: it is a share"),
    (ConvChooser, {"tune_seconds": 0}, VALUE, "tune_seconds=0: it is a time; use a number of seconds, or None for no"),
    (ConvChooser, {"tune_seconds": float("nan")}, VALUE, "tune_seconds=nan: it is a time"),
    (ConvLayoutPass, {"nodes_per_conv": 0}, VALUE, "nodes_per_conv=0: it is a number of .*; use 1 or more$"),
    (TemporalConvPass, {"max_taps": 0}, VALUE, "max_taps=0: a kernel has at least one tap"),
    (TemporalConvPass, {"min_skipped": -0.1}, VALUE, "min_skipped=-0.1: it is a share"),
]


@pytest.mark.parametrize(("make", "arguments", "error", "sentence"), FIELDS)
def test_a_field_that_cannot_be_used_is_an_error_that_teaches(
    make: Any, arguments: dict[str, Any], error: type[MagiPassesError], sentence: str
) -> None:
    with pytest.raises(error, match=f"^{make.__name__}: {sentence}") as caught:
        make(**arguments)
    assert isinstance(caught.value, TypeError if error is TYPE else ValueError)


def test_what_fits_is_taken() -> None:
    assert ConvChooser(min_share=1).min_share == 1
    assert TemporalConvPass(min_skipped=2).min_skipped == 2
    assert NDTilingWorkaroundPass(max_torch=None, max_tiles=2, nodes_per_conv=1).max_torch is None


@pytest.mark.parametrize(
    ("version", "max_torch", "is_older"),
    [
        ("2.13.0+cpu", "2.13.1", True),
        ("2.13.1", "2.13.1", False),
        ("2.13.10", "2.13.9", False),
        ("2.13.1", "2.13.1.post1", True),
        ("2.13.0a0+git0fc8", "2.13", False),
        ("2.13.0a0+git0fc8", "2.13.1", True),
        ("2.13.0.dev20260101+cu130", "2.13.0", False),
        ("2.9.0a0+145a3a7bda.nv25.10", "2.10", True),
        ("2.13.0-vendor1", "2.13", False),
    ],
)
def test_releases_are_compared_to_the_patch(version: str, max_torch: str, is_older: bool) -> None:
    graph = make_fx(torch.conv2d, tracing_mode="symbolic")(torch.ones(1, 3, 8, 9), torch.ones(4, 3, 3, 3)).graph
    verdict = NDTilingWorkaroundPass(max_torch=max_torch).is_applicable(graph, PassContext(torch_version=version))
    assert verdict.applies is is_older, verdict.text


@pytest.mark.parametrize("release", ["new", "", "2", "2.x", "2.13.", "2.13.1.2.3", "2.11abc", ">=2.11", "2,11", "2.-1"])
def test_what_is_not_a_release(release: str) -> None:
    sentence = f"^NDTilingWorkaroundPass: max_torch='{release}' is not a torch release; write it as '2.11' or '2.13.1'"
    with pytest.raises(PassArgumentError, match=sentence):
        NDTilingWorkaroundPass(max_torch=release)


def _does_nothing(self: object, graph: object, *context: object) -> None:
    pass


def _pass(**members: Any) -> Any:
    namespace = {"__call__": _does_nothing, **members}
    return make_dataclass("Bad", [], bases=(MagiInductorPass,), namespace=namespace, frozen=True)


def _with_keyword() -> None:
    class Bad(MagiInductorPass, hok=HOOK):
        pass


def _piped(passes: Any) -> Callable[[], object]:
    return lambda: PassPipeline(passes)


def _options(base: Any) -> Callable[[], object]:
    return lambda: PassPipeline([ConvPaddingPass()]).inductor_options(base)


KEYS = "inductor_config_keys_potentially_mutated_by_this_pass"
KEY = KEYS.replace("keys", "key")
CALL = r"^Bad\.__call_ is almost '__call__', which Bad does not define"
ALMOST = (
    r"^Bad\.is_aplicable is almost 'is_applicable', which Bad does not define\. Rename it, or give what is not meant "
    r"as 'is_applicable' another name\. \(\S+\)$"
)
MADE = PassDefinitionError
# What a user writes, and what the error says.
ERRORS: dict[str, tuple[Callable[[], object], type[MagiPassesError], str]] = {
    "no passes": (_piped(None), TYPE, r"^PassPipeline: passes is None, of type NoneType\. Give a list of passes\.$"),
    "a name of a pass": (_piped("ConvChooser"), TYPE, "^PassPipeline: passes is 'ConvChooser', of type str"),
    "a table of passes": (_piped({"a": ConvPaddingPass()}), TYPE, "^PassPipeline: .* of type dict"),
    "one pass": (
        _piped(ConvPaddingPass()),
        TYPE,
        r"^PassPipeline: .*Put it into a list: PassPipeline\(\[\.\.\.\]\)\.$",
    ),
    "one class": (_piped(ConvPaddingPass), TYPE, "^PassPipeline: .*Put it into a list"),
    "a class in the list": (
        _piped([ConvPaddingPass]),
        MADE,
        r"^PassPipeline: item 0 is .* Pass an instance, not the class",
    ),
    "None in the list": (_piped([ConvPaddingPass(), None]), MADE, "^PassPipeline: item 1 is None"),
    "a list in the list": (_piped([[ConvPaddingPass()]]), MADE, r"^PassPipeline: item 0 is \[ConvPaddingPass\(\)\]"),
    "a function": (_piped([print]), MADE, r"^PassPipeline: item 0 is .*Subclass MagiInductorPass, or .*adapt\(\)"),
    "options as a list": (
        _options([("triton.max_tiles", 2)]),
        TYPE,
        r"^inductor_options: base must be a dict of Inductor's options by name, or None; got \[",
    ),
    "options without names": (_options({1: 2}), TYPE, "^inductor_options: base must be a dict"),
    "a class for a hook": (
        _options({HOOK: ConvPaddingPass}),
        TYPE,
        f"^inductor_options: base has .*ConvPaddingPass'> at {HOOK}, which is a class; pass an instance",
    ),
    "a number for a hook": (
        _options({HOOK: [print, 3]}),
        TYPE,
        f"^inductor_options: base has 3 at {HOOK}, which is nothing that can be called",
    ),
    "a hook with dashes": (_options({HOOK.replace("_", "-"): "pass"}), TYPE, f"base has 'pass' at {HOOK}"),
    "an option": (
        _options({"triton.max-tile": 2}),
        VALUE,
        r"^inductor_options: base has 'triton\.max_tile', which is not an option .*Did you mean 'triton\.max_tiles'\?",
    ),
    "a method": (lambda: _pass(is_aplicable=_does_nothing), MADE, ALMOST),
    "a method with two mistakes": (lambda: _pass(is_aplicabel=_does_nothing), MADE, "'is_applicable'"),
    "a method in another case": (lambda: _pass(isApplicable=_does_nothing), MADE, "'is_applicable'"),
    "a static method": (lambda: _pass(is_aplicable=staticmethod(_does_nothing)), MADE, "'is_applicable'"),
    "a call": (lambda: type("Bad", (Holds,), {"__cal__": _does_nothing}), MADE, r"^Bad\.__cal__ is almost '__call__'"),
    "a call with one underscore": (lambda: type("Bad", (Holds,), {"_Bad__call_": _does_nothing}), MADE, CALL),
    "a call that is not a function": (
        lambda: _pass(__call__=functools.partialmethod(print)),
        MADE,
        r"^Bad.__call__ is a partialmethod; define it with def",
    ),
    "a uuid": (lambda: _pass(uuids=lambda self: "1"), MADE, r"^Bad\.uuids is almost 'uuid'"),
    "the attribute of the hook": (lambda: _pass(hok=HOOK), MADE, r"^Bad\.hok is almost 'hook'"),
    "the attribute of the keys": (lambda: _pass(**{KEY: ("size_asserts",)}), MADE, rf"^Bad\.{KEY} is almost '{KEYS}'"),
    "a class keyword": (_with_keyword, MADE, r"Bad: 'hok' is not a keyword .* of the class\. Did you mean 'hook'\?"),
    "a hook": (
        lambda: _pass(hook="post_grad_custom_pas"),
        MADE,
        r"^Bad\.hook is 'post_grad_custom_pas'; Inductor has pre_grad_custom.*Did you mean 'post_grad_custom_p\w+'\?",
    ),
    "an early hook for configuration": (
        lambda: _pass(hook="joint_custom_pre_pass", **{KEYS: ("size_asserts",)}),
        MADE,
        r"declares configuration keys but runs at joint_custom_pre_pass, long before",
    ),
    "an answer": (
        lambda: _pass(is_applicable=lambda self, graph, context: "perhaps")()(make_fx(torch.sin)(torch.ones(3)).graph),
        MADE,
        r"Bad.is_applicable returned 'perhaps'; return a bool, or Reason",
    ),
    "keys as a string": (
        lambda: _pass(**{KEYS: "triton.max_tiles"}),
        MADE,
        r"must be a tuple of strings, such as \('triton.max_tiles',\); got 'triton.max_tiles'",
    ),
    "a key that is declared": (
        lambda: PassPipeline([_pass(**{KEYS: ("triton.max_tile",)})()]),
        UnknownConfigKeyError,
        r"^Bad declares the Inductor key 'triton.max_tile', which torch .* Did you mean 'triton.max_tiles'",
    ),
    "a key like no other": (
        lambda: PassPipeline([_pass(**{KEYS: ("zzz",)})()]),
        UnknownConfigKeyError,
        r"'zzz', which torch \S+ does not have\.$",
    ),
    "a key that is read": (
        lambda: PassContext().config["layout_optimisation"],
        UnknownConfigKeyError,
        r"^Inductor's configuration has no key 'layout_optimisation' in torch \S+ Did you mean 'layout_optimization'\?",
    ),
    "a field": (
        lambda: ConvChooser(tuen=True),  # type: ignore[call-arg]
        TYPE,
        r"^ConvChooser has no field 'tuen'\. Did you mean 'tune'\? Its fields are tune, cache_dir, .*tune_seconds\.$",
    ),
    "a field that is replaced": (lambda: replace(Holds(), valu=1), TYPE, r"no field 'valu'\. Did you mean 'value'\?"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_used_is_an_error_that_teaches(name: str) -> None:
    write, error, sentence = ERRORS[name]
    with pytest.raises(error, match=sentence):
        write()


def test_any_iterable_of_passes_will_do() -> None:
    assert len(PassPipeline(one for one in (ConvPaddingPass(),))) == 1
    assert PassPipeline(PassPipeline((ConvPaddingPass(),))) == PassPipeline([ConvPaddingPass()])


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
    PassPipeline([Holds()])  # warnings are errors


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        # Passes of other tests are loaded too, so the names are close.
        ("ConvLayout", r"names 'ConvLayout', which is not a pass\. Did you mean 'ConvLayoutPass'\?"),
        ("ConvChooser,TemporalConv", r"names 'TemporalConv', which is not a pass\. Did you mean 'TemporalConvPass'\?"),
        ("convchooser", "names 'convchooser', .*Did you mean 'ConvChooser'"),
        ("ALL", "names 'ALL', which is not a pass"),
        ("1", r"names '1', which is not a pass\. Give the names of classes, .* or 'all'\. Loaded are .*Conv"),
        ("ConvChooser;ConvLayoutPass", "names 'ConvChooser;ConvLayoutPass'"),
    ],
)
def test_the_environment_names_passes_that_exist(monkeypatch: pytest.MonkeyPatch, value: str, sentence: str) -> None:
    monkeypatch.setenv("MAGI_PASSES_DISABLE", value)
    with pytest.raises(UnknownPassNameError, match=f"^MAGI_PASSES_DISABLE {sentence}"):
        PassPipeline([ConvPaddingPass()])
    graph = make_fx(torch.sin)(torch.ones(3)).graph
    with pytest.raises(UnknownPassNameError):
        ConvPaddingPass()(graph)


@pytest.mark.parametrize("value", ["", " ", ",", "all", " ConvChooser , ConvPaddingPass ", "all,ConvChooser"])
def test_names_may_be_surrounded_by_spaces(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MAGI_PASSES_DISABLE", value)
    assert len(PassPipeline([ConvPaddingPass()])) == 1


aten = torch.ops.aten
OPTIONS: dict[str, Callable[[MagiInductorPass], dict[str, Any]]] = {
    "pipeline": lambda one: PassPipeline([one]).inductor_options(),
    "manager": lambda one: {HOOK: Manager(one)},
    "itself": lambda one: {HOOK: one},
}


def _train(options: dict[str, Any]) -> None:
    train(torch.compile(product, options=options))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("in_the_gate", "backward"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("route", OPTIONS)
def test_an_interrupt_arrives_as_itself(
    inductor: Any, route: str, error: type[BaseException], in_the_gate: bool, backward: bool
) -> None:
    kinds = ("backward",) if backward else ("forward",)
    options = OPTIONS[route](Spy(kinds, raises=error, in_the_gate=in_the_gate))
    with collect_records() as records, pytest.raises(error, match="now"):
        _train(options)
    if not backward or route != "manager":
        assert records[-1].reason == f"raised {error.__name__}: now"


@pytest.mark.parametrize("route", OPTIONS)
def test_an_error_names_the_pass(inductor: Any, route: str) -> None:
    with pytest.raises(Exception, match=r"Spy failed on \d+_forward: KeyError: 'now") as caught:
        _train(OPTIONS[route](Spy(raises=KeyError)))
    assert "PassFailedError" in str(caught.value) or isinstance(caught.value, PassFailedError)
    # What torch raises has no cause, so the line of the pass is in the traceback itself.
    assert "raise self.raises" in str(caught.traceback[-1].statement)


def test_an_error_of_a_pass_that_is_called_keeps_its_cause() -> None:
    graph = make_fx(lambda x: x + 1)(torch.ones(3)).graph
    with (
        PassPipeline([]).scope(),
        pytest.raises(PassFailedError, match="^Spy failed on graph: Zero.*: now$") as caught,
    ):
        Spy(("graph", ""), raises=ZeroDivisionError)(graph)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def _product(graph: Graph) -> Any:
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    return node


def _erase_output(graph: Graph) -> None:
    graph.erase_node(graph.output_node())


def _two_outputs(graph: Graph) -> None:
    graph.output(graph.output_node().args[0])


def _erased_operand(graph: Graph) -> None:
    node = _product(graph)
    user = next(iter(node.users))
    node.users.clear()
    graph.erase_node(node)
    assert node in user.all_input_nodes


def _other_graph(graph: Graph) -> None:
    stranger = type(graph)().placeholder("stranger")
    node = _product(graph)
    node.args = (stranger, stranger)


def _circle(graph: Graph) -> None:
    first = _product(graph)
    with graph.inserting_after(first):
        second = graph.call_function(aten.sin.default, (first,))
    second.meta.update(first.meta)
    first.args = (second, second)


def _reads(path: str) -> Callable[[Graph], None]:
    """What makes a graph read the attribute *path* of its module."""

    def spoil(graph: Graph) -> None:
        node = _product(graph)
        with graph.inserting_before(node):
            constant = graph.create_node("get_attr", path)
        node.args = (constant, constant)

    return spoil


SPOILED: dict[str, tuple[Callable[[Graph], None], str]] = {
    "no output": (_erase_output, "it has 0 output nodes instead of one"),
    "two outputs": (_two_outputs, "it has 2 output nodes instead of one"),
    "an erased operand": (_erased_operand, r"\w+ reads mm, which was erased"),
    "a node of another graph": (_other_graph, "mm reads stranger, which is a node of another graph"),
    "a circle": (_circle, r"(mm|sin) depends on its own result"),
    "an attribute that is not there": (_reads("no_such_constant"), "reads the attribute 'no_such_constant'"),
    "an attribute of an attribute": (
        _reads("forward.__self__.weight"),
        "reads the attribute 'forward.__self__.weight'",
    ),
}


@dataclass(frozen=True)
class Spoils(MagiInductorPass):
    how: str
    hook = HOOK

    def __call__(self, graph: Graph) -> None:
        SPOILED[self.how][0](graph)


@pytest.mark.parametrize("how", SPOILED)
def test_a_broken_graph_names_the_pass(how: str) -> None:
    gm = make_fx(lambda x: (x @ x).sin())(torch.ones(3, 3))
    with pytest.raises(BrokenGraphError, match=f"^Spoils left graph broken: .*{SPOILED[how][1]}.* whole before this"):
        Spoils(how)(gm.graph)


def test_the_pass_before_is_not_mistaken_for_this_one() -> None:
    gm = make_fx(lambda x: (x @ x).sin())(torch.ones(3, 3))
    _erase_output(gm.graph)
    TemporalConvPass(always=True)(gm.graph)
    Holds()(gm.graph)


def _unsorted(graph: Graph) -> None:
    """Put a new node after the node that reads it, which Inductor sorts after its hooks."""
    (node,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    with graph.inserting_after(node):
        new = graph.call_function(aten.neg.default, node.args)
    new.meta.update(node.meta)
    node.args = (new,)


def test_nodes_in_another_order_are_no_flaw(inductor: Any) -> None:
    x = torch.rand(3, 3)
    with torch.no_grad():
        compiled = torch.compile(lambda x: x.sin(), options=PassPipeline([adapt(_unsorted)]).inductor_options())
        torch.testing.assert_close(compiled(x), (-x).sin())


def writes_what_was_decomposed(graph: Graph) -> None:
    """Inductor has no lowering for a silu after the graph was decomposed."""
    for node in graph.find_nodes(op="call_function", target=aten.sin.default):
        node.target = aten.silu.default


@pytest.mark.parametrize("route", ["pipeline", "itself"])
def test_an_error_of_inductor_says_which_passes_ran(inductor: Any, route: str) -> None:
    options = OPTIONS[route](adapt(writes_what_was_decomposed))
    with pytest.raises(Exception, match="silu") as caught:
        torch.compile(lambda x: x.sin() + 1, options=options)(torch.ones(3))

    (note,) = caught.value.__notes__
    assert note.startswith("Passes had changed what was compiled: writes_what_was_decomposed ran on ")
