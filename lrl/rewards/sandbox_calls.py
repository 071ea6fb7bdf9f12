"""Calls between the tests and the program, which run in two processes of the sandbox.

Were they one process, a program could replace what a test compares with, or read the right value
from its caller. Values cross as copies, in JSON: nothing that the program sends is run. Objects of
other classes stay where they are and are named by a number; the other end has a `Reference`, whose
attributes and operators are calls. A list, dict or set that a call has changed is changed at the
caller, too.

This file is a part of the runner's text: it imports nothing of lrl.
"""

import builtins
import importlib
import json
import operator
import re
import socket
from typing import Any

_BY_ARGUMENTS = {
    f"{module}.{name}": (module, name)
    for module, names in {
        "builtins": "set frozenset bytearray range slice complex",
        "collections": "Counter deque",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "datetime": "date datetime time timedelta timezone",
    }.items()
    for name in names.split()
}
"""Classes whose objects cross as the arguments that make an equal one."""
_PLAIN = (str, int, float, bytes, list, tuple, set, frozenset, dict)
_MUTABLE = (list, dict, set, bytearray)
_HIDDEN = ("_", "f_", "gi_", "cr_", "ag_", "tb_", "co_")
"""Attributes of the tests' objects that lead to their frames and globals."""
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_BINARY = re.findall(r"\w+", "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor")
_UNARY = re.findall(r"\w+", "iter next len bool str repr hash abs int float round reversed format")
_OTHERS = ["neg", "pos", "invert", "index", "getitem", "setitem", "delitem"]
_FUNCTIONS = {
    *("call", "getattr", "setattr", "isinstance", "issubclass", *_UNARY, *_COMPARISONS),
    *(f"__{name}__" for name in (*_OTHERS, *_BINARY, "contains")),
}
"""What an end may ask for."""


class Gone(BaseException):
    """The other end has ended."""


class Reference:
    """An object of the other process."""

    def __init__(self, peer: "Peer", number: int, kind: str) -> None:
        vars(self).update(_peer=peer, _number=number, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, *values, **named)

    def __instancecheck__(self, value: Any) -> bool:
        return bool(self._peer.ask("isinstance", value, self))

    def __subclasscheck__(self, value: Any) -> bool:
        return bool(self._peer.ask("issubclass", value, self))

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return self.__getattr__("__exit__")(None, None, None)

    def __contains__(self, value: Any) -> bool:
        if self._trusts(value):
            return bool(self._peer.ask("__contains__", self, value))
        return value in list(self._peer.ask("iter", self))

    def _trusts(self, value: Any) -> bool:
        """Whether the class of this object may see a value of this end in an operator.

        Else an object could say that it is equal to all, or that its difference is 0.
        """
        peer = self._peer
        return isinstance(value, Reference) or not peer.is_guarded or self._kind in peer.classes


def _forwarding(function: str) -> Any:
    return lambda self, *values: self._peer.ask(function, self, *values)


def _comparing(function: str) -> Any:
    def compare(self: Reference, value: Any) -> Any:
        if isinstance(value, Reference) or not self._peer.is_guarded:
            return self._peer.ask(function, self, value)
        return NotImplemented

    return compare


def _computing(function: str, reflected: bool) -> Any:
    def compute(self: Reference, value: Any) -> Any:
        if not self._trusts(value):
            return NotImplemented
        pair = (value, self) if reflected else (self, value)
        return self._peer.ask(function, *pair)

    return compute


def _add_operators() -> None:
    for name in _UNARY:
        setattr(Reference, f"__{name}__", _forwarding(name))
    for name in _OTHERS:
        setattr(Reference, f"__{name}__", _forwarding(f"__{name}__"))
    for name in _COMPARISONS:
        setattr(Reference, name, _comparing(name))
    for name in _BINARY:
        setattr(Reference, f"__{name}__", _computing(f"__{name}__", reflected=False))
        setattr(Reference, f"__r{name}__", _computing(f"__{name}__", reflected=True))


_add_operators()


def _call(function: Any, *values: Any, **named: Any) -> Any:
    return function(*values, **named)


