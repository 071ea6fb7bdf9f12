"""Calls between the tests and the program, which run in two processes of the sandbox: in one
process a program could replace what a test compares with, or read the right value from its caller.

Values cross as copies, in JSON: nothing that the program sends is run. Objects of other classes
stay; the other end has a `Reference`, whose attributes and operators are calls. A list, dict or set
that a call has changed is changed at the caller, too.
"""

import builtins
import copyreg
import importlib
import json
import operator
import socket
from collections import namedtuple
from typing import Any

_COPIED = {
    *("builtins.tuple", "builtins.set", "builtins.frozenset", "builtins.dict", "builtins.bytes"),
    *("builtins.bytearray", "builtins.range", "builtins.slice", "builtins.complex"),
    *("collections.Counter", "collections.deque", "decimal.Decimal", "fractions.Fraction"),
    *("datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta"),
    *("datetime.timezone", "numpy.ndarray"),
}
"""Classes whose objects cross as the arguments that make an equal one."""
_PLAIN = (str, int, float, bytes, list, tuple, set, frozenset, dict)
"""Objects of their subclasses cross as theirs."""
_MUTABLE = (list, dict, set, bytearray)
_HIDDEN = ("_", "f_", "gi_", "cr_", "ag_", "tb_", "co_")
"""Attributes of the tests' objects that lead to their frames and globals."""
_ALONE = (
    *("iter", "next", "len", "bool", "str", "repr", "hash", "abs", "int", "float", "round"),
    *("reversed", "format", "__neg__", "__pos__", "__invert__", "__index__"),
    *("__getitem__", "__setitem__", "__delitem__"),
)
_COMPARING = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_COMPUTING = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_FUNCTIONS = {
    *("call", "getattr", "setattr", "isinstance", "issubclass", "__contains__"),
    *(*_ALONE, *_COMPARING, *(f"__{name}__" for name in _COMPUTING)),
}
"""What an end may ask for, by the names of `builtins` and `operator`."""


class Gone(BaseException):
    """The other end has ended."""


def _operator(name: str, *, shown: str = "all", turned: bool = False) -> Any:
    """Returns a method that asks for a function of this object and of values (first if `turned`).

    `shown`: which objects see values of this end, `all`, those of `Peer.classes`, or `none`. One
    that sees them could say that it is equal to all, or that its difference is 0.
    """

    def ask(self: "Reference", *values: Any, **named: Any) -> Any:
        if shown != "all" and not self._may_see(values[0], shown):
            return NotImplemented
        return self._peer.ask(name, *((*values, self) if turned else (self, *values)), **named)

    return ask


class Reference:
    """An object of the other process."""

    _peer: "Peer"
    _number: int
    _kind: str

    def __init__(self, peer: "Peer", number: int, kind: str) -> None:
        vars(self).update(_peer=peer, _number=number, _kind=kind)

    __getattr__ = _operator("getattr")
    __setattr__ = _operator("setattr")
    __call__ = _operator("call")
    __instancecheck__ = _operator("isinstance", turned=True)
    __subclasscheck__ = _operator("issubclass", turned=True)

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return self.__getattr__("__exit__")(None, None, None)

    def __contains__(self, value: Any) -> bool:
        if self._may_see(value, "classes"):
            return bool(self._peer.ask("__contains__", self, value))
        return value in list(self._peer.ask("iter", self))

    def _may_see(self, value: Any, shown: str) -> bool:
        is_theirs = isinstance(value, Reference) or not self._peer.is_guarded
        return is_theirs or (shown == "classes" and self._kind in self._peer.classes)


for _name in _ALONE:
    setattr(Reference, f"__{_name.strip('_')}__", _operator(_name))
for _name in _COMPARING:
    setattr(Reference, _name, _operator(_name, shown="none"))
for _name in _COMPUTING:
    _asked = f"__{_name}__"
    setattr(Reference, _asked, _operator(_asked, shown="classes"))
    setattr(Reference, f"__r{_name}__", _operator(_asked, shown="classes", turned=True))


