"""Sites: naming places in a model."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from isogeom._validation import warn_user
from isogeom.gradients._layouts import channels_first, encoder_prefix

_SUFFIX = re.compile(r"(in|out)((?:\[[^\[\]]+\])*)|(weight)")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclasses.dataclass(frozen=True)
class Site:
    """A place in a model: the input, the output or the weight of a module."""

    name: str
    module: nn.Module
    kind: str
    selectors: tuple[str, ...]
    maps: str | None = None  # class of the layer whose 3-D tensors are (batch, channels, length)
    side: str | None = None  # in an encoder-decoder model: "encoder", or "decoder" for all behind it
    tied: tuple[str, ...] = ()  # of a weight: the other modules that have it too

    @property
    def is_table(self) -> bool:
        """Whether the site is the weight of an embedding, whose factor rows are token ids and not inputs."""
        return self.kind == "weight" and isinstance(self.module, nn.Embedding)


def resolve_sites(model: nn.Module, sites: Iterable[str]) -> list[Site]:
    """Parse site strings, expand globs and look the modules up; duplicates are dropped, the order kept."""
    if isinstance(sites, str) or not isinstance(sites, Iterable):
        raise TypeError(f"sites must be a list of strings, got {sites!r}; for one site pass a list with one string")
    if isinstance(sites, Mapping) and all(isinstance(value, str) for value in sites.values()):
        raise TypeError(
            f"sites is a {type(sites).__name__} of names to sites: pass its .values(), list(sites.values())"
        )
    if isinstance(sites, (set, frozenset)):
        raise TypeError("sites is a set, whose order changes from run to run: pass a list, for instance sorted(sites)")
    modules = dict(model.named_modules(remove_duplicate=False))
    encoder = encoder_prefix(model)
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
                side=None if encoder is None else _side(name, selectors, encoder),
                tied=_tied(modules[name], modules) if kind == "weight" else (),
            )
            found.setdefault((name, kind, selectors), site)
    if not found:
        raise ValueError("sites is empty: name at least one module, for instance sites=['blocks.0']")
    asked = [site.module for site in found.values() if site.kind == "weight"]
    for site in found.values():
        _report_tied(site, [name for name in site.tied if not any(modules[name] is module for module in asked)])
    return list(found.values())


def _side(name: str, selectors: tuple[str, ...], encoder: str) -> str:
    inside = f"{name}.".startswith(f"{encoder}.") or any(selector.startswith("encoder") for selector in selectors)
    return "encoder" if inside else "decoder"


def _tied(owner: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the other modules that have the weight of a module, each by its first name."""
    weight = owner._parameters.get("weight")
    others: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if weight is not None and module is not owner and any(p is weight for p in module._parameters.values()):
            others.setdefault(module, name)
    return tuple(others.values())


def _report_tied(site: Site, others: list[str]) -> None:
    """Warn that the weight of a ":weight" site is used by others too, which are no sites of the call."""
    if others:
        which = "" if len(others) == 1 else " that the model calls"
        warn_user(
            f"the weight of site {site.name!r} is tied: it is that of {', '.join(map(repr, others))} as well. The rows "
            "are what this use adds to its gradient, which is the sum over all uses; add the others"
            f"{which} to sites, for instance '{others[-1]}:weight'"
        )


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
    if kind == "weight" and isinstance(module, nn.Embedding):
        _check_table(module, name)
        return
    # transformers is not a dependency of this sub-package, so its Conv1D is known by name and by its 2-D weight.
    named = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    linear = isinstance(module, nn.Linear) or (named and getattr(module, "weight", torch.empty(0)).ndim == 2)
    if kind == "weight" and not linear:
        raise TypeError(
            f"site {name!r}: ':weight' gives the factor rows of nn.Linear, transformers' Conv1D and nn.Embedding only, "
            f"not of {_class_name(module)}"
        )
    if kind == "weight" and isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        warn_user(
            f"site {name!r}: {type(module).__name__} has a forward() of its own; its inputs and output gradients are "
            "factors of its weight's gradient only if it multiplies its input by this weight, unscaled"
        )


def _class_name(module: nn.Module) -> str:
    """Return the name of a class, with its home where the bare name would mislead: torch.ao has a Linear too."""
    name = type(module).__name__
    return f"{type(module).__module__}.{name}" if hasattr(nn, name) and type(module) is not getattr(nn, name) else name


def _check_table(module: nn.Embedding, name: str) -> None:
    """Refuse the embeddings whose weight gradient is not a sum of output gradients by token."""
    if type(module).forward is not nn.Embedding.forward:
        raise TypeError(
            f"site {name!r}: {type(module).__name__} has a forward() of its own, which may scale its rows or look up "
            "others than its input says, so ids and output gradients are no factors of its gradient; harvest its output"
        )
    if module.scale_grad_by_freq:
        raise ValueError(
            f"site {name!r}: scale_grad_by_freq=True divides the gradient of a token by its count in the batch, so no "
            "sample has a gradient of its own; set module.scale_grad_by_freq = False"
        )
