"""Hooks that capture the rows of the sites."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from isogeom._validation import warn_user
from isogeom.gradients._locate import locate, replace, tensors
from isogeom.gradients._sampling import BatchRows, Selection
from isogeom.gradients._seq2seq import TwoSides
from isogeom.gradients._sites import Site
from isogeom.gradients._underflow import underflow

_NOT_FIRED = (
    "it was not called in this forward pass; or its parent uses its weight without calling it (nn.MultiheadAttention "
    "does so with out_proj), calls its .forward() directly, is compiled, or it is a container such as nn.ModuleList"
)
_FIRED_AGAIN = "it is a shared module called several times per forward pass, or the loss calls the model several times"


class Capture:
    """Hooks that copy rows at the sites, for the batch given to `begin`."""

    def __init__(
        self, sites: list[Site], collect: frozenset[str], dtype: str = "float32", encoder: nn.Module | None = None
    ) -> None:
        self.sites = sites
        self.collect = collect
        self.dtype = dtype  # how the rows will be stored
        self.encoder = encoder  # that of an encoder-decoder model
        self.arrays: dict[tuple[str, str], NDArray[Any]] = {}
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
        if self.encoder is not None and any(site.side == "decoder" for site in self.sites):
            # Last, so that it sees what the hooks before it return.
            stack.callback(self.encoder.register_forward_hook(self._note_encoder).remove)

    def _note_encoder(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._recording:
            self._encoded += [tensor for _, tensor in tensors(output) if tensor.is_floating_point()]

    def begin(self, rows: BatchRows | TwoSides, n_samples: int) -> None:
        """Start the forward pass of a batch."""
        self._rows, self._n_samples = rows, n_samples
        self.arrays = {}
        self._fired: Counter[str] = Counter()
        self._no_graph: set[str] = set()
        self._edges: dict[str, tuple[Any, Tensor, int | None]] = {}
        self._sides: dict[str, str] = {}
        self._encoded: list[Tensor] = []  # what the encoder returned
        self._ignored: dict[str, Tensor] = {}  # tokens that add nothing to the weight of an embedding
        self._random = None if self._warned else _random_states()
        self._recording = True

    def end_forward(self, batch_id: int) -> None:
        """Stop recording, so that recomputation by checkpoints is not counted, and check that each site fired once."""
        self._recording, self._encoded = False, []
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
                raise RuntimeError(
                    f"site {name!r} has no gradient in batch {batch_id}: the loss does not depend on it, or only "
                    "through what has no derivative (detached tensors, argmax, the quantised layers of torch.ao)"
                )
            if name in self._ignored:
                gradient = gradient.masked_fill(self._ignored[name][..., None], 0)
            self._copy(name, "gradients", gradient)

    def _pre_hook(self, site: Site) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._recording and not self._fired[site.name]:
                self._note_side(site, "in", (args, kwargs), (args, kwargs))
            return self._visit(site, "in", (args, kwargs))

        return hook

    def _post_hook(self, site: Site) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self._recording and not self._fired[site.name]:
                self._note_side(site, "out", output, (args, kwargs))
                if site.is_table:
                    self._copy_ids(site, (args, kwargs), output)
                elif site.kind == "weight" and "activations" in self.collect:
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
        if self._is_encoded(tensor):
            self._encoded.append(given)
        for path in paths:
            tree = replace(tree, path, given)
        return tree

    # ------------------------------------------------------------------ encoder-decoder models

    def _note_side(self, site: Site, kind: str, tree: Any, inputs: Any) -> None:
        """Note whose rows a site of an encoder-decoder model gives, the encoder's or the decoder's."""
        if site.side is None or not isinstance(self._rows, TwoSides):
            return
        side = site.side
        if side == "decoder":
            tensor, _ = locate(site, kind, tree, self._n_samples)
            # A module behind the encoder that reads nothing but its output, keys and values of a cross-attention.
            read = [] if kind == "in" else [t for _, t in tensors(inputs) if t.ndim in (2, 3)]
            if self._is_encoded(tensor) or (read and all(map(self._is_encoded, read))):
                side = "encoder"
            else:
                grid = tuple(tensor.shape[:-1])
                side = self._rows.side_of(site.name, grid, encoder_ran=bool(self._encoded))
        self._sides[site.name] = side

    def _is_encoded(self, tensor: Tensor) -> bool:
        return any(tensor is state for state in self._encoded)

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

    # ------------------------------------------------------------------ rows

    def _select(self, name: str, grid: tuple[int, ...]) -> Selection:
        if isinstance(self._rows, TwoSides):
            return self._rows.select(grid, name, self._sides[name])
        return self._rows.select(grid, name)

    def _copy_ids(self, site: Site, inputs: Any, output: Any) -> None:
        """Copy the ids that an embedding looks up: the places of the ones in its factor rows x_t."""
        ids = next((tensor for _, tensor in tensors(inputs)), None)
        tensor, _ = locate(site, "out", output, self._n_samples)
        if ids is None or ids.shape != tensor.shape[:-1]:
            raise ValueError(f"site {site.name!r}: the embedding was not called with one id per row of its output")
        padding: Any = site.module.padding_idx
        if padding is not None:
            self._ignored[site.name] = ids == padding
        if "activations" not in self.collect:
            return
        selection = self._select(site.name, tuple(ids.shape))
        rows = ids.reshape(-1).cpu().numpy().astype(np.int64)[selection.keep, None]
        self.arrays[site.name, "activations"] = rows if selection.chosen is None else rows[selection.chosen]

    def _copy(self, name: str, kind: str, tensor: Tensor) -> None:
        selection = self._select(name, tuple(tensor.shape[:-1]))
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
