"""Randomly initialised tiny language models of real families, with a word-level tokenizer: everything made here."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
WORDS = SPECIAL + [f"w{i}" for i in range(123)]
TEXT = " ".join(f"w{(7 * i * i + i) % 123}" for i in range(3000))
FAMILIES = {
    "gpt_neox": ("GPTNeoX", "causal-lm", {}),
    "llama": ("Llama", "causal-lm", {"num_key_value_heads": 2}),
    "olmo": ("Olmo", "causal-lm", {}),
    "eurobert": ("EuroBert", "masked-lm", {"mask_token_id": 4}),
    "modernbert": ("ModernBert", "masked-lm", {"cls_token_id": 1, "sep_token_id": 2}),
    "camembert": ("Camembert", "masked-lm", {}),
}


def make_tokenizer(template=True, **changes):
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if template:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>", "cls": "<s>", "sep": "</s>"}
    special = {f"{name}_token": token for name, token in (names | changes).items() if token is not None}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def make_model(family, seed=0, **changes):
    name, kind, extra = FAMILIES[family]
    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **extra, **changes})
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}For{'CausalLM' if kind == 'causal-lm' else 'MaskedLM'}")(config).eval()


def save_checkpoints(folder, family, revisions):
    """Save one model per revision, with different weights, in sub-folders, and the tokenizer beside them."""
    for seed, revision in enumerate(revisions):
        make_model(family, seed).save_pretrained(folder / revision)
    make_tokenizer().save_pretrained(folder)
    return folder
