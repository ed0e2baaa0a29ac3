"""Sites: naming places in a model, finding their tensor, and capturing rows there."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import fnmatch
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from isogeom._validation import warn_user
from isogeom.gradients._layouts import channels_first, encoder_prefix
from isogeom.gradients._sampling import BatchRows
from isogeom.gradients._underflow import underflow

_SUFFIX = re.compile(r"(in|out)((?:\[[^\[\]]+\])*)|(weight)")
_NOT_FIRED = (
    "it was not called in this forward pass; or its parent uses its weight without calling it (nn.MultiheadAttention "
    "does so with out_proj), calls its .forward() directly, is compiled, or it is a container such as nn.ModuleList"
)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_FIRED_AGAIN = "it is a shared module called several times per forward pass, or the loss calls the model several times"

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Site:
    """A place in a model: the input, the output or the weight of a module."""

    name: str
    module: nn.Module
    kind: str
    selectors: tuple[str, ...]
    maps: str | None = None  # class of the layer whose 3-D tensors are (batch, channels, length)
    decoder: bool = False  # behind the encoder of an encoder-decoder model, so `input_ids` are not its tokens


def resolve_sites(model: nn.Module, sites: Iterable[str]) -> list[Site]:
    """Parse site strings, expand globs and look the modules up; duplicates are dropped, the order kept."""
    if isinstance(sites, str) or not isinstance(sites, Iterable):
        raise TypeError(f"sites must be a list of strings, got {sites!r}; for one site pass a list with one string")
    if isinstance(sites, Mapping) and all(isinstance(value, str) for value in sites.values()):
        raise TypeError(
            f"sites is a {type(sites).__name__} of names to sites: pass its .values(), list(sites.values())"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    encoder = encoder_prefix(modules)
    found: dict[tuple[str, str, tuple[str, ...]], Site] = {}
    for text in sites:
        if not isinstance(text, str):
            raise TypeError(f"sites must be strings, got {text!r}")
        pattern, colon, suffix = text.partition(":")
        match = _SUFFIX.fullmatch(suffix) if colon else _SUFFIX.fullmatch("out")
        if match is None or not text:
            raise ValueError(
                f"site {text!r} is not understood: write 'module', 'module:out', 'module:out[item]', 'module:in', "
                "'module:in[name]' or 'module:weight'"
            )
        kind = match[1] or match[3]
        selectors = tuple(re.findall(r"\[([^\[\]]+)\]", match[2] or ""))
        for name in _expand(pattern, modules, text):
            _check_module(modules[name], kind, name + colon + suffix)
            site = Site(
                name + colon + suffix,
                modules[name],
                kind,
                selectors,
                maps=channels_first(modules, name, kind),
                decoder=encoder is not None
                and not f"{name}.".startswith(f"{encoder}.")
                and not any(selector.startswith("encoder") for selector in selectors),
            )
            found.setdefault((name, kind, selectors), site)
    if not found:
        raise ValueError("sites is empty: name at least one module, for instance sites=['blocks.0']")
    return list(found.values())


def _expand(pattern: str, modules: dict[str, nn.Module], text: str) -> list[str]:
    if pattern in modules:
        return [pattern]
    if pattern and not pattern.strip("*"):
        raise ValueError(f"site {text!r} would harvest everything: name the modules, for instance 'blocks.*'")
    # Part by part, so that "blocks.*" means the blocks and not every module inside them.
    parts = pattern.split(".")
    names = [
        name
        for name in modules
        if name.count(".") == len(parts) - 1 and all(map(fnmatch.fnmatchcase, name.split("."), parts))
    ]
    if names and any(sign in pattern for sign in "*?["):
        called = [name for name in names if not isinstance(modules[name], _CONTAINERS)]
        if not called:
            raise ValueError(
                f"site {text!r} matches only containers, which are never called: {', '.join(map(repr, names))}; name "
                f"their members, for instance '{names[0]}.*'"
            )
        return called
    plain = [name for name in modules if name]
    close = difflib.get_close_matches(pattern, plain, n=5, cutoff=0.5) or [name for name in plain if "." not in name]
    shown = ", ".join(map(repr, close[:8])) or "none"
    raise ValueError(f"site {text!r} matches no module of the model; close names: {shown}")


def _check_module(module: nn.Module, kind: str, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"site {name!r} is a ScriptModule, whose hooks do not run; harvest the eager model")
    # transformers is not a dependency of this sub-package, so its Conv1D is known by name and by its 2-D weight.
    named = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    linear = isinstance(module, nn.Linear) or (named and getattr(module, "weight", torch.empty(0)).ndim == 2)
    if kind == "weight" and not linear:
        raise TypeError(
            f"site {name!r}: ':weight' gives the factor rows of nn.Linear and transformers' Conv1D only, not of "
            f"{type(module).__name__}"
            + ("; harvest its output, or see embedding_update" if isinstance(module, nn.Embedding) else "")
        )


# ---------------------------------------------------------------------- tensors inside nested inputs and outputs


def _items(obj: Any) -> list[tuple[Any, Any]]:
    if isinstance(obj, Mapping):
        return list(obj.items())
    if isinstance(obj, (tuple, list)):
        return list(enumerate(obj))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [(field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj)]
    return []


def _tensors(obj: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(obj, Tensor):
        yield path, obj
    for key, value in _items(obj):
        yield from _tensors(value, (*path, key))


def _replace(obj: Any, path: Path, value: Any) -> Any:
    """Return `obj` with the item at `path` replaced; containers on the way are copied, their types kept."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(obj, Mapping):
        new: Any = copy.copy(obj)
        new[key] = _replace(obj[key], rest, value)
        return new
    if isinstance(obj, (tuple, list)):
        items = list(obj)
        items[key] = _replace(items[key], rest, value)
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    new = copy.copy(obj)
    object.__setattr__(new, key, _replace(getattr(obj, key), rest, value))
    return new


