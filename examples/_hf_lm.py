"""Any Hugging Face causal or masked language model, two of its checkpoints and a text, ready for the study.

Needs the ``hf`` extra; it is imported only when a function here is called. Remote code is never run.
"""

from __future__ import annotations

import copy
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _tiny_lm import spread_windows
from torch import nn

MASKED_SHARE = 0.15
IGNORED = -100  # transformers' and torch's label for a position without a loss
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("Hugging Face models need transformers: pip install 'isogeom[hf]'.") from error
    return transformers


def _locate(path_or_name: str | Path, revision: str | None) -> tuple[str, dict[str, str]]:
    """Return what to load and with which keywords; on disk a revision is a sub-folder."""
    path = Path(path_or_name).expanduser()
    if not path.is_dir():
        if str(path_or_name).startswith((".", "/", "~")):
            raise FileNotFoundError(f"{path_or_name} is no folder; give a saved model's folder or a model's name.")
        return str(path_or_name), {} if revision is None else {"revision": revision}
    if revision is None:
        return str(path), {}
    # transformers ignores a revision on disk, which would load the same weights twice.
    if not (path / revision / "config.json").is_file():
        found = sorted(entry.name for entry in path.iterdir() if (entry / "config.json").is_file())
        raise ValueError(
            f"revision={revision!r}: {path} is a local folder, so a revision names a saved model in a sub-folder of "
            f"it, and there is none of that name. Sub-folders with a model: {', '.join(found) or 'none'}."
        )
    return str(path / revision), {}


def _kind(config: Any) -> str:
    """Return ``"causal-lm"`` or ``"masked-lm"``: as the checkpoint was saved, else as transformers maps its type."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{config.model_type!r} is an encoder-decoder; give a causal or a masked language model.")
    for architecture in config.architectures or ():
        if architecture.endswith("ForMaskedLM"):
            return "masked-lm"
        if architecture.endswith(("ForCausalLM", "LMHeadModel")):
            return "causal-lm"
    transformers = _transformers()
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    if not causal and not masked:
        raise ValueError(f"{config.model_type!r} is neither a causal nor a masked language model in transformers.")
    # Encoders such as BERT stand in both mappings; they are decoders only where the configuration says so.
    return "causal-lm" if causal and (not masked or getattr(config, "is_decoder", False)) else "masked-lm"


def _load_weights(auto: Any, source: str, keywords: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """Load in float32 with eager attention, the one whose result for a row does not depend on the batch around it."""
    options = {**keywords, "dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
    try:
        return auto.from_pretrained(source, attn_implementation="eager", **options)
    except (TypeError, ValueError):
        return auto.from_pretrained(source, **options)  # an architecture without it; any other error comes up again


def _load_tokenizer(source: str, parent: str, keywords: dict[str, str]) -> Any | None:
    """Return the tokenizer beside the weights or one folder up (checkpoints of one run share it), None without one."""
    auto = _transformers().AutoTokenizer
    if not Path(source).is_dir():
        try:
            return auto.from_pretrained(source, trust_remote_code=False, **keywords)
        except OSError:  # what transformers raises for a repository without tokenizer files
            return None
    for folder in (Path(source), Path(parent).expanduser()):
        if any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return auto.from_pretrained(str(folder), trust_remote_code=False)
    return None


def load_model(path_or_name: str | Path, revision: str | None = None) -> tuple[Any, Any | None, str]:
    """Load one checkpoint of a language model.

    Parameters
    ----------
    path_or_name : str or Path
        A folder written by ``save_pretrained``, or a model's name.
    revision : str, optional
        Branch, tag or commit of a named model; for a folder, the sub-folder that holds the checkpoint.

    Returns
    -------
    model : transformers.PreTrainedModel
        In float32 and eval mode.
    tokenizer : transformers.PreTrainedTokenizerBase or None
    kind : {"causal-lm", "masked-lm"}
        Also the name of the loss in :func:`isogeom.gradients.harvest`.

    Raises
    ------
    ImportError
        Without transformers.
    FileNotFoundError
        If a path was given and is no folder.
    ValueError
        If the revision is no sub-folder, the model no causal or masked language model, or weights are missing.
    """
    transformers = _transformers()
    source, keywords = _locate(path_or_name, revision)
    kind = _kind(transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **keywords))
    auto = transformers.AutoModelForCausalLM if kind == "causal-lm" else transformers.AutoModelForMaskedLM
    model, info = _load_weights(auto, source, keywords)
    if info["missing_keys"]:
        # transformers would fill them at random: a language-model head made of noise gives gradients of noise.
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        raise ValueError(f"{source} holds no weights for {missing}: it was saved without its {kind} head?")
    return model.eval(), _load_tokenizer(source, str(path_or_name), keywords), kind


def check_distinct(early: nn.Module, late: nn.Module) -> None:
    """Make sure that two checkpoints are two states of one architecture.

    Raises
    ------
    ValueError
        If all parameters are equal, or if their names or shapes differ.
    """
    first, second = dict(early.named_parameters()), dict(late.named_parameters())
    if {name: p.shape for name, p in first.items()} != {name: p.shape for name, p in second.items()}:
        raise ValueError("The early and the late model differ in architecture: give two checkpoints of one model.")
    if all(torch.equal(parameter, second[name]) for name, parameter in first.items()):
        raise ValueError(
            "The early and the late model have identical parameters, so the revision was probably ignored. Give two "
            "different checkpoints: two branches or tags of a named model, or two sub-folders of a local one."
        )


def random_like(model: Any, seed: int) -> Any:
    """Return a new model of the same class and configuration, in eval mode; the global RNG is left untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return type(model)(copy.deepcopy(model.config)).eval()


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file, gzip-compressed when its name ends in ``.gz``."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        return file.read()