class Peer:
    """One end of the calls.

    Args:
        link: The socket to the other end.
        known: The first object that the other end may use (the program's module), or None.
        classes: Names of the program's classes whose operators may see values of the tests.
        is_guarded: Whether the other end is not trusted.
    """

    def __init__(
        self,
        link: socket.socket,
        known: Any = None,
        classes: tuple[str, ...] = (),
        is_guarded: bool = False,
    ) -> None:
        self.classes = classes
        self.raised: BaseException | None = None
        """The last exception that has come from the other end."""
        self.first = Reference(self, 0, "module")
        """The first object of the other end."""
        self.is_guarded = is_guarded
        self._stream = link.makefile("rwb")
        self._mine = [known]
        self._numbers = {id(known): 0}
        self._theirs: dict[int, Any] = {0: self.first}
        self._classes: dict[type, int] = {}  # of the other end, which have a double here

    def ask(self, function: str, *values: Any, **named: Any) -> Any:
        """Returns what a function returns in the other process; raises what it raises."""
        self._send(["ask", function, self._packed(list(values)), self._packed(named)])
        while True:
            kind, *content = self._receive()
            if kind == "ask":
                self._answer(*content)
                continue
            value, changed = map(self._unpacked, content)
            list(map(_restore, (*values, *named.values()), changed))
            if kind == "value":
                return value
            if kind == "argument":
                return (*values, *named.values())[value]
            self.raised = value if isinstance(value, BaseException) else RuntimeError(value)
            raise self.raised

    def serve(self) -> None:
        """Answers the other end until it has ended."""
        while True:
            try:
                _, *content = self._receive()
            except Gone:
                return
            self._answer(*content)

    def _answer(self, function: str, packed: Any, packed_names: Any) -> None:
        values: list[Any] = []
        try:
            values = self._unpacked(packed)
            named = self._unpacked(packed_names)
            value = self._function(function, values)(*values, **named)
            values += named.values()
            same = [number for number, each in enumerate(values) if each is value]
            changed = self._packed([each if type(each) in _MUTABLE else None for each in values])
            if same and type(value) in _MUTABLE:
                reply = ["argument", same[0], changed]
            else:
                reply = ["value", self._packed(value), changed]
        except Gone:
            raise
        except BaseException as error:
            reply = ["error", self._packed_error(error), self._packed([])]
        self._send(reply)

    def _function(self, name: str, values: list[Any]) -> Any:
        if name not in _FUNCTIONS:
            raise TypeError(name)
        if self.is_guarded:
            self._check(name, values)
        if name == "call":
            return _call
        return getattr(operator if name.startswith("__") else builtins, name)

    def _check(self, name: str, values: list[Any]) -> None:
        """Raises TypeError unless the program may do this with an object of the tests."""
        given = values[0] if name[:2] != "__" or id(values[0]) in self._numbers else values[-1]
        if id(given) not in self._numbers:
            raise TypeError("it is no object of the tests that the program has been given")
        if name in ("getattr", "setattr") and str(values[1]).startswith(_HIDDEN):
            raise TypeError(f"{values[1]} is hidden")
        if name == "setattr" and isinstance(given, type):
            raise TypeError("a class of the tests cannot be changed")

    def _send(self, message: Any) -> None:
        try:
            self._stream.write(json.dumps(message).encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            raise Gone from error

    def _receive(self) -> Any:
        try:
            line = self._stream.readline()
        except OSError as error:
            raise Gone from error
        if not line.endswith(b"\n"):
            raise Gone
        return json.loads(line)

    def _packed(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is Reference:
            return ["mine", value._number]
        if kind in (list, tuple):
            return [kind.__name__, *map(self._packed, value)]
        if kind is bytes:
            return ["bytes", value.decode("latin-1")]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _BY_ARGUMENTS:
            return ["made", name, *map(self._packed, _arguments(value))]
        if name == "numpy.ndarray" and not value.dtype.hasobject:
            shape = [int(each) for each in value.shape]
            return ["array", value.dtype.str, shape, value.tobytes().decode("latin-1")]
        if isinstance(value, BaseException):
            return self._packed_error(value)
        if isinstance(value, type):
            return self._packed_class(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named", self._packed_class(kind), *map(self._packed, value)]
        if kind is dict or name in ("collections.OrderedDict", "collections.defaultdict"):
            return ["dict", *([self._packed(key), self._packed(value[key])] for key in value)]
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return self._packed(value.item())
        plain: Any
        for plain in _PLAIN:
            if isinstance(value, plain):
                return self._packed(plain(value))
        return ["yours", self._number(value), kind.__name__]

    def _packed_class(self, value: type) -> Any:
        if value in self._classes:
            return ["mine", self._classes[value]]
        if getattr(builtins, value.__name__, None) is value:
            return ["builtin", value.__name__]
        if issubclass(value, BaseException):
            bases = [self._packed_class(each) for each in value.__bases__]
            return ["exception", self._number(value), value.__name__, *bases]
        if issubclass(value, tuple) and hasattr(value, "_fields"):
            return ["fields", self._number(value), value.__name__, *value._fields]
        return ["yours", self._number(value), "type"]

    def _packed_error(self, error: BaseException) -> Any:
        try:
            state = {name: each for name, each in vars(error).items() if name[:2] != "__"}
            return [
                "error",
                self._packed_class(type(error)),
                self._packed(error.args),
                self._packed(state),
            ]
        except BaseException:
            return f"{type(error).__name__}: it cannot be sent"

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)
        return self._numbers[id(value)]

    def _unpacked(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *parts = value
        if kind == "mine":
            return self._mine[parts[0]]
        if kind == "bytes":
            return parts[0].encode("latin-1")
        if kind == "builtin":
            return _builtin_class(parts[0])
        if kind == "dict":
            return {self._unpacked(key): self._unpacked(each) for key, each in parts}
        if kind == "array":
            numpy = importlib.import_module("numpy")
            flat = numpy.frombuffer(parts[2].encode("latin-1"), dtype=parts[0])
            return flat.reshape(parts[1]).copy()
        if kind in ("exception", "fields", "yours"):
            return self._double(kind, *parts)
        values = [self._unpacked(each) for each in parts]
        if kind == "list":
            return values
        if kind == "tuple":
            return tuple(values)
        if kind == "error":
            return _error(*values)
        if kind == "named":
            return values[0](*values[1:])
        module, name = _BY_ARGUMENTS[values[0]]
        return getattr(importlib.import_module(module), name)(*values[1:])

    def _double(self, kind: str, number: int, name: str, *parts: Any) -> Any:
        """Returns what stands for an object of the other end."""
        if number in self._theirs:
            return self._theirs[number]
        if kind == "yours":
            self._theirs[number] = Reference(self, number, name)
            return self._theirs[number]
        if kind == "fields":
            made: type = importlib.import_module("collections").namedtuple(name, parts)
        else:
            made = type(name, tuple(map(self._unpacked, parts)), {})
        self._classes[made] = number
        self._theirs[number] = made
        return made


def _arguments(value: Any) -> Any:
    if hasattr(value, "maxlen"):
        return (list(value), value.maxlen)
    for name in ("__getinitargs__", "__getnewargs__"):
        if hasattr(value, name):
            return getattr(value, name)()
    return value.__reduce__()[1]


def _builtin_class(name: str) -> type:
    found = getattr(builtins, name)
    if not isinstance(found, type) or found is type:
        raise TypeError(f"{name} is no class")
    return found


def _error(kind: type, values: Any, state: dict[str, Any]) -> BaseException:
    if not issubclass(kind, BaseException):
        raise TypeError("no exception")
    error = kind(*values)
    vars(error).update(state)
    return error


def _restore(old: Any, new: Any) -> None:
    """Changes a value as the other end has changed its copy."""
    if type(old) is not type(new) or old == new:
        return
    if type(old) in (list, bytearray):
        old[:] = new
    elif type(old) in (dict, set):
        old.clear()
        old.update(new)