class Peer:
    """One end of the calls. The program's lets the other end use its module, `known`; the tests'
    lets only operators of the program's `classes` see its values."""

    def __init__(self, link: socket.socket, known: Any = None, classes: Any = ()) -> None:
        self.classes = classes
        self.raised: BaseException | None = None  # the last that has come from the other end
        self.first = Reference(self, 0, "module")  # of the other end
        self.is_guarded = known is None
        self._stream = link.makefile("rwb")
        self._mine = [known]
        self._numbers = {id(known): 0}
        self._theirs: dict[int, Any] = {0: self.first}
        self._doubles: dict[type, int] = {}  # classes here that stand for some of the other end

    def ask(self, function: str, *values: Any, **named: Any) -> Any:
        """Returns what a function returns in the other process; raises what it raises."""
        self._send("ask", function, list(values), named)
        given = [*values, *named.values()]
        while True:
            kind, *content = self._received()
            if kind == "ask":
                self._answer(*content)
                continue
            value, changed = content
            for old, new in zip(given, changed, strict=False):
                _restore(old, new)
            if kind == "value":
                return value
            if kind == "argument":
                return given[value]
            self.raised = value
            raise value

    def serve(self) -> None:
        while True:
            _, *content = self._received()
            self._answer(*content)

    def _answer(self, function: str, values: list[Any], named: dict[str, Any]) -> None:
        given = [*values, *named.values()]
        kind = "value"
        try:
            value = self._function(function, values)(*values, **named)
        except Gone:
            raise
        except BaseException as error:
            kind, value = "error", error
        for number, each in enumerate(given):
            if each is value and type(value) in _MUTABLE:
                kind, value = "argument", number
        self._send(kind, value, [each if type(each) in _MUTABLE else None for each in given])

    def _function(self, name: str, values: list[Any]) -> Any:
        if name not in _FUNCTIONS:
            raise TypeError(name)
        if self.is_guarded:
            self._check(name, values)
        if name == "call":
            return lambda function, *given, **named: function(*given, **named)
        return getattr(operator if name[:2] == "__" else builtins, name)

    def _check(self, name: str, values: list[Any]) -> None:
        """Raises TypeError for what the program may not do with an object of the tests."""
        given = values[0] if name[:2] != "__" or id(values[0]) in self._numbers else values[-1]
        if id(given) not in self._numbers:
            raise TypeError("it is no object of the tests that the program has been given")
        if name in ("getattr", "setattr") and str(values[1]).startswith(_HIDDEN):
            raise TypeError(f"{values[1]} is hidden")
        if name == "setattr" and isinstance(given, type):
            raise TypeError("a class of the tests cannot be changed")

    def _send(self, *message: Any) -> None:
        try:
            self._stream.write(json.dumps(self._packed(list(message))).encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            raise Gone from error

    def _received(self) -> Any:
        try:
            line = self._stream.readline()
        except OSError as error:
            raise Gone from error
        if not line.endswith(b"\n"):
            raise Gone
        return self._unpacked(json.loads(line))

    def _packed(self, value: Any) -> Any:
        """Returns a value for JSON, where a list begins with the kind of what it stands for."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        plain: Any
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is Reference:
            return ["mine", value._number]
        if kind is list:
            return ["list", *map(self._packed, value)]
        if name in _COPIED:
            return ["copy", name, *map(self._packed, _arguments(value))]
        if isinstance(value, BaseException):
            state = {name: each for name, each in vars(value).items() if name[:2] != "__"}
            return ["error", *map(self._packed, (kind, value.args, state))]
        if isinstance(value, type):
            return self._packed_class(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["call", *map(self._packed, (kind, *value))]
        if kind.__module__ == "numpy" and hasattr(value, "item"):
            return self._packed(value.item())
        for plain in _PLAIN:
            if isinstance(value, plain):
                return self._packed(plain(value))
        return ["yours", self._number(value), kind.__name__]

    def _packed_class(self, value: type) -> Any:
        if value in self._doubles:
            return ["mine", self._doubles[value]]
        if getattr(builtins, value.__name__, None) is value:
            return ["builtin", value.__name__]
        if issubclass(value, BaseException):
            bases = map(self._packed_class, value.__bases__)
            return ["exception", self._number(value), value.__name__, *bases]
        if issubclass(value, tuple) and hasattr(value, "_fields"):
            return ["fields", self._number(value), value.__name__, *value._fields]
        return ["yours", self._number(value), "type"]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)
        return self._numbers[id(value)]

    def _unpacked(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind = value[0]
        values = [self._unpacked(each) for each in value[1:]]
        match kind, values:
            case "mine", [number]:
                return self._mine[number]
            case "yours" | "exception" | "fields", _:
                return self._double(kind, *values)
            case "list", _:
                return values
            case "call", [function, *given]:
                return function(*given)
            case "builtin", [name]:
                found = getattr(builtins, name)
                if isinstance(found, type) and found is not type:
                    return found
            case "error", [error, given, state] if issubclass(error, BaseException):
                made = error(*given)
                vars(made).update(state)
                return made
            case "copy", [name, *given] if name in _COPIED:
                module, name = name.replace("ndarray", "array").split(".")
                return getattr(importlib.import_module(module), name)(*given)
        raise TypeError(f"{kind!r:.80} is not read")

    def _double(self, kind: str, number: int, name: str, *parts: Any) -> Any:
        if number not in self._theirs:
            if kind == "yours":
                self._theirs[number] = Reference(self, number, name)
            else:
                is_error = kind == "exception"
                made: Any = type(name, parts, {}) if is_error else namedtuple(name, parts)
                self._doubles[made] = number
                self._theirs[number] = made
        return self._theirs[number]


def _arguments(value: Any) -> Any:
    if type(value) is dict:
        return (list(map(list, value.items())),)
    if type(value) in _PLAIN or type(value) is bytearray:
        return (list(value),)
    if hasattr(value, "dtype"):
        return value.tolist(), value.dtype.str
    if hasattr(value, "maxlen"):
        return list(value), value.maxlen
    make, arguments, *_ = value.__reduce_ex__(2)
    return arguments[1:] if make is copyreg.__newobj__ else arguments  # type: ignore[attr-defined]


def _restore(old: Any, new: Any) -> None:
    if type(old) is not type(new) or old == new:
        return
    if type(old) in (list, bytearray):
        old[:] = new
    elif type(old) in (dict, set):
        old.clear()
        old.update(new)
