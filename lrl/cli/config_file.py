"""Checks of the YAML that a command names, before jsonargparse reads it.

jsonargparse's errors name neither the file nor the line, and of a key that stands twice it silently
takes the second.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

CONFIG = ("--config", "-c")
SUFFIXES = (".yaml", ".yml")
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of such a file, which editors of other systems write."""
EXAMPLE = "a config maps settings to values, as in\n  data:\n    max_lag: 1"
REMEDIES = (
    (r"'\\t'", "Indent with spaces: YAML allows no tab there."),
    (
        r"mapping values are not allowed",
        "Indent the line like its neighbours, or quote a text that has a colon.",
    ),
    (r"expected <block end>, but found '(<block|\?|-)", "Indent the line like its neighbours."),
    (r"quoted scalar", "Close the quote."),
    (r"flow (sequence|mapping|node)", "Close the bracket, or write the comma that is missing."),
    (r"another document", "Write one document to a file, and give --config for each."),
)
"""Pattern of the parser's message, and the remedy."""
STANDARD_TAG = "tag:yaml.org,2002:"


def check_files(words: Sequence[str]) -> None:
    """Checks all values of `--config`, files or YAML itself, and all YAML files of other settings.

    Args:
        words: A command, with paths in the place of recipes' names.

    Raises:
        ValueError: One is no readable YAML, or a config is none of settings. Names the file and the
            line, and shows the line.
    """
    for before, word in pairwise(["", *words]):
        option, _, value = word.partition("=") if word.startswith("-") else (before, "", word)
        path = Path(value)
        is_config = option in CONFIG
        is_file = "\n" not in value and path.is_file()
        if not value or not (is_config or (is_file and path.suffix in SUFFIXES)):
            continue
        text, fault = read(path) if is_file or is_config and path.is_dir() else (value, "")
        if fault := fault or fault_of(text) or (unlike_settings(text) if is_config else ""):
            raise ValueError(f"{option} {value}{fault}".lstrip())


def read(path: Path) -> tuple[str, str]:
    """Returns the text of a YAML file, and the fault of the file as words after its name."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return "", f" cannot be read ({error.strerror}): give a YAML file."
    if content.startswith(UTF_16):
        return "", " is UTF-16 text. Save the file as UTF-8."
    try:
        return content.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return (
            "",
            f", line {line}: the byte 0x{content[error.start]:02x} is no UTF-8. Save the file as "
            "UTF-8.",
        )


def fault_of(text: str) -> str:
    """Returns the fault of YAML, as words after its name; empty if there is none."""
    try:
        node = yaml.compose(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = chr(error.character)
        return f", line {line}: the character {character!r} cannot stand in YAML. Remove it."
    except yaml.MarkedYAMLError as error:
        return _syntax(error, text)
    for mark, problem in _faults(node):
        return _at(mark, problem, text)
    return ""


def unlike_settings(text: str) -> str:
    """Returns why YAML is no config, as words after its name; empty if it is one."""
    node = yaml.compose(text)
    if isinstance(node, yaml.MappingNode):
        return ""
    if node is None:
        return f" is empty: {EXAMPLE}"
    found = "a list" if isinstance(node, yaml.SequenceNode) else f"the text {node.value!r:.60}"
    return f" holds {found}: {EXAMPLE}"


def _syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark
    context = error.context_mark
    problem = str(error.problem).removeprefix("but ")
    if context is not None and (mark is None or not text[mark.index :].strip("\0 \n")):
        mark = context  # the text has ended; what never ended begins there
    if error.context:
        elsewhere = context is not None and context.line != mark.line
        begin = f" that begins in line {context.line + 1}" if elsewhere else ""
        problem = f"{problem} ({error.context}{begin})"
    remedies = (advice for pattern, advice in REMEDIES if re.search(pattern, problem))
    return _at(mark, f"{problem}. {next(remedies, 'Correct the line.')}", text)


def _at(mark: yaml.Mark, problem: str, text: str) -> str:
    """Returns the problem with its position, and the line; for the end of the text, its last line."""
    lines = text.rstrip().splitlines() or [""]
    last = len(lines) - 1
    line, column = (mark.line, mark.column) if mark.line <= last else (last, len(lines[last]))
    number = str(line + 1)
    shown = lines[line].replace("\t", "→")
    pointer = " " * (len(number) + column)
    return f", line {number}, column {column + 1}: {problem}\n  {number} | {shown}\n  {pointer}   ^"


def _faults(root: yaml.Node | None) -> Iterator[tuple[yaml.Mark, str]]:
    """Yields each tag that nobody reads and each key that stands twice, with its position."""
    for node in _nodes(root, set()):
        if node.tag.startswith("!"):
            yield (
                node.start_mark,
                f"the tag {node.tag} has no meaning. Quote the text, or remove the tag.",
            )
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in lines:
                first = lines[key.value] + 1
                yield (
                    key.start_mark,
                    f"{key.value} stands there a second time (first in line {first}). Join the "
                    "two.",
                )
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                lines[key.value] = key.start_mark.line


def _nodes(node: yaml.Node | None, seen: set[int]) -> Iterator[yaml.Node]:
    if node is None or id(node) in seen:  # an alias may lead into its own anchor
        return
    seen.add(id(node))
    yield node
    if isinstance(node, yaml.CollectionNode):
        for item in node.value:
            for inner in item if isinstance(item, tuple) else (item,):
                yield from _nodes(inner, seen)
