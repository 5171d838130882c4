"""Hides how a stock DataLoader comes by a batch in one copy: its samples are gathered together, and its collate function finds that out.

torch collates by the type of the first sample.  The first sample of a gathered batch is of a type of ours: it behaves as the tuple, dict, tensor or
int that it is, and tells the function registered for it which batch it came from.  Where torch has no such register, samples come as a plain list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

import torch
from torch import Tensor

__all__ = ["gathered", "in_worker", "shared_memory"]

Gather = Callable[[], list[Tensor]]
#: The values of each sample of a batch, or of a part of it.
Unbind = Callable[[list[Tensor]], list[list[Any]]]
Pack = Callable[[list[Any]], Any]


def gathered(gather: Gather, n: int, unbind: Unbind, pack: Pack, bare: bool) -> Sequence[Any]:
    """The samples of a batch of n: `gather` makes a tensor for each column (N, …), `unbind` one value from each, `pack` a sample of these.

    Gathered when first touched; `bare` samples, which are tensors, come as a list: torch.stack takes nothing else.  `default_collate` of the samples
    is the gathered batch itself, which the samples view.
    """
    samples = Gathered(gather, n, unbind, pack)
    if not _REGISTERED:
        return [_plain(sample) for sample in samples]
    return _Tensors(samples) if bare else samples


def in_worker() -> bool:
    """Are we in a worker process of a DataLoader?"""
    return torch.utils.data.get_worker_info() is not None


def shared_memory(nbytes: int) -> Tensor:
    """uint8 (nbytes,) that travels to another process without a copy; ordinary memory where this torch has none to give."""
    try:
        new: Any = torch.UntypedStorage._new_shared
        storage: torch.UntypedStorage = new(max(1, nbytes), device="cpu")
    except (AttributeError, TypeError):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)[:nbytes]


class Gathered(Sequence[Any]):
    """The samples of one batch, made when they are asked for.  Pickles as the list of them."""

    def __init__(self, gather: Gather, n: int, unbind: Unbind, pack: Pack) -> None:
        self._gather, self._n, self._unbind, self._pack = gather, n, unbind, pack
        self._made: _Made | None = None
        self._first: Any = None
        self._looks = 0

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, key: int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> list[Any]: ...
    def __getitem__(self, key: Any) -> Any:
        at = range(self._n)[key]
        if isinstance(at, range):
            return [self[i] for i in at]
        made, first = self._start()
        self._looks += 1 if at == 0 else 2
        return first if at == 0 else made.unpack()[at - 1]  # a collate function looks at the first alone

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __repr__(self) -> str:
        return repr(list(self))

    def _start(self) -> tuple[_Made, Any]:
        if self._made is None:
            made = _Made(self._gather(), self._unbind, self._pack)
            values = self._unbind([part[:1] for part in made.parts])[0]
            self._first = _marked(self._pack(values), made)
            made.values.append(values)
            self._made = made
        return self._made, self._first

    def _take(self) -> Any:
        """The batch if the samples are still what was gathered, else None.  Where torch's look at the first was the only one, a new one each time."""
        made, first = self._start()
        found = made.give([first, *made.others])
        if self._looks <= 1:
            self._made, self._first, self._looks = None, None, 0
        return found


class _Made:
    """A gathered batch and its samples but for the first, which holds this (held from here it would keep the memory until the next collection)."""

    def __init__(self, parts: list[Tensor], unbind: Unbind, pack: Pack) -> None:
        self.parts, self._unbind, self._pack = parts, unbind, pack
        self.values: list[list[Any]] = []
        self.others: list[Any] = []
        self._given = False

    def unpack(self) -> list[Any]:
        """The samples beyond the first."""
        if not self.others:
            rest = self._unbind([part[1:] for part in self.parts])
            self.values.extend(rest)
            self.others = [self._pack(values) for values in rest]
        return self.others

    def has(self, batch: Sequence[Any]) -> bool:
        """Are these, the first of which is ours, the samples of this batch in order?"""
        return len(batch) == len(self.others) + 1 == len(self.parts[0]) and all(
            a is b for a, b in zip(islice(batch, 1, None), self.others, strict=True)
        )

    def give(self, samples: Sequence[Any]) -> Any:
        """The batch as `default_collate` would pack it; None when it was given before or a sample (a dict can) has changed since."""
        if self._given or not all(map(self._unchanged, samples, self.values)):
            return None
        self._given = True
        packed = self._pack(list(self.parts))
        return list(packed) if isinstance(packed, tuple) else packed

    def _unchanged(self, sample: Any, values: list[Any]) -> bool:
        if not isinstance(sample, dict):
            return True
        wanted = self._pack(values)
        return list(sample) == list(wanted) and all(sample[name] is value for name, value in wanted.items())


