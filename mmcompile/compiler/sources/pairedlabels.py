"""Hides how boxes are written in text files beside pictures: YOLO's lines `class x y width height`, and where the names of the classes stand."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.numbers import is_plain
from mmcompile.compiler.sources.ragged import Ragged, laid_out
from mmcompile.compiler.spatial import Form
from mmcompile.errors import SourceError
from mmcompile.format.fields import Field, Names, row_dtype

__all__ = ["CLASS_FILES", "FIELD", "LabelFile", "class_names", "form_of", "parse_boxes", "values_of"]

#: What the boxes are called, beside which stand `labels` and their count.
FIELD = "boxes"
#: Files that name the classes, beside the folders or in that of the boxes: those of Ultralytics, and the list that labelling tools write.
CLASS_FILES = ("data.yaml", "dataset.yaml", "data.yml", "classes.txt")
#: Numbers of classes that nobody names end before this one: float64 holds all of them.
_CLASSES = 1 << 53
#: Rounded shares may go over the edge by so much.
_SLACK = 1e-3
#: Mappings and lists of names, in the little of YAML in which they are written.
_NAMES = re.compile(r"^names:[ \t]*(.*)$", re.MULTILINE)
_ENTRY = re.compile(r"[ \t]*(?:-|(?:[\"']?(\d+)[\"']?):)[ \t]*(.*?)[ \t]*")
_COMMENT = re.compile(r"[ \t]+#.*$")


@dataclass(frozen=True)
class LabelFile:
    """The boxes of one file (n, 4) float64 as they are written, and their classes (n,); `fault`: what is wrong with it, "" for nothing."""

    boxes: npt.NDArray[np.float64]
    classes: npt.NDArray[np.int64]
    fault: str = ""


NONE = LabelFile(np.zeros((0, 4)), np.zeros(0, np.int64))


def form_of(options: FieldOptions) -> Form:
    """How boxes are written: centre and size in shares of the picture, unless something else was said."""
    return Form(options.format or "cxcywh", options.relative is not False, options.min_visibility or 0.0)


def parse_boxes(data: bytes, key: str, form: Form, classes: Sequence[str] | None) -> LabelFile:
    """The boxes of a file; a line that is none is its fault, named with its number."""
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        return _fault(key, 0, "it is no UTF-8")
    boxes, kinds = [], []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        try:
            if not all(map(is_plain, words)):
                raise ValueError
            kind, *box = map(float, words)
        except ValueError:
            return _fault(key, number, f"expected class x y width height, found {show(line[:60])}")
        if len(box) != 4 or not all(map(math.isfinite, (kind, *box))):
            return _fault(key, number, f"expected class and 4 numbers, found {show(line[:60])}")
        if kind != int(kind) or not 0 <= kind < (_CLASSES if classes is None else len(classes)):
            known = f"a whole number from 0 to {_CLASSES - 1}" if classes is None else f"a class from 0 to {len(classes) - 1}"
            return _fault(key, number, f"expected {known}, found {words[0]}")
        if form.relative and not all(-_SLACK <= value <= 1 + _SLACK for value in box):
            return _fault(
                key, number, f"expected shares of the picture from 0 to 1, found {show(line[:60])} (in pixels: --field {FIELD}:relative=false)"
            )
        boxes.append(box)
        kinds.append(int(kind))
    return LabelFile(np.array(boxes, np.float64).reshape(-1, 4), np.array(kinds, np.int64))


def _fault(key: str, line: int, why: str) -> LabelFile:
    where = f" line {line}" if line else ""
    return LabelFile(NONE.boxes, NONE.classes, f"{FIELD}: {show(key)}{where}: {why}")


def values_of(
    files: Sequence[LabelFile | None], keys: Sequence[str], options: FieldOptions, classes: tuple[str, ...] | None
) -> tuple[tuple[Field, ...], npt.NDArray[np.void], dict[str, int]]:
    """(fields, their records (N,), facts for the summary) of the boxes of N samples; None: no file.  Raises SourceError where some have too many."""
    found = [NONE if file is None else file for file in files]
    lengths = np.array([len(file.classes) for file in found], np.int64)
    facts: dict[str, int] = {}
    boxes = Ragged(Field(FIELD, "float32", (4,), "boxes"), np.concatenate([NONE.boxes, *(f.boxes for f in found)]).astype("<f4"), lengths, options)
    named = None if classes is None else Names(classes)
    labels = Ragged(Field("labels", "int64", (), "value", categories=named), np.concatenate([NONE.classes, *(f.classes for f in found)]), lengths)
    columns = laid_out([boxes, labels], lambda row: show(keys[row]), facts)
    fields = tuple(spec for spec, _ in columns)
    values: npt.NDArray[np.void] = np.zeros(len(files), row_dtype(fields))
    for spec, column in columns:
        values[spec.name] = column
    facts["boxes"] = int(columns[-1][1].sum())
    if alone := sum(file is None for file in files):
        facts["images without a file of boxes"] = alone
    return fields, values, facts


def class_names(read: Callable[[str], bytes | None], folders: Sequence[str]) -> tuple[str, ...] | None:
    """The names of the classes by the first of CLASS_FILES that is there; `read` gives its bytes, or None.  Raises SourceError for one that cannot
    be read."""
    for folder in folders:
        for name in CLASS_FILES:
            path = f"{folder}/{name}" if folder else name
            data = read(path)
            if data is None:
                continue
            try:
                text = data.decode("utf-8-sig")
                found = tuple(filter(None, map(str.strip, text.splitlines()))) if name.endswith(".txt") else _yaml_names(text)
            except (ValueError, SyntaxError) as error:
                raise SourceError(f"{show(path)}: its names of classes cannot be read: expected a list, or names by number", path=path) from error
            if found and len(set(found)) < len(found):
                twice = next(one for one in found if found.count(one) > 1)
                raise SourceError(f"{show(path)}: two classes are called {show(twice)}: give one another name", path=path)
            if found:
                return found
    return None


def _yaml_names(text: str) -> tuple[str, ...]:
    """What stands behind `names:`; () where nothing does.  Raises ValueError or SyntaxError."""
    found = _NAMES.search(text)
    if found is None:
        return ()
    lines = text[found.start(1) :].splitlines() or [""]
    inline = _COMMENT.sub("", lines[0]).strip()
    if inline and not inline.startswith("#"):
        if not inline.startswith(("[", "{")):
            raise ValueError(inline)
        closing = "]" if inline[0] == "[" else "}"
        whole = " ".join(_COMMENT.sub("", line) for line in lines)
        return _inline(whole[: whole.index(closing) + 1].strip())
    pairs: list[tuple[int, str]] = []
    for line in lines[1:]:
        bare = _COMMENT.sub("", line)
        if not bare.strip() or bare.lstrip().startswith("#"):
            continue
        entry = _ENTRY.fullmatch(bare)
        if entry is None or not (bare[0].isspace() or bare[0] == "-"):
            break
        pairs.append((len(pairs) if entry[1] is None else int(entry[1]), _plain(entry[2])))
    return _in_order(pairs)


def _inline(text: str) -> tuple[str, ...]:
    """The names in [a, 'b'] or {0: a, 1: b}."""
    parts = re.findall(r"(?:\"[^\"]*\"|'[^']*'|[^,\"'])+", text[1:-1])
    if text[0] == "[":
        return tuple(_plain(part.strip()) for part in parts if part.strip())
    split = [part.partition(":") for part in parts if part.strip()]
    return _in_order([(int(number.strip().strip("\"'")), _plain(name.strip())) for number, _, name in split])


def _in_order(pairs: list[tuple[int, str]]) -> tuple[str, ...]:
    if [number for number, _ in sorted(pairs)] != list(range(len(pairs))):
        raise ValueError("numbers with gaps")
    return tuple(name for _, name in sorted(pairs))


def _plain(text: str) -> str:
    return str(ast.literal_eval(text)) if text[:1] in ("'", '"') else text
