"""Layouts that a shape does not show: maps with channels first, and the decoder of an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_CHANNELS_FIRST = (
    nn.Conv1d,
    nn.ConvTranspose1d,
    nn.BatchNorm1d,
    nn.InstanceNorm1d,
    nn.GroupNorm,
    nn.AvgPool1d,
    nn.MaxPool1d,
    nn.LPPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
    nn.Dropout1d,
)
# These work on numbers one by one, so they keep the layout of what comes before or behind them.
_POINTWISE = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "torch.nn.modules.linear.Identity")


def channels_first(modules: Mapping[str, nn.Module], name: str, kind: str) -> str | None:
    """Name the class of layer that makes the 3-D tensors of a site (batch, channels, length), if one is known to."""
    layer = _edge(modules[name], kind)
    parent, _, child = name.rpartition(".")
    stack = modules.get(parent)
    if layer is not None and _is_pointwise(layer) and name and isinstance(stack, nn.Sequential):
        # An activation says nothing: ask the layer before it in the same chain.
        before = list(stack)[: list(stack._modules).index(child)]
        layer = _last(before)
    return type(layer).__name__ if isinstance(layer, _CHANNELS_FIRST) else None


def _edge(module: nn.Module, kind: str) -> nn.Module | None:
    """Return the layer of a chain that the site belongs to: its first for an input, its last for an output."""
    if not isinstance(module, nn.Sequential) or not len(module):
        return module
    return _last(list(module)[::-1] if kind == "in" else list(module))


def _last(layers: list[nn.Module]) -> nn.Module | None:
    """Return the last layer that is not pointwise, looking into chains."""
    for layer in reversed(layers):
        found = _last(list(layer)) if isinstance(layer, nn.Sequential) else layer
        if found is not None and not _is_pointwise(found):
            return found
    return None


def _is_pointwise(layer: nn.Module) -> bool:
    if isinstance(layer, (*_CHANNELS_FIRST, nn.MultiheadAttention)):
        return False
    return f"{type(layer).__module__}.{type(layer).__name__}".startswith(_POINTWISE)


def encoder_of(model: nn.Module) -> nn.Module | None:
    """Return the encoder of an encoder-decoder model of transformers, None for other models."""
    for module in model.modules():
        getter = getattr(module, "get_encoder", None)
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False) and callable(getter):
            encoder = getter()
            return encoder if isinstance(encoder, nn.Module) and encoder is not module else None
    return None


def encoder_prefix(model: nn.Module) -> str | None:
    """Return the dotted name of the encoder of an encoder-decoder model, None for other models."""
    encoder = encoder_of(model)
    return next((name for name, module in model.named_modules() if module is encoder), None)
