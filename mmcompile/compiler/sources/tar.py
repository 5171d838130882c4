"""Hides how a tar archive is laid out: its headers are read one after the other, and what lies between them is skipped.

Old, POSIX (ustar, pax) and GNU headers with long names are understood.  Only regular files are told; links, devices, sparse files and names that lead
out of the archive are counted by reason, as nothing that they stand for lies in the archive in one piece.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from mmcompile.compiler.sources.members import ArchiveFile, Member, plain_name
from mmcompile.compiler.sources.names import show
from mmcompile.errors import SourceError

__all__ = ["BLOCK", "COMPRESSED", "TarListing"]

#: Headers, and the ends of members, lie at multiples of this.
BLOCK = 512
#: First bytes of what compresses a whole archive -> what undoes it.
COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4",
}

#: Bytes read at a time where members are small, and where they are skipped: one request, and one header with what a small member holds.
_NEAR, _FAR = 1 << 18, 1 << 12
#: Members up to this size are read over, not skipped: a disk does not wait less for two requests.
_SKIPPED_FROM = 1 << 16
#: A header that holds a long name, or pax records, is no longer than this.
_MOST_RECORDS = 1 << 20
#: Behind the end mark so much is looked at: archives are padded to 10 KiB, or to what a tape wants.
_PADDING = 1 << 16
_ZEROS = bytes(BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_REASONS = {b"1": "link", b"2": "link", b"3": "device", b"4": "device", b"6": "fifo", b"S": "sparse"}


class _Header(NamedTuple):
    """What comes before a member's own header: its name and size, where they are too long for that, and why it cannot be read."""

    name: bytes | None = None
    size: int | None = None
    reason: str = ""


_PLAIN = _Header()


