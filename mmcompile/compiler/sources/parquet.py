"""Hides how a table lies in Parquet files: which columns it has, what they hold, and which of them are images.

Files are read some thousand rows at a time, and only the columns that are wanted; what stands in them keeps its dtype.  Hugging Face's note in a file
tells which column holds images and what the numbers of classes stand for.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.formats import sniff
from mmcompile.compiler.sources.cells import Column, fitting
from mmcompile.compiler.sources.columns import IMAGE_NAMES, named_alike
from mmcompile.compiler.sources.jsonparts import form_of, whole_of
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.roles import is_called_mask
from mmcompile.compiler.sources.walk import HEAD_BYTES, expect_file
from mmcompile.errors import MMCompileError, OptionError, SourceError

__all__ = ["ArrowColumns", "ParquetTable", "arrow", "batches", "opened", "pictures", "reading"]

#: Bytes of a column that are in memory at one time, about, and rows at most.
_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 1 << 14
_LOOKED_AT = 100
#: Whole kinds of columns that no field is made of, by how Arrow calls them.
_REFUSED = {"decimal": "decimals", "duration": "durations", "binary": "bytes", "null": "no value in it", "interval": "intervals"}
_NESTED = ("list", "large_list", "fixed_size_list", "struct", "map", "list_view", "large_list_view", "union", "extension")


def arrow(path: str) -> Any:
    """pyarrow, for this file.  Raises OptionError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise OptionError(f"{show(path)} is read by pyarrow, which is not installed: pip install 'mmcompile[parquet]'", path=path) from error
    return pyarrow


def opened(path: str, buffer_bytes: int = 0) -> Any:
    """The file as a pyarrow.parquet.ParquetFile that holds each page against its checksum, where it has one; 0: a column is read in one go.

    Raises OptionError where pyarrow is not installed; SourceError where the file cannot be read, or is no Parquet file.
    """
    pa = arrow(path)
    expect_file(path, "a Parquet file")
    with reading(path):
        return pa.parquet.ParquetFile(path, pre_buffer=False, buffer_size=buffer_bytes, memory_map=False, page_checksum_verification=True)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """What Arrow raises of a file that is damaged, or is none of Parquet, becomes a SourceError that names it."""
    try:
        yield
    except MMCompileError:
        raise
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, NotImplementedError) as error:
        why = "it holds text that is no UTF-8" if isinstance(error, UnicodeError) else getattr(error, "strerror", None)
        raise SourceError(f"{show(path)}: cannot be read: {why or 'it is damaged, or no Parquet file'}", path=path) from error


