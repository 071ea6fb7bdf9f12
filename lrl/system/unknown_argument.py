"""What a script is told of an argument that a class of lrl does not have.

The command has these answers for its settings (`lrl.cli.setting_errors`). In a script Python names
the argument alone.
"""

import inspect
import re
import sys

from lrl.system import aliases
from lrl.system.import_by_name import did_you_mean

_UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def answer(error: TypeError) -> str:
    """Returns the sentences about the argument: what it is here, or the nearest one; empty if the
    error is about none, or there is neither."""
    match = _UNKNOWN.match(str(error))
    kind = _class_of_lrl(match[1]) if match else None
    if match is None or kind is None:
        return ""
    name = match[2]
    known = inspect.signature(kind).parameters
    meant = aliases.setting(name) or did_you_mean(name, known).strip()
    return f"lrl: {match[1]} has no argument {name!r}. {meant}" if meant else ""


def _class_of_lrl(name: str) -> type | None:
    """Returns the class of lrl with a name that Python's error has; None if there is none."""
    for module_name, module in list(sys.modules.items()):
        found = vars(module).get(name) if module_name.partition(".")[0] == "lrl" else None
        if isinstance(found, type) and found.__module__ == module_name:
            return found
    return None