class TarListing:
    """The regular files of an archive, in its order: iterate once, then see what was left out.

    Raises SourceError, naming the archive and the byte: it is compressed, damaged, cut short, or no tar.
    """

    def __init__(self, file: ArchiveFile) -> None:
        self._file = file
        self._buffer, self._start = b"", 0
        self.left_out: Counter[str] = Counter()
        #: Names of the folders that have headers of their own.
        self.folders: set[bytes] = set()
        self.warnings: list[str] = []

    def peek(self, at: int, size: int) -> bytes:
        """The bytes [at, at + size) of the archive, as far as there are any; those near the header that was read last cost nothing."""
        start = at - self._start
        if start < 0 or start + size > len(self._buffer):
            self._buffer, self._start, start = self._file.read(at, max(size, _FAR)), at, 0
        return self._buffer[start : start + size]

    def __iter__(self) -> Iterator[Member]:
        at, ahead = 0, _NEAR
        before = shared = _PLAIN
        while True:
            offset = at - self._start
            if offset + BLOCK > len(self._buffer) or offset < 0:
                self._buffer, self._start, offset = self._file.read(at, ahead), at, 0
            block = self._buffer[offset : offset + BLOCK]
            if len(block) < BLOCK:
                self._end(at, len(block))
                return
            if block == _ZEROS:
                self._behind(at)
                return
            self._check(block, at)
            kind, size = block[156:157], self._size(block, at)
            data = at + BLOCK
            if kind in (b"x", b"g", b"L", b"K"):
                if size > _MOST_RECORDS:
                    raise self._wrong(at, f"a header with {size:,} bytes of names")
                at = self._next(data, size, at, b"a header")
                records = self.peek(data, size)
                if kind == b"x":
                    before = self._pax(records, data, before)
                elif kind == b"g":
                    shared = self._pax(records, data, shared)
                elif kind == b"L":
                    before = before._replace(name=records.split(b"\0", 1)[0])
                continue
            name, reason = before.name or _name_of(block), ""
            if before is not _PLAIN or shared is not _PLAIN:
                size = before.size if before.size is not None else shared.size if shared.size is not None else size
                reason = before.reason or shared.reason
                before = _PLAIN
            if kind in b"123456":  # what has no content, whatever its size says
                size = 0
            at = self._next(data, size, at, name)
            ahead = _NEAR if size < _SKIPPED_FROM else _FAR
            if kind == b"5" or (name[-1:] == b"/" and kind in _REGULAR):
                if folder := plain_name(name):
                    self.folders.add(folder)
            elif kind not in _REGULAR or reason:
                self.left_out[reason or _REASONS.get(kind, "neither a file nor a folder")] += 1
            elif plain := plain_name(name):
                yield Member(plain, data, size, zlib.crc32(block))
            else:
                self.left_out["name that leads out of the archive"] += 1

    def _next(self, data: int, size: int, at: int, name: bytes) -> int:
        """Where the header behind a member stands."""
        stop = data + size
        if stop > self._file.size:
            what = show(name.decode("utf-8", "surrogateescape"))
            raise self._wrong(at, f"{what} has {size:,} bytes there, and the archive ends at byte {self._file.size:,}: it was cut short", size=size)
        return stop + -size % BLOCK

    def _check(self, block: bytes, at: int) -> None:
        """Raises SourceError where a block is no header: the sum of its bytes stands in it."""
        try:
            noted = int(block[148:156].strip(b" \0") or b"0", 8)
        except ValueError:
            noted = -1
        # The low half of an Adler-32 is 1 + the sum of the bytes, modulo 65521; the sum's own 8 bytes count as spaces.
        found = (zlib.adler32(block) & 0xFFFF) - sum(block[148:156]) + 255
        if (found - noted) % 65521 and _signed_sum(block) != noted:
            raise self._no_header(block, at)

    def _no_header(self, block: bytes, at: int) -> SourceError:
        if at == 0:
            undo = next((tool for magic, tool in COMPRESSED.items() if block.startswith(magic)), None)
            if undo is not None:
                return SourceError(
                    f"{self._file.shown}: a compressed archive can only be read from its beginning, not in place: {undo} it first",
                    path=self._file.path,
                )
            return SourceError(f"{self._file.shown}: no tar archive (its first {BLOCK} bytes are no header)", path=self._file.path, offset=0)
        return self._wrong(at, "expected the header of a member: the archive is damaged, or was cut and joined")

    def _size(self, block: bytes, at: int) -> int:
        field = block[124:136]
        if field[0] & 0x80:
            size = int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
            if field[0] == 0x80 and size < 1 << 62:
                return size
            raise self._wrong(at, "a header with a size that no member has")
        try:
            return int(field.strip(b" \0") or b"0", 8)
        except ValueError:
            raise self._wrong(at, "a header with a size that is no number") from None

    def _pax(self, records: bytes, at: int, header: _Header) -> _Header:
        """The header with what pax records ("LENGTH KEY=VALUE") say of it."""
        start = 0
        while start < len(records) and records[start]:
            length = records[start:].split(b" ", 1)[0]
            stop = start + int(length) if length.isdigit() and len(length) < 8 else 0
            key, sign, value = records[start + len(length) + 1 : stop - 1].partition(b"=")
            if not sign or stop > len(records) or records[stop - 1 : stop] != b"\n":
                raise self._wrong(at + start, "pax records that are damaged")
            if key == b"path":
                header = header._replace(name=value)
            elif key == b"size":
                if not value.isdigit() or len(value) > 18:
                    raise self._wrong(at + start, "a size in pax records that is no number")
                header = header._replace(size=int(value))
            elif key.startswith(b"GNU.sparse."):
                header = header._replace(reason="sparse")
            start = stop
        return header

    def _end(self, at: int, found: int) -> None:
        """The file ends where a header, or the end mark, should stand."""
        if found or at > self._file.size:
            raise self._wrong(at, f"expected a header, and the archive ends at byte {self._file.size:,}: it was cut short")
        if at == 0:
            raise SourceError(f"{self._file.shown}: the archive is empty (0 bytes)", path=self._file.path)
        self.warnings.append(f"{self._file.shown} ends at byte {at:,} without an end mark: it may have been cut there, between two members")

    def _behind(self, at: int) -> None:
        """Say so where more than padding stands behind the end mark."""
        padding = self._file.read(at, _PADDING)
        if padding.strip(b"\0"):
            self.warnings.append(
                f"{self._file.shown} goes on behind its end mark at byte {at:,}, and what stands there is not read: were archives joined? "
                "(GNU tar joins them with --concatenate)"
            )

    def _wrong(self, at: int, what: str, **details: int) -> SourceError:
        return SourceError(f"{self._file.shown}, byte {at:,}: {what}", path=self._file.path, offset=at, **details)


def _name_of(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and block[345]:
        return block[345:500].split(b"\0", 1)[0] + b"/" + name
    return name


def _signed_sum(block: bytes) -> int:
    """The sum of a header's bytes as some old programs made it: of signed ones."""
    rest = block[:148] + b" " * 8 + block[156:]
    return sum(byte - 256 if byte > 127 else byte for byte in rest)
