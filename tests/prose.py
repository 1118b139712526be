"""Splits a page, a card or a help text into sentences, to measure their length."""

import re


def paragraphs(text: str) -> list[str]:
    """Returns the paragraphs and list items of a page, without headings, code, tables and targets of links."""
    text = re.sub(r"(?ms)^```.*?^```|<!--.*?-->", "", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |#|\|))", text)
    kept = [block for block in blocks if block.strip() and not re.match(r"\s*[#|]", block)]
    return [
        re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", " ".join(block.split()))) for block in kept
    ]


def sentences(text: str) -> list[list[str]]:
    """Returns the words of each sentence; a colon or semicolon does not end one."""
    parts = [part for block in paragraphs(text) for part in re.split(r"(?<=[.!?])[)\"*]*\s+", block)]
    words = [[word for word in part.split() if re.search(r"\w", word)] for part in parts]
    return [part for part in words if len(part) > 2]
