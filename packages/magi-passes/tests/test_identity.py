# SPDX-License-Identifier: Apache-2.0
"""The uuid of a pass follows from its fields and all that its code reaches, in every process, after every change."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import enum
import functools
import importlib
import pickle
import sys
import types
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from made_passes import HOOK, PASS, Holds, globals_of, made_pass
from magi_passes import (
    ConvChooser,
    MagiInductorPass,
    NDTilingWorkaroundPass,
    PassPipeline,
    TemporalConvPass,
    _torch_compat,
    collect_records,
)
from magi_passes._framework.declared import describe, uuid_of
from magi_passes._identity.members import REMEMBERED
from magi_passes.errors import PassDefinitionError, PassIdentityError
from torch.fx import Graph


def test_nothing_but_code_values_and_the_torch_release_count(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_pass("LIMIT = 3", "return LIMIT")()
    first = made.uuid()
    assert first == made.uuid() == made_pass("# a remark\nLIMIT = 3", "return LIMIT  # another")().uuid()
    monkeypatch.setattr(_torch_compat.config, "torch_version", lambda: "2.10.0")
    assert made.uuid() != first


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def _predicate(graph: object) -> bool:
    return True


@dataclass(frozen=True)
class Nested:
    x: int = 1


VALUES: list[object] = [
    *(None, True, 1, 1.0, float("inf"), "1", b"1", (1,), ((1,),), frozenset({1, 2}), Colour.RED, Colour.BLUE),
    *(torch.float32, torch.float16, torch.device("cpu"), torch.channels_last, Nested(), Nested(2), int, Nested),
    *(_predicate, functools.partial(_predicate, 1), functools.partial(_predicate, 2), torch.ops.aten.add.Tensor),
]


def test_every_kind_of_value_is_told_apart() -> None:
    assert len({Holds(value).uuid() for value in VALUES}) == len(VALUES)


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, object(), torch.ones(1)], ids=lambda v: type(v).__name__)
def test_a_value_that_can_change_is_refused(value: object) -> None:
    with pytest.raises(PassIdentityError, match=f"Holds.value is a {type(value).__qualname__}, which cannot be part"):
        PassPipeline([Holds(value)])


def test_a_pass_that_is_not_a_frozen_dataclass_is_refused() -> None:
    class Bare(MagiInductorPass):
        def __call__(self, graph: Graph) -> None:
            pass

    class Forgotten(Holds):
        tiles: int = 2

    for cls in (Bare, Forgotten):
        with pytest.raises(PassDefinitionError, match="is not a frozen dataclass"):
            PassPipeline([cls()])


def _walks(run: Any) -> int:
    """How often *run* walks code; seen from outside, since a patched function is a reason to walk again."""
    count = 0

    def note(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is describe.__code__

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_code_is_walked_once_for_a_class_and_once_for_the_fields_of_each_pass() -> None:
    mine = made_pass()
    made_pass()().uuid()  # walks how passes are run, which is the same for every class
    made: list[Any] = []
    assert _walks(lambda: made.append(PassPipeline([mine() for _ in range(20)]).inductor_options()[HOOK])) == 1 + 20
    (hook,) = made
    assert _walks(lambda: (hook.uuid(), PassPipeline(hook.parts).uuid())) == 0


def test_a_class_is_walked_from_what_it_adds_to_our_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """How passes are run is walked once, and still counts for each; that a uuid was asked for counts for none."""
    first, second = made_pass(), made_pass()
    before = first().uuid()
    assert id(MagiInductorPass.uuid) not in map(id, vars(first)[REMEMBERED].walk.met())
    assert second().uuid() == before
    kinds: list[Any] = [ConvChooser, NDTilingWorkaroundPass]  # the first reaches the second
    for make in kinds:
        make().uuid()
        delattr(make, REMEMBERED)
    first_round, second_round = (_walks(lambda: [make().uuid() for make in kinds]) for _ in range(2))
    assert (first_round, second_round) == (2 * len(kinds), len(kinds))  # of the fields, and first of the classes
    monkeypatch.setattr(MagiInductorPass, "uuid", lambda self: uuid_of(self) + "")
    assert first().uuid() == second().uuid() != before
    monkeypatch.undo()
    assert first().uuid() == second().uuid() == before


def test_what_a_compilation_sets_is_no_reason_to_walk_again() -> None:
    """Torch asks for a uuid many times in each, and one of our own passes reaches the state of all compilations."""
    chooser = ConvChooser()
    chooser.uuid()
    with collect_records():
        assert _walks(chooser.uuid) == 0


FILENAMES = ["<string>", "<stdin>", "<ipython-input-1-abc>", "/tmp/ipykernel_1/1.py", dataclasses.__file__]


@pytest.mark.parametrize("filename", FILENAMES)
@pytest.mark.parametrize("name", ["made", "__main__", ""])
def test_code_run_from_text_counts(filename: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made", types.ModuleType("made"))
    one, same, other = (made_pass(body=f"return {at}", filename=filename, name=name)().uuid() for at in (1, 1, 2))
    assert one == same != other


REACHED = {
    "the pass itself": ("", "return {}"),
    "default of a field": ("", "pass\n    tiles: int = {}"),
    "attribute of a base": ("class Base(MagiInductorPass):\n    scale = {}\nMagiInductorPass = Base", "pass"),
    "what names itself": (
        "def f(n): return g(n) if n else {}\ndef g(n): return f(n - 1)",
        "isinstance(self, Mine) and f(2)",
    ),
    "method that another library compiled": (
        "class C: pass\nexec(compile('def f(self): return {}', '<generated>', 'exec'), globals())\nC.f = f",
        "C().f()",
    ),
    "helper of a helper": ("def g(): return {}\ndef f(): return g()", "f()"),
    "default": ("def f(x={}): return x", "f()"),
    "keyword default": ("def f(*, x={}): return x", "f()"),
    "table in a list": ("TABLE = [[1], {{'a': ({},)}}]", "TABLE[1]"),
    "set of functions": ("def f(): return {}\ndef g(): return 3\nTABLE = {{f, g}}", "TABLE"),
    "partial": ("import functools\ndef g(x): return x\nf = functools.partial(g, {})", "f()"),
    "decorator": (
        "import functools as t\ndef k(f):\n    @t.wraps(f)\n    def g(): return f() * {}\n    return g\n@k\ndef f(): 3",
        "f()",
    ),
    "cache": ("import functools\n@functools.lru_cache(maxsize=3)\ndef f(): return {}", "f()"),
    "singledispatch": (
        "import functools\n@functools.singledispatch\ndef f(x): return 1\n@f.register\ndef _(x: int): return {}",
        "f(1)",
    ),
    "method of a base class": ("class B:\n    def f(self): return {}\nclass C(B): pass", "C().f()"),
    "static method": ("class C:\n    @staticmethod\n    def f(): return {}", "C.f()"),
    "property": ("class C:\n    @property\n    def f(self): return {}", "C().f"),
    "cached property": (
        "import functools\nclass C:\n    @functools.cached_property\n    def f(self): return {}",
        "C().f",
    ),
    "partial method": (
        "import functools\nclass C:\n    def g(self, x): return x\n    f = functools.partialmethod(g, {})",
        "C().f()",
    ),
    "descriptor": ("class D:\n    def __get__(self, *_): return {}\nclass C:\n    f = D()", "C().f"),
    "metaclass": ("class M(type):\n    def f(cls): return {}\nclass C(metaclass=M): pass", "C.f()"),
    "enum": ("import enum\nclass E(enum.Enum):\n    A = {}", "E.A"),
    "method of an enum": ("import enum\nclass E(enum.Enum):\n    A = 1\n    def f(self): return {}", "E.A.f()"),
    "named tuple": ("from typing import NamedTuple\nclass N(NamedTuple):\n    x: int = {}", "N()"),
    "object": ("import types\nSETTINGS = types.SimpleNamespace(limit={})", "SETTINGS.limit"),
    "object of a class": ("class C:\n    def __init__(self): self.x = {}\nSETTINGS = C()", "SETTINGS.x"),
    "default factory": (
        "from dataclasses import field\n@dataclass\nclass C:\n    x: int = field(default_factory=lambda: {})",
        "C()",
    ),
    "bound method": ("class C:\n    def __init__(self): self.x = {}\n    def f(self): return self.x\nf = C().f", "f()"),
    "closure": ("def make(n):\n    def f(): return n\n    return f\nf = make({})", "f()"),
    "nested function": ("def f():\n    def g(): return {}\n    return g()", "f()"),
    "attribute of a function": ("def f(): return f.limit\nf.limit = {}", "f()"),
    "name of a global": ("def f(): return {}", "globals()['f']()"),
    "context variable": ("import contextvars\nMODE = contextvars.ContextVar('mode', default={})", "MODE.get()"),
    "pattern": ("import re\nP = re.compile('a{}')", "P.match('a')"),
    "tensor": ("import torch\nT = torch.tensor({})", "T + 1"),
    "default dict": ("import collections\nT = collections.defaultdict(int, a={})", "T['a']"),
    "mapping proxy": ("import types\nT = types.MappingProxyType({{'a': {}}})", "T['a']"),
    "hash in a set of a function": ("def f(x): return x in {{'a', 'b', {}}}", "f(1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REACHED)
def test_an_edit_of_anything_that_is_reached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made", types.ModuleType("made"))
    before, body = REACHED[name]
    one, same, other = (made_pass(before.format(value), body.format(value))().uuid() for value in (11, 11, 12))
    assert one == same != other


def _load(place: Path, monkeypatch: pytest.MonkeyPatch, name: str, **files: str) -> Any:
    """The module *name*, loaded again from *place*, a folder or a zip archive with *files* in it."""
    if place.suffix == ".zip":
        with zipfile.ZipFile(place, "w") as archive:
            for file, text in files.items():
                archive.writestr(f"{name}/{file}.py", text)
    else:
        (place / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (place / name / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(place)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    importlib.invalidate_caches()
    return importlib.import_module(name)


IMPORTS = {
    "a function": ("from .helpers import f", "f()"),
    "a module": ("from . import helpers", "helpers.f()"),
    "a module by its full name": ("import split.helpers", "split.helpers.f()"),
    "a module by another name": ("import split.helpers as other", "other.f()"),
    "getattr": ("from . import helpers", "getattr(helpers, 'f')()"),
    "in the body": ("", "from .helpers import f; f()"),
    "a module in the body": ("", "from . import helpers; helpers.f()"),
    "another name in the body": ("", "import split.helpers as h; h.f()"),
    "a module that is handed on": ("from . import helpers\ndef run(m): return m.f()", "run(helpers)"),
    "a lazy name": ("from . import lazy", "lazy.f()"),
}


@pytest.mark.parametrize(("name", "place"), [("a function", "{}.zip"), *((name, "{}") for name in IMPORTS)])
def test_an_edit_in_another_module(name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, body = IMPORTS[name]
    files = {
        "__init__": PASS.format(before=before, body=body),
        "helpers": "from .deeper import g\ndef f(): return g()",
        "lazy": "def __getattr__(name):\n    from . import helpers\n    return getattr(helpers, name)",
    }
    found = [
        _load(tmp_path / place.format(at), monkeypatch, "split", deeper=f"L = {limit}\ndef g(): return L", **files)
        .Mine()
        .uuid()
        for at, limit in enumerate((1, 1, 2))
    ]
    assert found[0] == found[1] != found[2]


STATE = {
    "lock": "import threading\nS = threading.Lock()",
    "logger": "import logging\nS = logging.getLogger('state')",
    "weak dictionary": "import weakref\nS = weakref.WeakKeyDictionary()",
    "thread local": "import threading\nS = threading.local()",
    "cache": "import functools\n@functools.cache\ndef S(x): return x",
    "environment": "from os import environ as S",
}


LOGS = {
    "list": ("LOG = []", "LOG.append(1)"),
    "set": ("LOG = set()", "LOG.add(1)"),
    "dict": ("LOG = {}", "LOG.update(a=1)"),
}


READ = [
    "len(LOG); LOG.{0}",
    "LOG.{0}; return LOG",
    "[x for x in LOG]; LOG.{0}",
    "LOG.copy(); LOG.{0}",
    "LOG.{0}; f(LOG)",
]


@pytest.mark.parametrize("name", LOGS)
def test_what_the_code_only_writes_to_is_a_log(name: str) -> None:
    """Its content depends on the graphs that were compiled before, in other processes too, and decides nothing."""
    before, write = LOGS[name]
    mine = made_pass(before, write)
    first = mine().uuid()
    mine()(torch.fx.symbolic_trace(lambda x: x).graph)
    assert mine().uuid() == first
    for read in READ:
        mine = made_pass(before, read.format(write.removeprefix("LOG.")))
        first = mine().uuid()
        exec(write, globals_of(mine))
        assert mine().uuid() != first


@pytest.mark.parametrize("name", STATE)
def test_what_only_exists_while_a_program_runs_is_named_by_its_type(name: str) -> None:
    assert made_pass(STATE[name], "S")().uuid() == made_pass(STATE[name], "S")().uuid()


NO_FORM = {
    "a generator": ("S = (x for x in (1,))", "global 'S' read by Mine.__call__ is a generator"),
    "in a table": ("T = {'a': (x for x in (1,))}\ndef S(): T", r"global 'T' read by S\['a'\] is a generator"),
    "in an object": (
        "class C: pass\nS = C()\nS.x = (x for x in (1,))",
        r"global 'S' read by Mine.__call__.x is a generator",
    ),
    "in a closure": (
        "def make(v):\n    def f(): return v\n    return f\nS = make(x for x in (1,))",
        r"closure variable 'v' of make.<locals>.f is a generator",
    ),
    "a large tensor": ("import torch\nS = torch.zeros(100000)", "global 'S' read by Mine.__call__ is a Tensor"),
}


@pytest.mark.parametrize("name", NO_FORM)
def test_a_value_without_a_stable_form_is_an_error_that_names_it(name: str) -> None:
    before, sentence = NO_FORM[name]
    mine = made_pass(before, "S")
    with pytest.raises(PassIdentityError, match=f"^{sentence}, which cannot be part of a pass's uuid. "):
        mine().uuid()


CHANGES = {
    "replaced method": "Mine.__call__ = lambda self, graph: 12",
    "replaced helper": "def f(): return 12",
    "replaced code": "f.__code__ = (lambda: 12).__code__",
    "item of a table": "TABLE['deep']['a'] = 12",
    "added global": "later = lambda: 12",
    "attribute of an object": "SETTINGS.limit = 12",
    "default": "f.__defaults__ = (12,)",
    "context variable": "MODE.set(12)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_question(change: str) -> None:
    """Of the pass that was asked already, of a copy, and of a new one."""
    mine = made_pass(
        """
        import types, contextvars
        TABLE = {"deep": {"a": 11}}
        SETTINGS = types.SimpleNamespace(limit=11)
        MODE = contextvars.ContextVar("mode", default=11)
        def f(x=11): return x
        """,
        "f(); TABLE['deep']; SETTINGS.limit; MODE.get(); later()",
    )
    asked, before = mine(), mine().uuid()
    assert asked.uuid() == before

    def check() -> None:
        exec(CHANGES[change], globals_of(mine))
        assert before != asked.uuid() == mine().uuid() == copy.copy(asked).uuid()

    contextvars.copy_context().run(check)


COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_uuid_of_its_fields(name: str) -> None:
    fresh, asked = Holds((1, "a")), Holds((1, "a"))
    before = asked.uuid()
    assert before == COPIES[name](fresh).uuid() == COPIES[name](asked).uuid()
    other = COPIES[name](asked)
    object.__setattr__(other, "value", True)
    assert other.uuid() == Holds(True).uuid() != before == asked.uuid()
    assert before.encode() not in pickle.dumps(asked), "a process with other code may read it"


def test_copying_changes_no_uuid_of_the_class() -> None:
    """Python notes in a class that is copied which slots it has."""
    mine = made_pass()
    copy.deepcopy(mine())
    assert "__slotnames__" in vars(mine)
    assert mine().uuid() == made_pass()().uuid()


def test_a_compilation_leaves_the_uuids_of_shipped_passes_as_they_were(inductor: Any) -> None:
    """Records, registered operators and patched functions of torch are state."""
    kinds: list[Any] = [ConvChooser, NDTilingWorkaroundPass, TemporalConvPass]
    before = [make().uuid() for make in kinds]
    options = PassPipeline([make() for make in kinds]).inductor_options()
    torch.compile(torch.nn.Conv2d(3, 4, 3), options=options)(torch.ones(1, 3, 8, 8))
    for make in kinds:
        delattr(make, REMEMBERED)
    assert [make().uuid() for make in kinds] == before


FOREIGN = """
import re, threading, socket
LOCK, SOCKET, SEEN = threading.Lock(), socket.socket(), [object()]
SOCKET.close()
FLAG = False
_VERSION = re.compile("[0-9]+")
def helper(): return 1
def version(x):
    with LOCK:
        SEEN.append(x)
    return _VERSION.match(x), FLAG, SOCKET, helper()