def longest_context(model: Any) -> int | None:
    """Return how many positions a window may have, None where the configuration sets no limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and CamemBERT count positions from padding_idx + 1 in a table of max_position_embeddings rows.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return module.num_embeddings - module.padding_idx - 1
    return limit


def _special_ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text, by asking it; else its cls and sep tokens."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if len(full) > len(bare) and full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    first, last = ([] if end is None else [end] for end in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    return first, last


def _mask(windows: torch.Tensor, special: list[int], mask_id: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask 15 % of each window's ordinary tokens (at least one); return the ids and the labels."""
    rng = np.random.default_rng(seed)
    # The same number in every window of ordinary tokens, and never a random word instead of the mask: that variant is a
    # remedy for fine-tuning, and here it would only add noise to the gradients.
    ids, labels = windows.clone(), torch.full_like(windows, IGNORED)
    ordinary = ~torch.isin(windows, torch.tensor(special, dtype=torch.int64))
    for row in range(windows.shape[0]):
        places = torch.nonzero(ordinary[row]).flatten().numpy()
        if places.size == 0:
            raise ValueError(f"Window {row} holds special or unknown tokens only: does the tokenizer fit the text?")
        chosen = torch.from_numpy(rng.choice(places, max(1, round(MASKED_SHARE * places.size)), replace=False))
        labels[row, chosen] = windows[row, chosen]
        ids[row, chosen] = mask_id
    return ids, labels


def _mask_id(tokenizer: Any, mask_token: str | None) -> int:
    token = tokenizer.mask_token if mask_token is None else mask_token
    found = None if token is None else tokenizer.get_vocab().get(token)
    if found is None:
        raise ValueError(f"mask_token={token!r} is not in the tokenizer's vocabulary; name the mask it has.")
    return found


def text_batches(
    text: str,
    tokenizer: Any,
    model: Any,
    kind: str,
    *,
    context: int = 64,
    batch_size: int = 4,
    n_batches: int = 40,
    mask_token: str | None = None,
    seed: int = 0,
) -> list[dict[str, torch.Tensor]]:
    """Tokenise a text into windows of equal length, spread evenly over it and kept in its order.

    Parameters
    ----------
    text : str
    tokenizer : transformers.PreTrainedTokenizerBase
    model : transformers.PreTrainedModel
        Sets the largest context and the size of the vocabulary; it is not run.
    kind : {"causal-lm", "masked-lm"}
        A masked model's windows carry the special tokens of its tokenizer at both ends, and 15 % of their ordinary
        tokens are masked. A causal model's windows are bare text.
    context : int
        Tokens in a window, the special ones included.
    batch_size, n_batches : int
    mask_token : str, optional
        The mask, where the tokenizer does not declare one.
    seed : int
        Fixes which tokens are masked.

    Returns
    -------
    list of dict
        ``input_ids``, ``attention_mask`` (all ones: there is no padding) and ``labels``, each of shape
        (batch_size, context), int64. ``labels`` is -100 where there is no loss.

    Raises
    ------
    ValueError
        If the text is too short, the context too long for the model or too short for the special tokens, the tokenizer
        absent or unfit for the model, or no mask token known.
    """
    if kind not in ("causal-lm", "masked-lm"):
        raise ValueError(f"kind={kind!r} must be 'causal-lm' or 'masked-lm'.")
    if tokenizer is None:
        raise ValueError("No tokenizer was found with the model: save one beside the checkpoint or one folder above.")
    limit = longest_context(model)
    if limit is not None and context > limit:
        raise ValueError(f"context={context} is longer than the {limit} positions of the model; lower it.")
    masked = kind == "masked-lm"
    before, after = _special_ends(tokenizer) if masked else ([], [])
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    n_ends = len(before) + len(after)
    if context < n_ends + 2:
        raise ValueError(
            f"context={context} must be at least {n_ends + 2}: {n_ends} special tokens and two of the text."
        )
    windows = spread_windows(ids, context - n_ends, batch_size * n_batches)
    ends = [torch.tensor(end, dtype=torch.int64).expand(windows.shape[0], -1) for end in (before, after)]
    windows = torch.cat([ends[0], windows, ends[1]], dim=1)
    labels = windows.clone()
    if masked:
        windows, labels = _mask(windows, tokenizer.all_special_ids, _mask_id(tokenizer, mask_token), seed)
    highest, n_rows = int(torch.maximum(windows, labels).max()), model.get_input_embeddings().num_embeddings
    if highest >= n_rows:
        raise ValueError(f"The tokenizer gives ids up to {highest}, beyond the {n_rows} tokens of the model.")
    return [
        {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": targets}
        for rows, targets in zip(windows.split(batch_size), labels.split(batch_size), strict=True)
    ]
