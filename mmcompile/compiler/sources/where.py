"""Hides the little language that selects rows by what is known of them: `class == 'cat' and width >= 256`, `key like 'train/*'`.

Written as Python writes conditions, parsed by Python, and evaluated here over whole columns: names of columns, numbers, texts in quotes, lists of
these, comparisons, `in`, `like` (patterns as of a shell), `and`, `or`, `not`, brackets and arithmetic; no call, no attribute, no code.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import OptionError
from mmcompile.format.samples import FLAGS

__all__ = ["Column", "Flags", "Where"]

#: A longer condition is a list of rows, which has an option of its own.
_LIMIT = 1 << 16
#: What stands between quotes is left alone; words that Python reads otherwise, or not at all, get a spelling of the same length that it reads.
_WORDS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\blike\b|\bclass\b""", re.DOTALL)
_SPELLED = {"like": " @  ", "class": "clas_"}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_REASONED: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_HINT = "write conditions as in class == 'cat' and width >= 256, or key like 'train/*'"


@dataclass(frozen=True)
class Flags:
    """The column of what was done to each source: bits (N,), which conditions ask for by word."""

    bits: npt.NDArray[np.uint32]


#: bool (N,), numbers (N,) as int64 or float64, or texts (N,) as objects.
Column = npt.NDArray[Any] | Flags