def batches(path: str, file: Any, columns: list[str], group: int | None = None) -> Iterator[Any]:
    """Record batches of these columns (of one row group), so many rows at a time that about 16 MiB are in memory, and a page of the file."""
    with reading(path):
        groups = range(file.metadata.num_row_groups) if group is None else [group]
        for number in groups:
            held = file.metadata.row_group(number)
            leaves = [held.column(i) for i in range(held.num_columns)]
            size = sum(leaf.total_uncompressed_size for leaf in leaves if any(leaf.path_in_schema.startswith(name) for name in columns))
            rows = min(max(1, _BATCH_BYTES * held.num_rows // max(1, size)), _BATCH_ROWS)
            yield from file.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)


def pictures(schema: Any) -> list[str]:
    """The columns that hold the bytes of images: those that Hugging Face's note says, then the others of struct<bytes, path>."""
    noted = [name for name, feature in _features(schema).items() if isinstance(feature, dict) and feature.get("_type") == "Image"]
    return [name for name in dict.fromkeys([*noted, *schema.names]) if name in schema.names and _is_struct(schema.field(name).type)]


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith("struct<") and any(_is_binary(part.type) for part in kind if part.name == "bytes")


def _is_binary(kind: Any) -> bool:
    return str(kind) in ("binary", "large_binary", "binary_view")


def _features(schema: Any) -> dict[str, Any]:
    """Hugging Face's note on each column, or nothing."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return dict(json.loads(schema.metadata[b"huggingface"])["info"]["features"])
    return {}


def _class_names(path: str, feature: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(feature, list) and len(feature) == 1:
        yield from _class_names(f"{path}[]", feature[0])
    elif isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
        if isinstance(feature.get("names"), list):
            yield path, tuple(map(str, feature["names"]))
    elif isinstance(feature, dict) and "feature" in feature:
        yield from _class_names(f"{path}[]", feature["feature"])
    elif isinstance(feature, dict):
        for name, inner in feature.items():
            for found, names in _class_names(name, inner) if isinstance(inner, dict | list) else ():
                yield f"{path.removesuffix('[]')}[].{found.removesuffix('[]')}", names


class ParquetTable:
    """The table in a Parquet file: `names` of its columns; `holds`: the column with bytes of images, or None."""

    header = True
    form = "Parquet"

    def __init__(self, path: str, image: str | None = None) -> None:
        """`image`: the column that is asked for.  Raises SourceError: it cannot be read, or is no Parquet file; OptionError: no pyarrow."""
        self.path, self.arrow = path, arrow(path)
        self._first: list[dict[str, str]] | None = None
        with self.opened() as file, reading(path):
            self.schema = file.schema_arrow
            self.rows, self.groups = int(file.metadata.num_rows), int(file.metadata.num_row_groups)
        self.names = tuple(self.schema.names)
        if len(set(self.names)) < len(self.names):
            raise SourceError(f"{show(path)}: two columns have one name: give them different ones", path=path)
        self.holds = image if image is not None and image in self.names and self.is_held(image) else None
        if image is None:
            found = pictures(self.schema)
            binary = [name for name in self.names if _is_binary(self.schema.field(name).type)]
            found = found or [name for name in binary if self._begins_as_images(name)]
            if named_alike(self.names, IMAGE_NAMES) is not None:  # which the images are in, or named by
                found = [name for name in found if not is_called_mask(name)]
            self.holds = min(found, key=is_called_mask, default=None)

    def opened(self) -> Any:
        """The file, opened.  Pages are read one by one, never a whole column of a row group."""
        return opened(self.path, buffer_bytes=1 << 20)

    @property
    def in_struct(self) -> bool:
        """Do images stand beside their paths?"""
        return self.holds is not None and _is_struct(self.schema.field(self.holds).type)

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Names of the numbers in columns, where the file says them; of those in lists, or by a name in these, as `column[]` or `column[].name`."""
        return dict(found for name, feature in _features(self.schema).items() for found in _class_names(name, feature))

    def first(self) -> list[dict[str, str]]:
        """Its first rows, at most 100: the columns of text."""
        texts = [name for name in self.names if self.is_text(name)]
        if self._first is None and texts and self.rows:
            with reading(self.path):
                batch = next(self.batches(texts)).slice(0, _LOOKED_AT)
                self._first = [{name: value for name, value in row.items() if value is not None} for row in batch.to_pylist()]
        return self._first or []

    def batches(self, columns: list[str]) -> Iterator[Any]:
        """All rows of these columns."""
        with self.opened() as file:
            yield from batches(self.path, file, columns)

    def many(self, name: str) -> str:
        """As TextTable."""
        kind = str(self.schema.field(name).type) if name in self.names else ""
        if name in self.names and self.is_text(name):
            found = [whole_of(row[name]) for row in self.first() if row.get(name)]
            return next((form_of(cell) for cell in found if cell), "")
        is_object = (kind.startswith("struct<") and "list<" in kind) or re.match(r"(?:large_|fixed_size_)?list<[^<]*struct<", kind)
        return "object" if is_object else "list" if kind.startswith(("list", "large_list", "fixed_size_list")) else ""

    def is_text(self, name: str) -> bool:
        kind = self.schema.field(name).type
        return "string" in str(getattr(kind, "value_type", kind)) and not str(kind).startswith(_NESTED)

    def is_held(self, name: str) -> bool:
        """May this column hold bytes of images?"""
        kind = self.schema.field(name).type
        return _is_binary(kind) or _is_struct(kind)

    def holds_images(self, name: str) -> bool:
        """Does this column, beside the one that `holds`, hold bytes of images?"""
        return name in self.names and (_is_struct(kind := self.schema.field(name).type) or (_is_binary(kind) and self._begins_as_images(name)))

    def _begins_as_images(self, name: str) -> bool:
        for batch in self.batches([name]):
            value = next((value for value in batch.column(0) if value.is_valid), None)
            if value is not None:  # a view: it may be hundreds of MB
                return sniff(value.as_buffer()[:HEAD_BYTES].to_pybytes()) is not None
        return False


class ArrowColumns:
    """The columns of tables, one below the other, as TextColumns has them: `texts` are those that may be text, with `numbers` others count.

    `held`: those with bytes of images, which are none of these; `lists`: those of which any cells are wanted.
    """

    def __init__(
        self, tables: Sequence[ParquetTable], texts: set[str], *, numbers: bool, held: Collection[str] = (), lists: Collection[str] = ()
    ) -> None:
        self._tables, self._arrow = tables, tables[0].arrow
        self.stops: list[int] = np.cumsum([table.rows for table in tables]).tolist()
        self._fields = {name: table.schema.field(name) for table in tables for name in table.names}
        apart = {*held, *lists}
        self.nested = {name for name, spec in self._fields.items() if str(spec.type).startswith(_NESTED) and name not in apart}
        self._wanted = [name for name in self._fields if name not in self.nested and name not in apart and (name in texts or numbers)]
        self.texts = tuple(name for name in self._wanted if name not in texts and any(name in t.names and t.is_text(name) for t in tables))
        self.names = tuple(name for name in self._wanted if name not in self.texts)

    def paths(self, name: str) -> Keys:
        """The cells of a column of text as bytes."""
        with reading(self._tables[0].path):
            return Keys.join([Keys.of(_texts(part)) for part in self._parts(name)])

    def cells(self, name: str) -> Iterator[Any]:
        """The cells of a column, as Python's values."""
        with reading(self._tables[0].path):
            for part in self._parts(name):
                yield from part.to_pylist()

    def dtype(self, name: str) -> str | None:
        """The dtype of the numbers in a column, or in its lists; None where they are none."""
        kind = self._fields[name].type
        while hasattr(kind, "value_type"):
            kind = kind.value_type
        try:
            found = np.dtype(kind.to_pandas_dtype())
        except (NotImplementedError, TypeError):
            return None
        return found.name if found.kind in "iuf" else None

    def stray(self, name: str) -> None:
        """No cell is of another kind than the others."""

    def column(self, name: str, where: Callable[[int], str], *, names: bool = False, text: bool = False) -> Column | str:
        """A column, or why it cannot be held.  With `text` it is one of text, whatever it holds."""
        with reading(self._tables[0].path):
            found = self._column(name, text=text)
        return found if isinstance(found, str) else fitting(found, where)

    def _column(self, name: str, *, text: bool) -> Column | str:
        array = self._whole(name)
        if isinstance(array, str):
            return array
        pa, kind = self._arrow, str(array.type)
        missing = array.is_null().to_numpy(zero_copy_only=False)
        if text or "string" in kind:
            return _numbered(name, array)
        if reason := next((why for word, why in _REFUSED.items() if word in kind), None):
            return reason
        if kind.startswith(("timestamp", "date", "time")):
            unit = "D" if kind.startswith("date") else str(array.type.unit)
            array = array.cast("date32").cast("int32") if unit == "D" else array
            return Column(name, array.cast("int64").fill_null(0).to_numpy(zero_copy_only=False), missing, unit=unit)
        zero = False if kind == "bool" else float("nan") if kind in ("halffloat", "float", "double") else 0
        if len(array) and missing.all():
            return "no value in it"
        values = array.fill_null(pa.scalar(zero, array.type)).to_numpy(zero_copy_only=False)
        if values.dtype.kind not in "biuf":
            return f"values of the kind {kind}"
        return Column(name, values, missing | np.isnan(values) if values.dtype.kind == "f" else missing)

    def _whole(self, name: str) -> Any:
        """All cells of a column as one Arrow array, or why there is none."""
        parts = list(self._parts(name))
        kinds = {part.type for part in parts} - {self._arrow.null()}
        if kinds and all("string" in str(kind) for kind in kinds):
            kinds = {self._arrow.large_string()}  # the others end at 2 GiB
        if len(kinds) > 1:
            return f"other kinds of values in other files ({', '.join(sorted(map(str, kinds)))})"
        return self._arrow.concat_arrays([part.cast(kind) for part in parts for kind in kinds or {part.type}])

    def _parts(self, name: str) -> Iterator[Any]:
        """The cells of a column, in pieces; a table without it has none there."""
        for table in self._tables:
            if name not in table.names or not table.rows:
                yield self._arrow.nulls(table.rows, self._fields[name].type)
                continue
            for batch in table.batches([name]):
                array = batch.column(0)
                yield array.dictionary_decode() if str(array.type).startswith("dictionary") else array


def _texts(array: Any) -> Iterator[bytes]:
    return (b"" if cell is None else str(cell).encode("utf-8", "surrogateescape") for cell in array.to_pylist())


def _numbered(name: str, array: Any) -> Column:
    """Texts as numbers, from 0 on in their order as text; an empty one is missing."""
    coded = (array if "string" in str(array.type) else array.cast("string")).dictionary_encode()
    numbers = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    texts = coded.dictionary.to_pylist()
    names = tuple(sorted(text for text in texts if text))
    at = {text: i for i, text in enumerate(names)}
    place: npt.NDArray[np.int64] = np.array([*(at.get(text, -1) for text in texts), -1], np.int64)
    values = place[numbers]
    return Column(name, values, values < 0, names)
