"""The cause of a generator's end: the line of its exception in vLLM's log.

A log ends with the exception of its last process, which often only points at another process ("See
root cause above"). The cause is the last exception that does not point at another.
"""

import re

PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:\w+ \S+ \S+ \[[^\]]*\] )?")
"""vLLM's prefix of each line of a process, and of each logged line."""
EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception)(?:: |$)")
ARGUMENT = re.compile(r"^\S+: error: ")
"""The start of argparse's error."""
POINTS_AT_ANOTHER = re.compile(r"see (?:the )?(?:root cause|stack ?trace)", re.IGNORECASE)
DETAIL = re.compile(r" \[type=\w+, input_value=.*")
"""pydantic's addition: the wrong value with everything that contains it."""
MAX_CHARACTERS = 800
"""Characters."""
NO_DEVICE = "Failed to infer device type"
"""vLLM's words where the installed build finds no device of its kind; all they advise is more lines
of its log."""
REMEDY = "vLLM's build and this machine do not fit, or its driver does not answer. Type: lrl doctor"


def cause(log: str) -> str:
    """Returns type and message of the exception that ended the process which wrote `log`; empty if
    there is none.

    Where vLLM's own words do not help, a line with the remedy follows.
    """
    lines = [PREFIX.sub("", line) for line in log.splitlines()]
    for number, line in reversed(list(enumerate(lines))):
        if (EXCEPTION.match(line) or ARGUMENT.match(line)) and not POINTS_AT_ANOTHER.search(line):
            message = [line]
            for more in lines[number + 1 :]:  # pydantic indents the lines after the first
                if not more.startswith("  ") or more.lstrip().startswith(
                    ("For further information", "File ")
                ):
                    break
                message.append(DETAIL.sub("", more).strip())
            found = " ".join(message)[:MAX_CHARACTERS]
            return f"{found}\n{REMEDY}" if NO_DEVICE in found else found
    return ""
