"""Answers in replies: what stands in \\boxed{...}, the last number, what stands between tags."""

from __future__ import annotations

import re

_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")  # an escaped brace is a character, not a bracket
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-\u2212])?"  # a minus between two values subtracts
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)


def boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} whose braces balance, None without one."""
    opened: list[tuple[int, bool]] = []
    start, found = -1, None
    for match in _BRACES.finditer(text):
        if match[0] == "}":
            begin, is_box = opened.pop() if opened else (0, False)
            if is_box and begin > start:
                start, found = begin, text[begin : match.start()].strip()
        elif match[0].endswith("{") and match[0] != "\\{":
            opened.append((match.end(), match[0] != "{"))
    return found


def last_number(text: str) -> str | None:
    """The last number in plain form ("1,288." gives "1288"), None without one."""
    found = None
    for match in _NUMBER.finditer(text):
        found = match[0]
    return None if found is None else found.replace(",", "").replace("\u2212", "-")


def tag(text: str, name: str) -> str | None:
    """Content of the last `<name>...</name>`, None without one."""
    start_tag, end_tag = f"<{name}>", f"</{name}>"
    stop = text.rfind(end_tag)
    start = text.rfind(start_tag, 0, max(stop, 0))
    return None if start < 0 else text[start + len(start_tag) : stop].strip()
