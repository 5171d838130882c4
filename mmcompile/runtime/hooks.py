"""Hides how the functions that a user hangs on samples are called: what they get, and that chance is the same wherever and whenever they run.

Before each sample the global generators of torch, numpy and random are seeded from the sample's key, once for all its hooks, and put back as the user
had them after the last one, also when a hook raises.  The key says (seed, epoch, row) in 64 bits, and all of them count.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from mmcompile.runtime.seeding import mt19937_words

if TYPE_CHECKING:
    from mmcompile.runtime.column import Column

__all__ = ["Hooks", "keyed_globals", "stacked", "warn_of_normalizing_twice", "warn_of_one_epoch", "with_valid"]

Hook = Callable[..., Any] | None

Words = npt.NDArray[np.uint32]

#: Keys whose words are made together: 80 KB of numbers, which a core's first-level caches nearly hold.
_TOGETHER = 16
#: Keeps the global generator of torch from giving the numbers of the one that a hook asks for by name.
_GLOBAL = 0xA5A5A5A5A5A5A5A5
#: What makes a picture of a tensor, or may.
_MAKE_PICTURES = ("ToPILImage", "Lambda")
#: Where timm keeps transforms, and such as know PIL images alone.
_TIMMS = ("timm.data.transforms", "timm.data.auto_augment")
#: Where torch keeps the 624 words of its Mersenne Twister in a generator's state: one in each 8 bytes, after the seed and two counters.
_WORDS = slice(24, 24 + 624 * 8)


class Hooks:
    """transform, target_transform and transforms of a dataset.  False where there are none.

    Raises TypeError for what cannot be called or makes tensors of PIL images, ValueError for functions that take each other's place.
    """

    def __init__(self, transform: Hook, target_transform: Hook, transforms: Hook) -> None:
        self.transform, self.target_transform, self.transforms = transform, target_transform, transforms
        if transforms is not None and (transform is not None or target_transform is not None):
            raise ValueError("transforms (of all fields together) takes the place of transform and target_transform: give one or the other")
        named = {"transform": transform, "target_transform": target_transform, "transforms": transforms}
        for name, hook in named.items():
            if hook is not None and not callable(hook):
                raise TypeError(f"{name} must be a function or another callable, not an object of type {type(hook).__name__}")
            if name != "target_transform":
                _refuse_to_tensor(hook)
        self._wanting = frozenset(name for name, hook in named.items() if hook is not None and _wants_generator(hook))
        self._timms, self._needs_pil = _timms(transform)
        self._as_pil = False

    def __bool__(self) -> bool:
        return not self.transform is self.target_transform is self.transforms is None

    @property
    def take_images(self) -> bool:
        """Is any of them called with an image, which it may write to?"""
        return self.transform is not None or self.transforms is not None

    def check(self, root: Path | str, names: Sequence[str], image: Column | None, label: Column | None) -> None:
        """ValueError where a hook is for what is not among the fields, or wants a picture and gets numbers."""
        for name, hook, column, what in (
            ("transform", self.transform, image, "an image"),
            ("target_transform", self.target_transform, label, "a label"),
        ):
            if hook is not None and column is None:
                raise ValueError(f"{root}: {name} needs {what}, the fields are {list(names)}")
        if image is not None:
            self._as_pil = self._timms and image.dtype == torch.uint8 and len(image.shape) == 3
            if self._needs_pil and not self._as_pil:
                raise ValueError(
                    f"{root}: timm's transforms start from 8-bit pictures, samples are {str(image.dtype).removeprefix('torch.')} {image.shape}; "
                    "open with dtype=torch.uint8 what was built with --dtype uint8"
                )

    def run(self, keys: Sequence[int], samples: Iterable[list[Any]], image: int | None, label: int | None, watch: int = 0) -> tuple[list[Any], bool]:
        """What the hooks make of each sample, and whether one of the first `watch` used random numbers.

        A sample is the list of its values, of which `image` and `label` say the places; what `transforms` returns stands there as it is.
        """
        out: list[Any] = []
        drawn = watch > 0 and bool(self._wanting)
        with _Globals() as chance:
            for (key, words), values in zip(_with_words(keys), samples, strict=True):
                chance.seed(key, words)
                try:
                    out.append(self._apply(values, image, label, _generator(key) if self._wanting else None))
                except StopIteration as error:  # would end the loop as if the data had ended
                    raise RuntimeError("a transform raised StopIteration") from error
                if not drawn and len(out) <= watch:
                    drawn = chance.drawn()
        return out, drawn

    def _apply(self, values: list[Any], image: int | None, label: int | None, generator: torch.Generator | None) -> Any:
        if self.transforms is not None:
            return self._call("transforms", self.transforms, values, generator)
        if self.transform is not None and image is not None:
            values[image] = self._call("transform", self.transform, [_pil(values[image]) if self._as_pil else values[image]], generator)
        if self.target_transform is not None and label is not None:
            values[label] = self._call("target_transform", self.target_transform, [values[label]], generator)
        return values

    def _call(self, name: str, hook: Callable[..., Any], values: list[Any], generator: torch.Generator | None) -> Any:
        return hook(*values, generator=generator) if name in self._wanting else hook(*values)


class _Globals:
    """The global generators on loan: as they were once the block ends."""

    def __enter__(self) -> _Globals:
        self._before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
        return self

    def __exit__(self, *error: object) -> None:
        ours, numpys, pythons = self._before
        torch.default_generator.set_state(ours)
        np.random.set_state(numpys)
        random.setstate(pythons)

    def seed(self, key: int, words: Words) -> None:
        """`words` are torch's, of a key of its own."""
        self._seeds = key, words
        _set(torch.default_generator, key ^ _GLOBAL, words)
        np.random.seed([key & 0xFFFFFFFF, key >> 32, 1])  # the 1, as `random` makes the same twister of the two words alone
        random.seed(key)

    def drawn(self) -> bool:
        """Has anything been drawn since `seed`?  (Seeds once more, which whoever asks need not mind.)"""
        after = _states()
        self.seed(*self._seeds)
        return after != _states()