class _Tuple(tuple[Any, ...]):
    made: _Made | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class _Dict(dict[str, Any]):
    made: _Made | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _Int(int):
    made: _Made | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class _Tensor(Tensor):
    made: _Made | None = None
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # what is computed from it is a plain tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.as_subclass(Tensor), memo)


class _Stand(Tensor):
    """Stands for each sample of a list that is yet to be filled, where torch looks into it by itself: holds nothing, and torch asks it first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        waiting = [value for value in (*args, *named.values()) if isinstance(value, _Tensors) and value.waits]
        if not waiting:
            raise _nobody_looked(func)
        for value in waiting:
            value.fill()
        return func(*args, **named)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise _nobody_looked(func)


def _nobody_looked(function: Any) -> TypeError:
    return TypeError(f"{function} got samples of a batch that nobody has looked at: give it list(batch)")


class _Tensors(list[Any]):
    """The samples of a batch that are tensors, made when more than the first is asked for.  Copies and pickles as a plain list."""

    def __init__(self, samples: Gathered) -> None:
        super().__init__([_STAND] * len(samples))
        self._samples: Gathered | None = samples

    @property
    def waits(self) -> bool:
        return self._samples is not None

    def fill(self) -> None:
        if self._samples is not None:
            made = list(self._samples)
            self._samples = None
            super().__setitem__(slice(None), made)

    def take(self) -> Any:
        """What `Gathered` says of them, which nobody has looked at but for the first."""
        return None if self._samples is None else self._samples._take()

    def __getitem__(self, key: Any) -> Any:
        if self._samples is not None and type(key) is int and key == 0:
            return self._samples[0]
        self.fill()
        return super().__getitem__(key)

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + list(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _filling(method: Callable[..., Any]) -> Callable[..., Any]:
    def filled(self: _Tensors, *args: Any, **named: Any) -> Any:
        self.fill()
        return method(self, *args, **named)

    return filled


#: Everything else that a list can do looks at, or changes, what it holds.
_LOOK = ["iter", "reversed", "contains", "eq", "ne", "lt", "le", "gt", "ge", "add", "iadd", "mul", "rmul", "imul", "setitem", "delitem", "repr"]
_ACT = ["append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"]
for _name in (*(f"__{name}__" for name in _LOOK), *_ACT):
    setattr(_Tensors, _name, _filling(getattr(list, _name)))

_STAND: Any = Tensor._make_wrapper_subclass(_Stand, (0,))

_KINDS: dict[type, type] = {tuple: _Tuple, dict: _Dict, int: _Int, Tensor: _Tensor}


def _marked(sample: Any, made: _Made) -> Any:
    """A sample that knows its batch."""
    if isinstance(sample, str):  # collated as it is: a list
        return sample
    first = sample.as_subclass(_Tensor) if isinstance(sample, Tensor) else _KINDS[type(sample)](sample)
    first.made = made
    return first


def _plain(sample: Any) -> Any:
    """A sample as if it had come alone."""
    if isinstance(sample, _Tensor):
        return sample.as_subclass(Tensor)
    return next((kind(sample) for kind, ours in _KINDS.items() if type(sample) is ours), sample)


def _collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """What torch calls for samples the first of which is ours."""
    if _is_default(collate_fn_map):
        if isinstance(batch, Gathered):
            found = batch._take()
        elif isinstance(batch, _Tensors) and batch.waits:
            found = batch.take()
        else:
            made = batch[0].made
            found = made.give(batch) if made is not None and made.has(batch) else None
        if found is not None:
            return found
    return _torchs().collate([_plain(sample) for sample in batch], collate_fn_map=collate_fn_map)


def _torchs() -> Any:
    from torch.utils.data._utils import collate

    return collate


def _is_default(functions: Any) -> bool:
    """Would torch stack tensors and make a tensor of ints, or has somebody registered something else?"""
    torchs = _torchs()
    return functions is not None and functions.get(Tensor) is torchs.collate_tensor_fn and functions.get(int) is torchs.collate_int_fn


def _register() -> bool:
    """Tell torch's collate function of our types, and its tree functions what lies in them; False where they cannot be told."""
    try:
        from torch.utils._pytree import register_pytree_node

        known = _torchs().default_collate_fn_map
        if not _is_default(known) or not callable(_torchs().collate):
            return False
        known.update(dict.fromkeys(_KINDS.values(), _collate))
        # transforms of torchvision find the tensors of a sample by these
        register_pytree_node(_Tuple, lambda sample: (list(sample), None), lambda values, _: tuple(values))
        register_pytree_node(_Tensors, lambda samples: (list(samples), None), lambda values, _: list(values))
        register_pytree_node(_Dict, lambda sample: (list(sample.values()), list(sample)), lambda values, names: dict(zip(names, values, strict=True)))
    except (ImportError, AttributeError, TypeError):
        return False
    return True


_REGISTERED = _register()
