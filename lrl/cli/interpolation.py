"""`${...}` on the command line, and the errors about it."""

import re
from collections.abc import Iterable

ABSOLUTE = re.compile(r"\$\{([a-zA-Z][\w.\[\]]*)\}")

PATH_IN_ERROR = r"(?:resolved to|Interpolation key) '(\w[^']+)'|trying to access (\S+):"


def from_the_root(words: Iterable[str], verb: str) -> list[str]:
    """Returns the words with interpolations that begin at the root of the parsed config.

    jsonargparse reads the value of a class's setting apart from the rest, and would take a path in
    it for one within the class. It leaves a path with spaces around it as it is.
    """
    return [ABSOLUTE.sub(rf"${{ {verb}.\1 }}", word) for word in words]


def explain(error: Exception) -> str:
    """Returns the text for OmegaConf's error about a `${...}`."""
    message = str(error)
    key = re.search(r"full_key: (?:fit\.|validate\.)?(\S+)", message)
    where = f"{key[1]}: " if key else ""
    if broken := re.search(r"at input '(.+?)'", message):
        example = "${data.init_args.max_lag}"
        return f"{where}{broken[1]!r} is no interpolation; one looks like {example}."
    match = re.search(PATH_IN_ERROR, message)
    if match is None:
        return message
    path = re.sub(r"^(fit|validate)\.", "", match[1] or match[2])
    known = re.sub(r"^(model|data|trainer\.strategy)\.", r"\1.init_args.", path)
    remedy = "Write the whole path, as --print_config shows it."
    from lrl.cli import fit_help  # 260 lines that only an error needs

    if path in fit_help.all_settings() and known != path:
        remedy = f"Write the whole path: ${{{known}}}."
    return f"{where}${{{path}}} leads to no setting. {remedy}"
