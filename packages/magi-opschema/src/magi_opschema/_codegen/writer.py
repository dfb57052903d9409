# SPDX-License-Identifier: Apache-2.0
"""The lines of one generated function, and the objects that its reserved names stand for."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from magi_opschema._model.tree import Leaf, Node


Reject = Callable[[Node | None], Callable[[object], None]]
"""A function from a node to the function that generated code calls with a refused value; None stands for `-> None`."""

INDENT = "    "
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class Writer:
    """Lines of one function, and the objects that its reserved names stand for."""

    prefix: str
    reject: Reject
    title: str = ""
    """What errors about the op begin with."""
    location: str = ""
    """Where the op is defined."""
    is_traced: bool = False
    """True for code that Dynamo traces, which must make instances by their constructors."""
    is_description: bool = False
    """True for code that describes the op instead of running it, and uses a stand-in for an object."""
    lines: list[str] = field(default_factory=list)
    globals: dict[str, object] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    are_locals_reserved: bool = False
    """True if what is written must not touch a parameter of the function, whatever its name."""

    def line(self, text: str) -> None:
        """Add one line."""
        self.lines.append(text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Add the line *head*, and indent by one level what the `with` statement adds."""
        self.line(head)
        start = len(self.lines)
        yield
        self.lines[start:] = [INDENT + line for line in self.lines[start:]]

    def of_output(self, reject: Reject) -> Writer:
        """A writer of the same function, for the lines that take the body's output apart.

        *reject* makes what a refused output calls. The parameters keep their values, because an output may be named
        like one of them.
        """
        return replace(self, reject=reject, are_locals_reserved=True)

    def bind(self, name: str, value: object) -> str:
        """A reserved name for *value*; if another value has the name, a number is appended."""
        candidate, count = f"{self.prefix}{name}", 1
        while candidate in self.locals or self.globals.setdefault(candidate, value) is not value:
            count += 1
            candidate = f"{self.prefix}{name}_{count}"
        return candidate

    def temporary(self, name: str) -> str:
        """A reserved name for a local variable; the same one for each call with *name*."""
        candidate, count = f"{self.prefix}{name}", 1
        while candidate in self.globals:
            count += 1
            candidate = f"{self.prefix}{name}_{count}"
        self.locals.add(candidate)
        return candidate

    def builtin(self, name: str) -> str:
        """A reserved name for a builtin, because a parameter of the user may shadow its own name."""
        return self.bind(name, getattr(builtins, name))

    def expression(self, leaf: Leaf, text: str, value: str) -> str:
        """*text*, an expression of the codec of *leaf*, for *value*, with its constants bound."""
        names = {
            name: self.builtin(name)
            if getattr(builtins, name, None) is constant
            else self.bind(f"{leaf.name}_{name}", constant)
            for name, constant in leaf.codec.constants.items()
            if f"{{{name}}}" in text
        }
        if "{reject}" in text:
            names["reject"] = self.bind(f"reject_{leaf.name}", self.reject(leaf))
        if "{title}" in text:
            names["title"] = self.bind("title", self.title)
        return text.format(value=value, **names)

    def local(self, name: str, value: str) -> str:
        """A local name for *value*, an expression, unless that is a name already."""
        if value == name or IDENTIFIER.match(value):
            return value
        if self.are_locals_reserved:
            name = self.temporary(name)
        self.line(f"{name} = {value}")
        return name
