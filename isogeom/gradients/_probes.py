"""Where to look in a language model: the probes of the tangent-alignment study, found from the module tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

__all__ = ["first_linear", "probes", "weight_sites"]


def _is_linear(module: nn.Module) -> bool:
    """Tell linear maps with a weight of their own, GPT-2's transposed ``Conv1D`` included."""
    # By name: importing transformers here would make it a requirement of every torch user.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm")


def _join(parent: str, child: object) -> str:
    return f"{parent}.{child}" if parent else str(child)


def _outermost(names: list[str]) -> list[str]:
    """Drop every name that lies inside another one: the experts of a block are no blocks."""
    return [name for name in names if not any(other != name and _inside(name, other) for other in names)]


def _inside(name: str, parent: str) -> bool:
    return parent == "" or name == parent or name.startswith(f"{parent}.")


class Probes(dict[str, str]):
    """Probes by name, and the lists of modules among which the blocks were sought; see :func:`probes`.

    Attributes
    ----------
    lists : dict of str to str
        Dotted name of every ``nn.ModuleList`` (and, if none of them holds blocks, every ``nn.Sequential``) to what is
        in it, as ``"12 x Block"``.
    """

    lists: dict[str, str]

    def __missing__(self, name: str) -> str:
        known = ", ".join(map(repr, self)) or "none"
        raise KeyError(f"the model has no probe {name!r}; found: {known}. {_listed(self.lists)}")

    def __repr__(self) -> str:
        return super().__repr__() if "T1_in" in self else f"Probes({super().__repr__()}, lists={self.lists!r})"


def _listed(lists: dict[str, str]) -> str:
    shown = "; ".join(f"{name or 'the model itself'}: {members}" for name, members in lists.items())
    return f"Lists of modules: {shown or 'none'}. Name the sites by hand instead, e.g. 'encoder.3:in'"


def _members(stack: nn.ModuleList | nn.Sequential) -> str:
    counts = Counter(type(member).__name__ for member in stack)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "empty"


