# SPDX-License-Identifier: Apache-2.0
"""The uuid of a pass counts all that its code reaches: text, other modules, tables, and refuses what has no form."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import socket
import subprocess
import sys
import types
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from magi_passes.errors import PassIdentityError


if TYPE_CHECKING:
    from pathlib import Path

from identity_passes import PASS, globals_of, made_pass


FILENAMES = ["<string>", "<stdin>", "<ipython-input-1-abc>", "/tmp/ipykernel_1/1.py", dataclasses.__file__]


@pytest.mark.parametrize("filename", FILENAMES)
@pytest.mark.parametrize("name", ["made", "__main__", ""])
def test_code_run_from_text_counts(filename: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made", types.ModuleType("made"))
    one, same, other = (made_pass(body=f"return {at}", filename=filename, name=name)().uuid() for at in (1, 1, 2))
    assert one == same != other


def test_a_pass_of_python_c_is_told_by_its_code() -> None:
    def uuid(body: str) -> str:
        program = PASS.format(before="", body=body) + "\nprint(Mine().uuid())"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout

    assert uuid("return 1") != uuid("return 2")


def test_a_pass_in_a_zip_is_told_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at, helper in enumerate(["1", "1", "2"]):
        archive = tmp_path / f"{at}.zip"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("zipped/__init__.py", PASS.format(before="from .helpers import helper", body="helper()"))
            file.writestr("zipped/helpers.py", f"def helper(): return {helper}")
        monkeypatch.syspath_prepend(archive)
        for module in ("zipped", "zipped.helpers"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        found.append(importlib.import_module("zipped").Mine().uuid())
    assert found[0] == found[1] != found[2]


def test_a_method_that_another_library_generated_counts() -> None:
    """attrs and others compile methods from text, under a file name of their own."""
    before = """
        class Settings:
            pass
        space = {{}}
        exec(compile("def limit(self): return {limit}", "<generated Settings>", "exec"), space)
        Settings.limit = space["limit"]
    """
    one, same, other = (made_pass(before.format(limit=limit), "Settings().limit()")().uuid() for limit in (1, 1, 2))
    assert one == same != other


REACHED = {
    "helper": ("def f(): return {}", "f()"),
    "helper of a helper": ("def g(): return {}\ndef f(): return g()", "f()"),
    "default": ("def f(x={}): return x", "f()"),
    "keyword default": ("def f(*, x={}): return x", "f()"),
    "constant": ("LIMIT = {}", "LIMIT"),
    "table": ("TABLE = {{'a': {}}}", "TABLE['a']"),
    "table in a list": ("TABLE = [[1], {{'a': ({},)}}]", "TABLE[1]"),
    "set of functions": ("def f(): return {}\ndef g(): return 3\nTABLE = {{f, g}}", "TABLE"),
    "function in a table": ("def f(): return {}\nTABLE = {{'a': f}}", "TABLE['a']()"),
    "lambda": ("f = lambda: {}", "f()"),
    "partial": ("import functools\ndef g(x): return x\nf = functools.partial(g, {})", "f()"),
    "partial of a function": ("import functools\ndef g(x): return {}\nf = functools.partial(g, 1)", "f()"),
    "decorator": (
        "import functools as t\ndef k(f):\n    @t.wraps(f)\n    def g(): return f() * {}\n    return g\n@k\ndef f(): 3",
        "f()",
    ),
    "decorated function": (
        "def twice(f):\n    def g(): return f() * 2\n    return g\n@twice\ndef f(): return {}",
        "f()",
    ),
    "argument of a decorator": (
        "def times(n):\n    return lambda f: lambda: f() * n\n@times({})\ndef f(): return 3",
        "f()",
    ),
    "cache": ("import functools\n@functools.cache\ndef f(): return {}", "f()"),
    "lru_cache": ("import functools\n@functools.lru_cache(maxsize=3)\ndef f(): return {}", "f()"),
    "singledispatch": (
        "import functools\n@functools.singledispatch\ndef f(x): return 1\n@f.register\ndef _(x: int): return {}",
        "f(1)",
    ),
    "contextmanager": ("import contextlib\n@contextlib.contextmanager\ndef f():\n    yield {}", "f()"),
    "method of a class": ("class C:\n    def f(self): return {}", "C().f()"),
    "method of a base class": ("class B:\n    def f(self): return {}\nclass C(B): pass", "C().f()"),
    "static method": ("class C:\n    @staticmethod\n    def f(): return {}", "C.f()"),
    "class method": ("class C:\n    @classmethod\n    def f(cls): return {}", "C.f()"),
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
    "attribute of a class": ("class C:\n    limit = {}", "C.limit"),
    "nested class": ("class C:\n    class D:\n        limit = {}", "C.D.limit"),
    "enum": ("import enum\nclass E(enum.Enum):\n    A = {}", "E.A"),
    "method of an enum": ("import enum\nclass E(enum.Enum):\n    A = 1\n    def f(self): return {}", "E.A.f()"),
    "named tuple": ("from typing import NamedTuple\nclass N(NamedTuple):\n    x: int = {}", "N()"),
    "object": ("import types\nSETTINGS = types.SimpleNamespace(limit={})", "SETTINGS.limit"),
    "object of a class": ("class C:\n    def __init__(self): self.x = {}\nSETTINGS = C()", "SETTINGS.x"),
    "mutable dataclass": ("@dataclass\nclass C:\n    x: int = {}\nSETTINGS = C()", "SETTINGS"),
    "default factory": (
        "from dataclasses import field\n@dataclass\nclass C:\n    x: int = field(default_factory=lambda: {})",
        "C()",
    ),
    "bound method": ("class C:\n    def __init__(self): self.x = {}\n    def f(self): return self.x\nf = C().f", "f()"),
    "closure": ("def make(n):\n    def f(): return n\n    return f\nf = make({})", "f()"),
    "closure of a list": ("def make(n):\n    def f(): return n\n    return f\nf = make([{}])", "f()"),
    "nested function": ("def f():\n    def g(): return {}\n    return g()", "f()"),
    "comprehension": ("def f(): return [x + {} for x in (1, 2)]", "f()"),
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
    one, same, other = (made_pass(before.format(value), body)().uuid() for value in (11, 11, 12))
    assert one == same != other


def _package(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> Any:
    """The class `Mine` of a package called `split`, loaded again."""
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    for module in [module for module in sys.modules if module.partition(".")[0] == "split"]:
        monkeypatch.delitem(sys.modules, module)
    importlib.invalidate_caches()
    return importlib.import_module("split").Mine


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


@pytest.mark.parametrize("name", IMPORTS)
def test_an_edit_in_another_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, body = IMPORTS[name]
    lazy = "def __getattr__(name):\n    from . import helpers\n    return getattr(helpers, name)"
    found = []
    for at, helper in enumerate(["1", "1", "2"]):
        folder = tmp_path / str(at)
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
        mine = _package(
            folder / "split",
            monkeypatch,
            __init__=PASS.format(before=before, body=body),
            helpers="from .deeper import g\ndef f(): return g()",
            deeper=f"LIMIT = {helper}\ndef g(): return LIMIT",
            lazy=lazy,
        )
        found.append(mine().uuid())
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
    "a socket": ("import socket\nS = socket.socket()", "global 'S' read by Mine.__call__ is a socket"),
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
    held = globals_of(mine).get("S")
    if isinstance(held, socket.socket):
        held.close()