def _follow(obj: Any, selectors: tuple[str, ...], site: Site) -> tuple[Path, Any]:
    path: Path = ()
    for selector in selectors:
        items = dict(_items(obj))
        key: Any = selector
        if key not in items and re.fullmatch(r"-?\d+", selector):
            key = int(selector)
            if key not in items and -len(items) <= key < len(items):
                key = list(items)[key]  # the first item of a mapping or a dataclass, the last of a tuple
        if key not in items:
            has = f"items {list(items)}" if items else f"no items, it is a {type(obj).__name__}"
            raise ValueError(f"site {site.name!r}: there is no item [{selector}]; the value has {has}")
        path, obj = (*path, key), items[key]
    return path, obj


def _input_path(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Path, Any]:
    """Find the argument that the first selector names, by position or by name, however the caller passed it."""
    names = list(inspect.signature(site.module.forward).parameters)
    first = site.selectors[0]
    index = int(first) if first.isdigit() else names.index(first) if first in names else len(args)
    name = names[index] if first.isdigit() and index < len(names) else first
    if name in kwargs:
        start: Path = (1, name)
    elif index < len(args):
        start = (0, index)
    else:
        raise ValueError(
            f"site {site.name!r}: the module was called with {len(args)} positional inputs and keywords {list(kwargs)}"
        )
    path, value = _follow((args, kwargs)[start[0]][start[1]], site.selectors[1:], site)
    return start + path, value


def locate(site: Site, kind: str, tree: Any, n_samples: int) -> tuple[Tensor, list[Path]]:
    """Find the tensor of a site in (args, kwargs) or in an output, and every place where it stands."""
    if not site.selectors:
        start, value = (), tree
    else:
        start, value = _input_path(site, *tree) if kind == "in" else _follow(tree, site.selectors, site)
    every = [(start + path, tensor) for path, tensor in _tensors(value)]
    fit = [(path, t) for path, t in every if t.is_floating_point() and t.ndim in (2, 3) and t.shape[0] == n_samples]
    if kind == "in":
        fit = _principal(fit)
    if len({id(tensor) for _, tensor in fit}) != 1:
        seen = "; ".join(f"{_spell(path, kind)} {tuple(t.shape)} {t.dtype}" for path, t in fit or every)
        found = f"several fit, choose one by its suffix: {seen}" if fit else f"none fits: {seen or 'no tensor at all'}"
        if not fit and any(t.ndim > 3 for _, t in every):
            found += ". Maps of shape (batch, channels, ...) have no rows: name the layer that pools or flattens them"
        raise ValueError(
            f"site {site.name!r} needs one floating tensor of shape (batch, seq, d) or (batch, d), with "
            f"batch={n_samples}; {found}"
        )
    tensor = fit[0][1]
    if site.maps is not None and tensor.ndim == 3:
        raise ValueError(
            f"site {site.name!r} has maps of shape (batch, channels, length) = {tuple(tensor.shape)}, as {site.maps} "
            "makes them, which have no rows of features: name the layer that pools or flattens them, or a module that "
            "returns them transposed, (batch, length, channels)"
        )
    return tensor, [path for path, other in _tensors(tree) if other is tensor]