@contextlib.contextmanager
def keyed_globals(key: int) -> Iterator[None]:
    """The global generators of torch, numpy and random start from a key in here, and are put back as the user had them."""
    with _Globals() as chance:
        chance.seed(*next(_with_words([key])))
        yield


def _states() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()
    return torch.default_generator.get_state().numpy().tobytes(), numpys[1].tobytes(), numpys[2:], random.getstate()


def _with_words(keys: Sequence[int]) -> Iterator[tuple[int, Words]]:
    """Each key with the words of torch's global generator, made for some samples at a time: for each alone they cost as much as all else."""
    for at in range(0, len(keys), _TOGETHER):
        some = keys[at : at + _TOGETHER]
        yield from zip(some, mt19937_words(np.array(some, np.uint64) ^ np.uint64(_GLOBAL)), strict=True)


def _generator(key: int) -> torch.Generator:
    generator = torch.Generator()
    _set(generator, key, mt19937_words(key))
    return generator


def _set(generator: torch.Generator, key: int, words: Words) -> None:
    """Start the stream of a key.  `manual_seed` looks at 32 bits of it only, by which some of 10^5 rows would share their numbers."""
    template = _template()
    if template is None:
        generator.manual_seed(key)
        return
    state = template.clone()
    array = state.numpy()
    array[:8].view(np.uint64)[0] = key
    array[_WORDS].view(np.uint64)[:] = words
    generator.set_state(state)


@functools.cache
def _template() -> torch.Tensor | None:
    """A state just seeded, whose words can be replaced; None where this torch keeps them otherwise than known here."""
    state = torch.Generator().manual_seed(5).get_state()
    known: Any = np.random.RandomState(5).get_state()  # the same twister from the same seed
    array = state.numpy()
    if array.size < _WORDS.stop or array[:8].view(np.uint64)[0] != 5 or not np.array_equal(array[_WORDS].view(np.uint64), known[1]):
        return None
    return state


def with_valid(sample: Any, valid: bool | None) -> Any:
    """A sample whose last element, or item of a dict, says whether a metric may count it; as it is where that is None."""
    if valid is None:
        return sample
    if isinstance(sample, dict):
        return {**sample, "valid": valid}
    return (*sample, valid) if isinstance(sample, tuple) else (sample, valid)


def stacked(samples: list[Any], lend: Callable[[int], torch.Tensor]) -> Any:
    """The batch of samples that hooks have made, as torch's default_collate makes it, but its tensors lie in memory of `lend(nbytes)`.

    Raises ValueError where samples differ in shape.
    """
    how: dict[Any, Callable[..., Any]] = {**default_collate_fn_map, torch.Tensor: functools.partial(_stacked_tensors, lend=lend)}
    try:
        return collate(samples, collate_fn_map=how)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise ValueError(
            f"a transform gave samples that cannot be stacked ({error}); pad them, or use DataLoader(dataset, collate_fn=lambda b: tuple(zip(*b)))"
        ) from None