def _block_lists(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Return the dotted names of the transformer blocks, first to last, none if unknown; and the lists looked at."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    found: dict[str, str] = {}
    # Some vision models keep blocks in an nn.Sequential, which elsewhere is a mere chain of layers: it comes second.
    for container in (nn.ModuleList, nn.Sequential):
        lists = {name: module for name, module in model.named_modules() if isinstance(module, container)}
        found |= {name: _members(blocks) for name, blocks in lists.items()}
        uniform = [name for name, blocks in lists.items() if _is_stack(blocks, container)]
        # A list of one is taken only when nothing longer exists: it may be a mere wrapper around the real stack.
        candidates = _outermost([name for name in uniform if len(lists[name]) > 1]) or _outermost(uniform)
        if candidates:
            best = max(candidates, key=lambda name: len(lists[name]))
            return [_join(best, i) for i in range(len(lists[best]))], found
    return [], found


def _block_names(model: nn.Module) -> list[str]:
    """Return the dotted names of the transformer blocks, first to last."""
    blocks, lists = _block_lists(model)
    if not blocks:
        raise ValueError(
            "model has no nn.ModuleList or nn.Sequential of blocks of one class with linear layers in them. "
            f"{_listed(lists)}."
        )
    return blocks


def _is_stack(blocks: nn.ModuleList | nn.Sequential, container: type[nn.Module]) -> bool:
    """Tell a stack of blocks: one class, with linear layers inside; in a Sequential these must not be the blocks."""
    if len({type(block) for block in blocks}) != 1:
        return False
    if container is nn.Sequential and (len(blocks) < 2 or any(map(_is_linear, blocks))):
        return False
    return any(_is_linear(module) for module in blocks.modules())


def _token_embedding(model: nn.Module, blocks: list[str]) -> str | None:
    """Return the name of the token embedding: what the model itself declares, else its largest table."""
    names = {module: name for name, module in model.named_modules()}
    declared = None
    if callable(getter := getattr(model, "get_input_embeddings", None)):
        try:
            declared = getter()
        except (NotImplementedError, AttributeError):  # models that cannot say; the largest table is the token table
            declared = None
    if declared in names:
        # Encoder-decoder models declare a table that they may never call: their stacks hold tables with its weight.
        weight = getattr(declared, "weight", None)
        home = blocks[0].rpartition(".")[0].rpartition(".")[0] if blocks else ""
        same = [name for module, name in names.items() if isinstance(module, nn.Embedding) and module.weight is weight]
        beside = [name for name in same if home and _inside(name, home)]
        return beside[0] if beside else names[declared]
    tables = {
        name: module.num_embeddings
        for module, name in names.items()
        if isinstance(module, nn.Embedding) and not any(_inside(name, block) for block in blocks)
    }
    return max(tables, key=lambda name: tables[name]) if tables else None


def _embedding_sites(model: nn.Module, blocks: list[str]) -> dict[str, str]:
    """Return the sites of the embedding stage, none where the model has no embedding."""
    token = _token_embedding(model, blocks)
    if token is None:
        return {}
    # The stage is the largest module around the token table without a block in it: BERT's `embeddings`, in GPT-2 the
    # bare table.
    parts = token.split(".")
    parents = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    # Without blocks, nothing tells how far the stage reaches.
    stage = next((name for name in parents if blocks and not _inside(blocks[0], name)), token)
    inside = model.get_submodule(stage).named_modules()
    norms = [_join(stage, name) for name, module in inside if name and _is_norm(module)]
    # With several norms it is not clear which one sees the sum, so the probe is left out rather than guessed.
    before = {"E0_in": f"{norms[0]}:in"} if len(norms) == 1 else {}
    return {**before, "E0_out": stage}


def probes(model: nn.Module) -> Probes:
    """Name the probes of the tangent-alignment study in a transformer.

    Parameters
    ----------
    model : torch.nn.Module
        Any transformer whose blocks stand in one ``nn.ModuleList`` or ``nn.Sequential``: GPT-2, GPT-NeoX, Llama, OLMo,
        BERT, CamemBERT, ModernBERT, EuroBERT, ``nn.TransformerEncoder`` and most hand-written ones. It is neither run
        nor changed.

    Returns
    -------
    Probes, a dict of str to str
        Probe name to harvest site, in this order, without those that the model does not have or does not show; its
        attribute ``lists`` names the lists of modules among which the blocks were sought:

        - ``"E0_in"``: the summed embeddings before the embedding norm (only where the embedding stage is a module of
          its own with one norm in it);
        - ``"E0_out"``: the output of the embedding stage, or of the token embedding where that stands alone (absent
          from models without an embedding);
        - ``"T1_in"``, ``"T1_out"``: input and output of the first block;
        - ``"Tm"``, ``"Tl"``: input of the middle block (``n // 2``) and of the last one.

        Where no list of blocks is found, ``E0_out`` at most is there, and printing it shows the lists.

    Raises
    ------
    TypeError
        If ``model`` is no module.
    KeyError
        On access to a probe that the model does not have; the message lists what there is.

    Notes
    -----
    A site is ``"module.path"`` for an output and ``"module.path:in"`` for the one floating input of shape
    (batch, seq, d); where a block has several, as in a decoder that reads an encoder, use ``":in[0]"``. The block list
    is the longest of the outermost ``nn.ModuleList`` (without one, ``nn.Sequential``) whose members have one class and
    contain a linear layer, so the experts inside a block are never taken for blocks; between two equally long lists
    (encoder and decoder) the first registered wins. With one or two blocks some probes coincide.

    Examples
    --------
    >>> from torch import nn
    >>> from isogeom.gradients import probes
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm, self.project = nn.LayerNorm(8), nn.Linear(8, 8)
    ...     def forward(self, x):
    ...         return x + self.project(self.norm(x))
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.tokens = nn.Embedding(50, 8)
    ...         self.blocks = nn.ModuleList(Block() for _ in range(4))
    >>> for name, site in probes(Model()).items():
    ...     print(name, site)
    E0_out tokens
    T1_in blocks.0:in
    T1_out blocks.0
    Tm blocks.2:in
    Tl blocks.3:in
    """
    blocks, lists = _block_lists(model)
    found = Probes(_embedding_sites(model, blocks))
    found.lists = lists
    if blocks:
        found |= {
            "T1_in": f"{blocks[0]}:in",
            "T1_out": blocks[0],
            "Tm": f"{blocks[len(blocks) // 2]}:in",
            "Tl": f"{blocks[-1]}:in",
        }
    return found


def _consumer(blocks: list[str], site: str) -> str:
    """Return the block that reads a block site: its own for an input, the next one for an output."""
    name, _, suffix = site.partition(":")
    if name not in blocks or suffix not in ("", "in"):
        raise ValueError(f"site={site!r} is no input or output of a block {blocks[0]!r} to {blocks[-1]!r}.")
    place = blocks.index(name) + (suffix == "")
    if place == len(blocks):
        raise ValueError(f"site={site!r} is the output of the last block, which no block reads; use '{name}:in'.")
    return blocks[place]


def _executed(model: nn.Module, modules: dict[str, nn.Module], forward: Callable[[nn.Module], object]) -> list[str]:
    """Return the names of the modules in the order in which one forward pass enters them."""
    order: list[str] = []
    handles = []
    try:
        for name, module in modules.items():
            handles.append(module.register_forward_pre_hook(lambda _module, _args, name=name: order.append(name)))
        forward(model)
    finally:
        for handle in handles:
            handle.remove()
    return order


def first_linear(model: nn.Module, site: str, forward: Callable[[nn.Module], object] | None = None) -> str:
    """Name the first linear layer that consumes a block's input or output.

    Parameters
    ----------
    model : torch.nn.Module
        The transformer, as in :func:`probes`.
    site : str
        ``"<block>:in"``, read by that block, or ``"<block>"``, its output, read by the next block.
    forward : callable, optional
        ``forward(model)`` runs the model once; the answer is then the first linear layer that is *executed*. Without it
        the order of registration decides, which is the order of execution in the common families and can differ in
        others: OPT registers ``k_proj`` before ``q_proj`` (both read the same tensor), and a hand-written block
        may register its feed-forward part before its attention (which does not).

    Returns
    -------
    str
        Dotted name of an ``nn.Linear`` (or of transformers' ``Conv1D``).

    Raises
    ------
    ValueError
        If ``site`` is no block site, if the block holds or runs no linear layer, or if its first linear map lies inside
        ``nn.MultiheadAttention``, which multiplies by bare parameters that no hook on a module can see.

    Examples
    --------
    >>> from torch import nn
    >>> from isogeom.gradients import first_linear
    >>> layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
    >>> model = nn.ModuleDict({"layers": layers})
    >>> first_linear(model, "layers.0:in"), first_linear(model, "layers.0")
    ('layers.0.1', 'layers.1.1')
    """
    block = _consumer(_block_names(model), site)
    modules = {
        _join(block, name): module
        for name, module in model.get_submodule(block).named_modules()
        if name and (_is_linear(module) or isinstance(module, nn.MultiheadAttention))
    }
    if _is_linear(model.get_submodule(block)):
        modules = {block: model.get_submodule(block)}
    order = list(modules) if forward is None else _executed(model, modules, forward)
    if not order:
        verb = "holds" if forward is None else "ran"
        raise ValueError(f"{block!r}, which reads site={site!r}, {verb} no linear layer.")
    if isinstance(modules[order[0]], nn.MultiheadAttention):
        raise ValueError(
            f"{order[0]!r}, which reads site={site!r} first, is an nn.MultiheadAttention: its input projection is a "
            "bare parameter, so there is no linear module to observe. Use an attention with nn.Linear projections."
        )
    return order[0]


def weight_sites(model: nn.Module, forward: Callable[[nn.Module], object] | None = None) -> dict[str, str]:
    """Name the weight-gradient site of every block probe.

    Parameters
    ----------
    model : torch.nn.Module
        The transformer, as in :func:`probes`.
    forward : callable, optional
        As in :func:`first_linear`: find the layers by one run of the model instead of by order of registration.

    Returns
    -------
    dict of str to str
        ``"T1_in"``, ``"T1_out"`` (absent with a single block), ``"Tm"`` and ``"Tl"`` to ``"<linear>:weight"``.

    Raises
    ------
    ValueError
        As :func:`probes` and :func:`first_linear`.

    Examples
    --------
    >>> from torch import nn
    >>> from isogeom.gradients import weight_sites
    >>> layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))
    >>> weight_sites(nn.ModuleDict({"layers": layers}))["T1_out"]
    'layers.1.1:weight'
    """
    blocks = _block_names(model)
    named = {name: site for name, site in probes(model).items() if name.startswith("T")}
    if len(blocks) == 1:
        del named["T1_out"]
    return {name: f"{first_linear(model, site, forward)}:weight" for name, site in named.items()}
