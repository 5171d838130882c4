"""Hides how a zip archive is laid out: what is in it stands in a directory at its end, which alone is read to list it.

Stored and deflated members are read, zip64 or not; what cannot be (encrypted, or compressed in another way) is an error that names it.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
import struct
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mmcompile.compiler.formats import sniff
from mmcompile.compiler.sources.members import ArchiveFile, Blob, FolderRules, Place, TreeMembers, member_stats, plain_name, refuse_twice
from mmcompile.compiler.sources.names import NO_EXTENSION, Choice, show
from mmcompile.compiler.sources.walk import HEAD_BYTES
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text
from mmcompile.text import counted

__all__ = ["list_zip", "read_member"]

#: Record at the end: mark, this disk, that of the directory, entries here, entries, bytes and offset of the directory, bytes of a comment.
_END = struct.Struct("<4s4H2LH")
_END_MARK = b"PK\5\6"
#: Where that of zip64 lies: mark, disk, offset, disks; and itself: mark, its size, two versions, and as above in 8 bytes.
_LOCATOR, _LOCATOR_MARK = struct.Struct("<4sLQL"), b"PK\6\7"
_END64, _END64_MARK = struct.Struct("<4sQ2H2L4Q"), b"PK\6\6"
#: An entry of the directory: mark, version and system that made it, version needed, flags, method, time, date, CRC-32, stored bytes, bytes, lengths
#: of name, extra field and comment, disk, attributes inside and outside, offset of the member.
_ENTRY = struct.Struct("<4s2B5H3L5H2L")
_ENTRY_MARK = b"PK\1\2"
#: Before a member: mark, version, flags, method, time, date, CRC-32, stored bytes, bytes, lengths of name and extra field.
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_MARK = b"PK\3\4"
#: A comment is no longer than this.
_MOST_COMMENT = 1 << 16
#: Bytes of the directory that are in memory at a time; an entry is no longer than the second.
_PART, _MOST_ENTRY = 1 << 22, 46 + 3 * 65535
_STORED, _DEFLATED = 0, 8
_METHODS = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "XZ", 97: "WavPack", 98: "PPMd", 99: "AES encryption"}
#: Systems that write file modes of UNIX.
_UNIX = (3, 19)
#: Members that an error names.
_SHOWN = 3


class _Entry(NamedTuple):
    """A member as the directory has it."""

    name: bytes
    flags: int
    method: int
    check: int
    stored: int
    size: int
    mode: int
    at: int


def list_zip(file: ArchiveFile, number: int, prefix: bytes, choice: Choice) -> TreeMembers:
    """List archive `number`, whose keys begin with `prefix` ("" or a path that ends in "/").

    Raises SourceError, naming archive and member: it is no whole zip, two members have one name, or an image in it cannot be read.
    """
    keys, columns = Blob(), tuple(array("q") for _ in range(4))
    rules, left_out = FolderRules(choice), Counter[str]()
    folders: set[bytes] = set()
    unreadable: list[str] = []
    for entry in _Directory(file):
        why = ""
        name = plain_name(entry.name.rstrip(b"/"))
        slash = name.rfind(b"/") + 1
        base = name[slash:]
        text, hidden = rules.of(prefix + name[: slash - 1] if slash else prefix[:-1])
        if not name:
            why = "name that leads out of the archive"
        elif entry.name[-1:] == b"/" or stat_bits.S_ISDIR(entry.mode):
            folders.add(prefix + name)
            continue
        elif stat_bits.S_ISLNK(entry.mode):
            why = "link"
        elif hidden or choice.is_hidden(base):
            why = hidden or "hidden"
        else:
            why = choice.why_not(base, text)
        unread = "encrypted" if entry.flags & 0x2041 else "" if entry.method in (_STORED, _DEFLATED) else _method(entry.method)
        if why == NO_EXTENSION and choice.sniffs and not unread:
            why = "" if sniff(_head(file, entry)) else "no extension, no image"
        if why:
            left_out[why] += 1
        elif unread:
            unreadable.append(f"{show(as_text(name))} ({unread})" if len(unreadable) < _SHOWN else "")
        else:
            keys.add(prefix + name)
            for column, value in zip(columns, (entry.at, entry.check, entry.size, entry.stored), strict=True):
                column.append(value)
    if unreadable:
        count = len(unreadable)
        raise SourceError(
            f"{file.shown}: {counted(count, 'images')} in it cannot be read: {', '.join(unreadable[:_SHOWN])}"
            f"{', …' if count > _SHOWN else ''}; pack the archive anew, stored or deflated and not encrypted",
            path=file.path,
        )
    at, checks, sizes, stored = (np.frombuffer(column, np.int64) for column in columns)
    places = Place.packed(number, checks, at, sizes, stored)
    named = keys.keys(places)
    refuse_twice(file, named, at)
    file.check_unchanged()
    return TreeMembers(named, member_stats(places, file.found), folders, left_out)


def read_member(fd: int, place: Place) -> bytes:
    """The content of a member.  Raises OSError where it is not what the directory says."""
    head = os.pread(fd, _LOCAL.size, place.at)
    if len(head) < _LOCAL.size or head[:4] != _LOCAL_MARK:
        raise OSError(errno.EAGAIN, "its archive changed since it was listed, or is damaged (there is no member where the directory says)")
    *_, method, _, _, _, _, _, name, extra = _LOCAL.unpack(head)
    at = place.at + _LOCAL.size + name + extra
    data = os.pread(fd, place.stored, at)
    while len(data) < place.stored and (more := os.pread(fd, place.stored - len(data), at + len(data))):
        data += more  # network file systems may return less
    if method == _DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, place.size + 1)  # no more than that, whatever is packed in it
        except zlib.error:
            data = b""
    if len(data) != place.size or zlib.crc32(data) != place.check:
        raise OSError(
            errno.EIO, "its bytes are not those that the archive's directory tells of (CRC-32): it is damaged, or changed since it was listed"
        )
    return data


class _Directory:
    """The entries of an archive's directory, in its order.  Raises SourceError."""

    def __init__(self, file: ArchiveFile) -> None:
        self._file = file
        tail = file.read(max(0, file.size - _MOST_COMMENT - _END.size), _MOST_COMMENT + _END.size)
        found = tail.rfind(_END_MARK)
        while found >= 0 and (len(tail) < found + _END.size or found + _END.size + _END.unpack_from(tail, found)[7] > len(tail)):
            found = tail.rfind(_END_MARK, 0, found)
        if found < 0:
            what = "was it cut short?" if file.read(0, 4) == _LOCAL_MARK else "it is no zip archive"
            raise SourceError(f"{file.shown}: no directory at its end: {what}", path=file.path)
        end = file.size - len(tail) + found
        _, disk, first, _, self._count, size, offset, _ = _END.unpack_from(tail, found)
        self._exact = False
        stop = end
        locator = file.read(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
        if locator[:4] == _LOCATOR_MARK:
            stop = end - _LOCATOR.size - _END64.size
            record = file.read(stop, _END64.size) if stop >= 0 else b""
            if record[:4] != _END64_MARK:
                raise self._wrong(max(stop, 0), "expected the zip64 record of its end")
            *_, disk, first, _, self._count, size, offset = _END64.unpack(record)
            self._exact = True
        if disk or first:
            raise SourceError(f"{file.shown}: the last part of an archive of several: join them (zip -s 0)", path=file.path)
        self._start, self._stop = stop - size, stop
        #: What was put in front of the archive: offsets do not count it.
        self._shift = self._start - offset
        if self._start < 0 or self._shift < 0:
            raise self._wrong(end, f"its directory of {size:,} bytes at byte {offset:,} does not lie in it: it was cut short, or is damaged")

    def __iter__(self) -> Iterator[_Entry]:
        at, part, start, found = self._start, b"", self._start, 0
        while at < self._stop:
            if at + _MOST_ENTRY > start + len(part) and start + len(part) < self._stop:
                part, start = self._file.read(at, min(_PART, self._stop - at)), at
            entry, at = self._entry(part, at - start, at)
            found += 1
            yield entry
        if (found - self._count) % (1 << (64 if self._exact else 16)):
            raise self._wrong(self._start, f"its directory holds {found:,} members, and its end says {self._count:,}")

    def _entry(self, part: bytes, offset: int, at: int) -> tuple[_Entry, int]:
        """The entry at `offset` of some bytes, byte `at` of the archive, and where it ends."""
        if part[offset : offset + 4] != _ENTRY_MARK or offset + _ENTRY.size > len(part):
            raise self._wrong(at, "expected an entry of its directory: it is damaged")
        fields = _ENTRY.unpack_from(part, offset)
        _, _, system, _, flags, method, _, _, check, stored, size, name_length, extra_length, comment, _, _, attributes, local = fields
        begins = offset + _ENTRY.size
        stop = begins + name_length + extra_length + comment
        name = part[begins : begins + name_length]
        if 0xFFFFFFFF in (stored, size, local):
            size, stored, local = self._large(part[begins + name_length : begins + name_length + extra_length], (size, stored, local), at)
        if not flags & 0x800:
            name = _in_utf8(name)
        if system == 0 and b"/" not in name:
            name = name.replace(b"\\", b"/")
        local += self._shift
        if stop > len(part) or local + _LOCAL.size + stored > self._start:
            raise self._wrong(at, f"{show(as_text(name))} does not lie in it: it was cut short, or is damaged")
        return _Entry(name, flags, method, check, stored, size, attributes >> 16 if system in _UNIX else 0, local), at + stop - offset

    def _large(self, extra: bytes, numbers: tuple[int, int, int], at: int) -> list[int]:
        """Numbers that are too large for 32 bits stand in the extra field of zip64, in their order."""
        start = 0
        while start + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, start)
            if kind == 1:
                large = list(struct.iter_unpack("<Q", extra[start + 4 : start + 4 + length // 8 * 8]))
                try:
                    return [large.pop(0)[0] if number == 0xFFFFFFFF else number for number in numbers]
                except IndexError:
                    break
            start += 4 + length
        raise self._wrong(at, "an entry of its directory without the numbers of zip64 that it refers to")

    def _wrong(self, at: int, what: str) -> SourceError:
        return SourceError(f"{self._file.shown}, byte {at:,}: {what}", path=self._file.path, offset=at)


def _head(file: ArchiveFile, entry: _Entry) -> bytes:
    """The first bytes of a member's content, as far as they can be had."""
    local = file.read(entry.at, _LOCAL.size)
    if local[:4] != _LOCAL_MARK or len(local) < _LOCAL.size:
        return b""
    at = entry.at + _LOCAL.size + sum(_LOCAL.unpack(local)[-2:])
    data = file.read(at, min(entry.stored, 4096))
    if entry.method == _STORED:
        return data[:HEAD_BYTES]
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, HEAD_BYTES)
    except zlib.error:
        return b""


def _in_utf8(name: bytes) -> bytes:
    """A name that is not said to be UTF-8: it may be all the same, else it is in the code page of the first PCs."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return name.decode("cp437").encode()
    return name


def _method(method: int) -> str:
    return f"compressed by {_METHODS[method]}" if method in _METHODS else f"compression method {method}"
