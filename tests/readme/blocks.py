"""What the README holds: its fenced blocks, and the links and headings outside of them."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Block", "blocks", "headings", "links"]

_FENCE = re.compile(r"^(`{3,}|~{3,})\s*(.*?)\s*$")
#: What else GitHub shows as a block.
_OTHER = re.compile(r"^(?:[\s>*+-]+(?:`{3}|~{3})|(?: {4}|\t)\s*\S|.*<pre\b)", re.IGNORECASE)


class Block(NamedTuple):
    """A fenced block: its mark, the libraries behind the mark (without one of them it is skipped), its text, and the line where that begins."""

    language: str
    needs: tuple[str, ...]
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.language or 'unmarked'}-{self.line}"


def blocks(markdown: str) -> list[Block]:
    """All fenced blocks in order; one that does not end is an error, and so is one that is written otherwise, as nothing would run it."""
    return [block for block in _split(markdown) if isinstance(block, Block)]


def headings(markdown: str) -> list[str]:
    """The anchors of all headings, as GitHub makes them: small letters, no punctuation, - for a space, and a number behind those that repeat."""
    found: list[str] = []
    for line in _prose(markdown).splitlines():
        if heading := re.match(r"#{1,6}\s+(.*?)\s*#*\s*$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            before = sum(slug == re.sub(r"-\d+$", "", other) or slug == other for other in found)
            found.append(f"{slug}-{before}" if before else slug)
    return found


def links(markdown: str) -> list[str]:
    """The targets of all links and pictures outside of blocks and of code within a line."""
    prose = re.sub(r"`[^`\n]*`", "", _prose(markdown))
    return re.findall(r"\]\(([^)\s]+)[^)]*\)", prose) + re.findall(r"<(?:img|source|a)\b[^>]*?\b(?:src|srcset|href)=\"([^\"\s]+)", prose)


def _prose(markdown: str) -> str:
    return "\n".join(line for line in _split(markdown) if isinstance(line, str))


def _split(markdown: str) -> list[str | Block]:
    """The lines outside of blocks, and the blocks."""
    found: list[str | Block] = []
    lines = iter(enumerate(markdown.splitlines(), 1))
    for number, line in lines:
        if not (fence := _FENCE.match(line)):
            assert not _OTHER.match(line), f"line {number} is a block without a fence at its left margin, which no test would run: {line[:60]}"
            found.append(line)
            continue
        inside: list[str] = []
        for _, text in lines:
            if text.startswith(fence[1]) and not text.strip("`~ "):
                break
            inside.append(text)
        else:
            raise AssertionError(f"the block that begins in line {number} does not end")
        language, *needs = fence[2].split() or [""]
        found.append(Block(language, tuple(needs), "".join(f"{text}\n" for text in inside), number + 1))
    return found
