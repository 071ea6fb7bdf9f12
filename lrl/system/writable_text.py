"""Text for files, trackers and tokenizers, which take UTF-8."""


def writable(text: str) -> str:
    """Returns a text that UTF-8 can encode: half of a surrogate pair, as JSON and the messages of
    errors may have, becomes its escape, such as `\\ud83d`."""
    return text.encode(errors="backslashreplace").decode()