"""


@pytest.mark.parametrize("place", ["site-packages", "a target of pip"])
def test_an_installed_distribution(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state does not matter; a patched file, a changed flag and a replaced helper do."""
    folder, uses = tmp_path / place, ("import foreign", "foreign.version('1')")
    record = folder / "other_name-1.dist-info"
    record.mkdir(parents=True)
    (record / "RECORD").write_text("../../bin/f,,\nforeign/__init__.py,,\n")
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\nVersion: 1\n")
    foreign = _load(folder, monkeypatch, "foreign", __init__=FOREIGN)
    mine = made_pass(*uses)
    first = mine().uuid()
    foreign.version("1")
    assert mine().uuid() == first
    for name, value in (("FLAG", True), ("helper", lambda: 2)):
        with monkeypatch.context() as patch:
            patch.setattr(foreign, name, value)
            assert mine().uuid() != first
        assert mine().uuid() == first
    _load(folder, monkeypatch, "foreign", __init__=FOREIGN + "\ndef nobody(): pass\n")
    assert made_pass(*uses)().uuid() != first


def test_a_pass_of_an_installed_distribution_is_read_as_its_author_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PASS.format(before="TABLE = {'a': object}\ndef f(): return 1", body="TABLE['a']; f()")
    found = [
        _load(tmp_path / "site-packages", monkeypatch, "installed", __init__=changed).Mine().uuid()
        for changed in (text, text + "\n# a remark", text.replace("return 1", "return 2"))
    ]
    assert found[0] == found[1] != found[2]


def test_a_module_that_is_called_like_one_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at, value in enumerate((1, 1, 2)):
        _load(tmp_path / str(at), monkeypatch, "nntplib", __init__=f"def f(): return {value}")
        found.append(made_pass("from nntplib import f", "f()")().uuid())
    assert found[0] == found[1] != found[2]