class Where:
    """A condition on rows.  Raises OptionError where `text` is none, naming the place in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LIMIT:
            raise OptionError(f"--where: {len(text):,} characters, at most {_LIMIT:,}: give the numbers of rows with --rows FILE", options=["where"])
        # In brackets lines may end anywhere; where something stands is then its offset, as counting begins at 1.
        self._spelled = "(" + _WORDS.sub(lambda found: _SPELLED.get(found[0], found[0]), text.replace("\n", " ")) + ")"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                self._tree = ast.parse(self._spelled, mode="eval").body
        except SyntaxError as error:
            why = error.msg.replace(" or ':='", "")  # which is nothing here
            self._fail(min(max((error.offset or 1) - 1, 1), len(text)), f"no condition ({why}); {_HINT}")
        except (RecursionError, MemoryError, ValueError):
            self._fail(1, f"no condition; {_HINT}")

    def rows(self, columns: Mapping[str, Callable[[], Column]], count: int) -> npt.NDArray[np.bool_]:
        """Which of `count` rows meet it; a column is made when it is asked for.  Raises OptionError, whatever the rows are: also with none."""
        made: dict[str, Column] = {}

        def column(name: str, at: int) -> Column:
            if name not in columns:
                close = difflib.get_close_matches(name, sorted(columns), 1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                self._fail(at, f"there is no {name!r:.60} here{hint}; known are {', '.join(sorted(columns))}")
            if name not in made:
                made[name] = columns[name]()
            return made[name]

        with np.errstate(all="ignore"):
            try:
                found = self._value(self._tree, column)
            except RecursionError:
                self._fail(1, "too deep: use fewer brackets, or `in` with a list")
        if _kind(found) != "truth":
            self._fail(1, f"this is a {_kind(found)}, not a condition; {_HINT}")
        return np.broadcast_to(np.asarray(found, bool), (count,))

    # ------------------------------------------------------------------ its parts

    def _value(self, node: ast.expr, column: Callable[[str, int], Column]) -> Any:
        at = self._at(node)
        if isinstance(node, ast.Name):
            return column("class" if node.id == _SPELLED["class"] else node.id, at)
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
            if isinstance(node.value, int) and not -(1 << 63) <= node.value < 1 << 63:
                self._fail(at, "a number below 2^63 is expected")
            return node.value
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            parts = [self._of_kind("truth", part, column) for part in node.values]
            out = parts[0]
            for part in parts[1:]:
                out = join(out, part)
            return out
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return np.logical_not(self._of_kind("truth", node.operand, column))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return np.negative(self._of_kind("number", node.operand, column))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return self._like(node, column)
        if isinstance(node, ast.BinOp) and type(node.op) in _REASONED:
            left, right = (self._number(side, column) for side in (node.left, node.right))
            if isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod) and (zero := np.flatnonzero(right == 0)).size:
                of = f", of {len(zero):,} rows" if right.ndim else ""
                self._fail(self._at(node.right), f"a division by 0{of}: multiply the other side instead, as in width > 2 * height")
            return _REASONED[type(node.op)](left, right)
        if isinstance(node, ast.Compare):
            return self._compared(node, column)
        return self._fail(at, f"this is not understood; {_HINT}")

    def _of_kind(self, kind: str, node: ast.expr, column: Callable[[str, int], Column]) -> Any:
        found = self._value(node, column)
        if _kind(found) != kind:
            self._fail(self._at(node), f"a {kind} is expected, this is a {_kind(found)}")
        return found

    def _number(self, node: ast.expr, column: Callable[[str, int], Column]) -> Any:
        return np.asarray(self._of_kind("number", node, column), np.float64)  # nothing wraps around

    def _like(self, node: ast.BinOp, column: Callable[[str, int], Column]) -> Any:
        pattern = node.right
        if not isinstance(pattern, ast.Constant) or not isinstance(pattern.value, str):
            return self._fail(self._at(pattern), "a pattern in quotes is expected behind `like`")
        found = self._of_kind("text", node.left, column)
        match = re.compile(fnmatch.translate(pattern.value)).match
        if isinstance(found, str):
            return match(found) is not None
        return np.fromiter((match(text) is not None for text in found.tolist()), bool, len(found))

    def _compared(self, node: ast.Compare, column: Callable[[str, int], Column]) -> Any:
        out: Any = None
        left_node = node.left
        for how, right_node in zip(node.ops, node.comparators, strict=True):
            found: Any
            if isinstance(how, ast.In | ast.NotIn):
                found = self._within(left_node, right_node, column)
                found = np.logical_not(found) if isinstance(how, ast.NotIn) else found
            elif type(how) in _COMPARED:
                left, right = self._value(left_node, column), self._value(right_node, column)
                kinds = _kind(left), _kind(right)
                if kinds[0] != kinds[1] or kinds[0] == "set of words":
                    self._fail(self._at(left_node), f"a {kinds[0]} cannot be compared with a {kinds[1]}" + _about(kinds))
                found = np.asarray(_COMPARED[type(how)](left, right), bool)
            else:
                return self._fail(self._at(right_node), f"`is` is not understood; {_HINT}")
            out = found if out is None else np.logical_and(out, found)
            left_node = right_node
        return out

    def _within(self, left_node: ast.expr, right_node: ast.expr, column: Callable[[str, int], Column]) -> Any:
        at = self._at(right_node)
        if isinstance(right_node, ast.List | ast.Tuple | ast.Set):
            left = self._value(left_node, column)
            items = [self._value(item, column) for item in right_node.elts]
            for item, item_node in zip(items, right_node.elts, strict=True):
                if isinstance(item, np.ndarray | Flags) or _kind(item) != _kind(left):
                    self._fail(self._at(item_node), f"a {_kind(left)} is expected in this list")
            if not isinstance(left, np.ndarray):
                return left in items
            if left.dtype != object:
                return np.isin(left, np.array(items) if items else np.empty(0, left.dtype))
            known = frozenset(items)
            return np.fromiter((value in known for value in left.tolist()), bool, len(left))
        right = self._value(right_node, column)
        if isinstance(right, Flags):
            word = self._of_kind("text", left_node, column)
            bit = next((bit for bit, name in FLAGS.items() if isinstance(word, str) and name == word), None)
            if bit is None:
                return self._fail(self._at(left_node), f"one of these words is expected: {', '.join(map(repr, FLAGS.values()))}")
            return (right.bits & np.uint32(bit)) != 0
        return self._fail(at, "a list is expected behind `in`, as in class in ('cat', 'dog')")

    def _at(self, node: ast.expr) -> int:
        """Where a part begins in the text, in characters from 1; Python counts bytes."""
        return max(1, len(self._spelled.encode(errors="surrogatepass")[: node.col_offset].decode(errors="replace")))

    def _fail(self, at: int, why: str) -> Any:
        shown = self.text if self.text.isprintable() else ascii(self.text)
        raise OptionError(f"--where {shown:.200}: at character {at}: {why}", options=["where"], at=at)


def _kind(value: Any) -> str:
    if isinstance(value, Flags):
        return "set of words"
    dtype = np.asarray(value).dtype
    return "truth" if dtype.kind == "b" else "number" if dtype.kind in "iuf" else "text"


def _about(kinds: tuple[str, str]) -> str:
    """What to do about a comparison of two kinds."""
    if "set of words" in kinds:
        return ": write 'truncated-accepted' in flags"
    return ": put texts in quotes, and numbers in none" if set(kinds) == {"text", "number"} else ""