def _principal(fit: list[tuple[Path, Tensor]]) -> list[tuple[Path, Tensor]]:
    """Drop the inputs that only accompany others: those inside containers, and one number per token."""
    # Blocks of language models get rotary embeddings as a pair, and masks or scales of shape (batch, seq[, 1]).
    depth = min((len(path) for path, _ in fit), default=0)
    plain = [(path, t) for path, t in fit if len(path) == depth]
    grids = {tuple(t.shape[:2]) for _, t in plain if t.ndim == 3 and t.shape[2] > 1}
    return [(path, t) for path, t in plain if tuple(t.shape) not in grids | {(*g, 1) for g in grids}]


def _spell(path: Path, kind: str) -> str:
    return f":{kind}" + "".join(f"[{key}]" for key in (path[1:] if kind == "in" else path))


# ---------------------------------------------------------------------- capture


class Capture:
    """Hooks that copy rows at the sites, for the batch given to `begin`."""

    def __init__(self, sites: list[Site], collect: frozenset[str], dtype: str = "float32") -> None:
        self.sites = sites
        self.collect = collect
        self.dtype = dtype  # how the rows will be stored
        self.arrays: dict[tuple[str, str], NDArray[np.float32]] = {}
        self._recording = False
        self._warned = self._warned_underflow = False

    def attach(self, stack: ExitStack) -> None:
        """Register the hooks; `stack` removes them."""
        for site in self.sites:
            if site.kind == "in":
                handle = site.module.register_forward_pre_hook(self._pre_hook(site), with_kwargs=True)
            else:
                handle = site.module.register_forward_hook(self._post_hook(site), with_kwargs=True)
            stack.callback(handle.remove)

    def begin(self, rows: BatchRows, n_samples: int) -> None:
        """Start the forward pass of a batch."""
        self._rows, self._n_samples = rows, n_samples
        self.arrays = {}
        self._fired: Counter[str] = Counter()
        self._no_graph: set[str] = set()
        self._edges: dict[str, tuple[Any, Tensor, int | None]] = {}
        self._random = None if self._warned else _random_states()
        self._recording = True

    def end_forward(self, batch_id: int) -> None:
        """Stop recording, so that recomputation by checkpoints is not counted, and check that each site fired once."""
        self._recording = False
        self._check_chance(batch_id)
        for site in self.sites:
            fired = self._fired[site.name]
            if fired != 1:
                reason = _FIRED_AGAIN if fired else _NOT_FIRED
                raise RuntimeError(f"site {site.name!r} fired {fired} times in batch {batch_id}, not once: {reason}")
            if site.name in self._no_graph:
                raise RuntimeError(
                    f"site {site.name!r} ran without a graph, so it has no gradient: the model runs it under "
                    "torch.no_grad, or under reentrant checkpointing (use_reentrant=True; switch checkpointing off "
                    "or use use_reentrant=False)"
                )

    def _check_chance(self, batch_id: int) -> None:
        """Warn once if the forward pass drew random numbers, although the dropout modules are off."""
        if self._random is None or all(map(torch.equal, self._random, _random_states())):
            return
        self._warned = True
        warn_user(
            f"random numbers were drawn in the forward pass of batch {batch_id}, in evaluation mode: dropout is active "
            "(nn.functional.dropout without training=self.training?), or the model or the loss samples. Rows then "
            "depend on the seed and on the order of the samples"
        )

    def backward(self, total: Tensor, batch_id: int) -> None:
        """Differentiate the summed loss with respect to the sites; no parameter's .grad is touched."""
        for name, (_, tensor, version) in self._edges.items():
            if version is not None and tensor._version != version:
                raise RuntimeError(
                    f"site {name!r} is a view that was changed in place afterwards, so its own gradient is lost; "
                    "harvest the output of the module that computed it"
                )
        names, edges = list(self._edges), [edge for edge, _, _ in self._edges.values()]
        try:
            gradients = torch.autograd.grad(total, edges, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise RuntimeError(
                "the model uses reentrant checkpointing, which cannot differentiate with respect to activations; "
                "switch it off or use use_reentrant=False"
            ) from error
        self._edges = {}
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                raise RuntimeError(f"site {name!r} has no gradient in batch {batch_id}: the loss does not depend on it")
            self._copy(name, "gradients", gradient)

    def _pre_hook(self, site: Site) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._visit(site, "in", (args, kwargs))

        return hook

    def _post_hook(self, site: Site) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            first = self._recording and not self._fired[site.name]
            if first and site.kind == "weight" and "activations" in self.collect:
                tensor, _ = locate(site, "in", (args, kwargs), self._n_samples)
                self._copy(site.name, "activations", tensor)
            return self._visit(site, "out", output)

        return hook

    def _visit(self, site: Site, kind: str, tree: Any) -> Any:
        """Copy the site's rows and note its edge in the graph; return a new tree if the graph needs another tensor."""
        if self._recording:
            self._fired[site.name] += 1
            if self._fired[site.name] > 1:
                return None
        tensor, paths = locate(site, kind, tree, self._n_samples)
        if self._recording and site.decoder:
            self._check_decoder(site, tuple(tensor.shape[:-1]))
        if self._recording and site.kind != "weight" and "activations" in self.collect:
            self._copy(site.name, "activations", tensor)
        if "gradients" not in self.collect:
            return None
        if not torch.is_grad_enabled():
            self._no_graph.add(site.name)
            return None
        given = self._track(site.name, kind, tensor)
        if given is tensor:
            return None
        for path in paths:
            tree = _replace(tree, path, given)
        return tree

    def _track(self, name: str, kind: str, tensor: Tensor) -> Tensor:
        given, version = tensor, None
        if not tensor.requires_grad:
            # Nothing upstream is trainable: start a graph here. The clone lets what follows work in place.
            tensor = tensor.detach().requires_grad_(True)
            given = tensor.clone()
        elif tensor._is_view():
            # An in-place operation on a view cuts its edge out of the graph: hand a clone on, or, for an input, which
            # others may hold as well, refuse when that happens.
            given = tensor.clone() if kind == "out" else tensor
            version = tensor._version
        if self._recording:
            # The edge, unlike the tensor, still means this very place after an in-place operation.
            edge = tensor if tensor.is_leaf else get_gradient_edge(tensor)
            self._edges[name] = (edge, tensor, version)
        return given

    def _check_decoder(self, site: Site, grid: tuple[int, ...]) -> None:
        """Refuse to label rows of a decoder with the encoder's tokens and mask, if the shapes happen to agree."""
        if any(known is not None and known.shape == grid for known in (self._rows.token_ids, self._rows.real)):
            raise ValueError(
                f"site {site.name!r} is not in the encoder, but input_ids and attention_mask of the batch are the "
                f"encoder's, and as long as its rows (shape {grid}), so rows would get the wrong tokens; give them "
                "other names in the batch and pass them to the model in a loss of your own (loss=callable)"
            )

    def _copy(self, name: str, kind: str, tensor: Tensor) -> None:
        selection = self._rows.select(tuple(tensor.shape[:-1]), name)
        index = torch.from_numpy(selection.keep).to(tensor.device)
        # Indexing copies, so what the model does in place later cannot reach these rows.
        rows = tensor.detach().reshape(-1, tensor.shape[-1])[index].to(torch.float32)
        bad = int((~torch.isfinite(rows)).sum())
        if bad:
            raise ValueError(
                f"the {kind} of site {name!r} hold {bad} values that are not finite in float32, in batch "
                f"{self._rows.batch_id}; look for overflow in half precision, or mask the rows with mask=callable"
            )
        if selection.chosen is not None:
            rows = rows[torch.from_numpy(selection.chosen).to(rows.device)]
        lost = None if self._warned_underflow else underflow(rows, kind, tensor.dtype, self.dtype)
        if lost:
            self._warned_underflow = True
            warn_user(f"all {kind} of site {name!r} in batch {self._rows.batch_id} are 0 in float16, {lost}")
        self.arrays[name, kind] = rows.cpu().numpy()


def _random_states() -> list[Tensor]:
    """Return the states of torch's own generators, of the CPU and of every CUDA device in use."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [generator.get_state() for generator in (torch.default_generator, *cuda)]