def _stacked_tensors(values: list[torch.Tensor], *, lend: Callable[[int], torch.Tensor], collate_fn_map: Any) -> Any:
    """Tensors of one shape and dtype that lie in memory one after another are copied there; what is otherwise is torch's to stack."""
    first = values[0]
    if not all(_is_plain(value) and value.dtype == first.dtype and value.shape == first.shape for value in values):
        return default_collate_fn_map[torch.Tensor](values, collate_fn_map=collate_fn_map)
    out = lend(len(values) * first.nbytes).view(first.dtype).view(len(values), *first.shape)
    return torch.stack([value.as_subclass(torch.Tensor) for value in values], out=out)


def _is_plain(value: torch.Tensor) -> bool:
    """Is it a tensor in the CPU's memory, without a history, of a class that a batch does not keep?  torchvision's are of such."""
    known = type(value) is torch.Tensor or type(value).__module__.startswith("torchvision.tv_tensors")
    strided = value.layout is torch.strided and not value.is_nested and not value.is_quantized
    return known and strided and value.device.type == "cpu" and not value.requires_grad


def warn_of_one_epoch() -> None:
    """Tell whoever iterates, in one of all processes, that random transforms would repeat themselves."""
    info = torch.utils.data.get_worker_info()
    if info is None or info.id == 0:
        warnings.warn(
            "a transform draws random numbers, and nothing says which epoch it is: every epoch would see the same augmentations; "
            "use DataLoader(ds, sampler=ShardSampler(ds, ...)) or ShardLoader, or call ds.set_epoch(epoch) before each epoch (which reaches no "
            "worker that is running already, as with persistent_workers=True)",
            UserWarning,
            stacklevel=4,
        )


def _wants_generator(function: Callable[..., Any]) -> bool:
    """Has it a parameter named `generator` that its owner left free?"""
    if isinstance(function, functools.partial) and "generator" in function.keywords:
        return False
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        found = inspect.signature(target).parameters.get("generator")
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def _pil(image: torch.Tensor) -> Any:
    """A picture as PIL's, by torchvision: whoever has timm has it."""
    functional: Any = importlib.import_module("torchvision.transforms.functional")
    return functional.to_pil_image(image)


def _timms(function: Any) -> tuple[bool, bool]:
    """Does a transform, before it makes a picture itself, make numbers of one by timm's means; and by such as take nothing but a picture?"""
    parts = [part for part in itertools.takewhile(lambda part: part[1] not in _MAKE_PICTURES, _known(function)) if part[0] in _TIMMS]
    only = any(home != _TIMMS[0] or name in ("ToNumpy", "ToTensor") for home, name in parts)
    return only or any(name in ("MaybeToTensor", "MaybePILToTensor") for _, name in parts), only


def _known(function: Any) -> Iterator[tuple[str, str]]:
    """(module, name) of the transforms of torchvision and timm in a transform, in order; found by name, so neither is imported."""
    waiting, seen = [function], set()
    while waiting:
        item = waiting.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        kind = type(item)
        if kind.__module__.startswith(("torchvision.transforms", "timm.data")):
            yield kind.__module__, kind.__name__
        inner = getattr(item, "transforms", None)
        parts = list(inner) if isinstance(inner, list | tuple | torch.nn.ModuleList) else []
        if isinstance(item, torch.nn.Module):
            parts += item.children()
        waiting.extend(reversed(parts))


def _refuse_to_tensor(function: Any) -> None:
    """TypeError for a torchvision transform that makes tensors of PIL images where nothing has made one of the sample."""
    for home, name in _known(function):
        if name in _MAKE_PICTURES or home == _TIMMS[1]:
            return
        if (home not in _TIMMS and name == "ToTensor") or (name == "PILToTensor" and ".v2" not in home):
            raise TypeError(
                f"{home}.{name} does not apply: samples are tensors already; leave it out and open with dtype=torch.float32, which gives the same "
                "numbers, or use v2.ToDtype(torch.float32, scale=True) where other transforms come before it"
            )


def warn_of_normalizing_twice(hooks: Hooks, root: Path | str) -> None:
    """Samples that come normalised need no Normalize."""
    if any(name == "Normalize" for hook in (hooks.transform, hooks.transforms) for _, name in _known(hook)):
        warnings.warn(
            f"{root}: was built with normalisation, so samples come normalised, and the transform normalises them once more; "
            "leave Normalize out, or open with dtype= the dtype on disk",
            UserWarning,
            stacklevel=4,
        )
