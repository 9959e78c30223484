"""Small models of every architecture, and their exported pages."""

from pathlib import Path
from typing import Any

from models import make_model

from minigpt import GPT
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.checkpoints.load import save_checkpoint
from minigpt.data.tokenizer import CharTokenizer, Tokenizer
from minigpt.extras.playground.export_html import export_html

CHARACTERS = CharTokenizer("".join(map(chr, range(32, 127))))  # 95 ids
BASE = {"block_size": 40, "vocab_size": 101, "n_layer": 2, "n_head": 4, "n_embd": 32}
LLAMA = {"norm": "rmsnorm", "position": "rope", "bias": False, "activation": "swiglu"}
NANOCHAT = {**LLAMA, "norm": "rmsnorm_noscale", "activation": "relu2"}
NANOCHAT |= {"qk_norm": True, "embed_norm": True}
MUP = {"parametrization": "mup", "base_n_embd": 24, "base_head_dim": 4}
SCALED = {"rope_base": 300.0, "rope_factor": 4.0, "rope_original_block_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {"activation": "gelu_tanh"},
    "GPT-2, untied": {"tie_embeddings": False, "n_inner": 42},
    "an odd number of learned positions": {
        "block_size": 7,
        "smear": 1,
        "ngram": 3,
        "ngram_buckets": 50,
    },
    "one position": {"block_size": 1, "position": "rope"},
    "no positions": {"position": "none", "activation": "relu"},
    "rope, and biases of queries, keys and values": {
        "position": "rope",
        "bias": False,
        "qkv_bias": True,
    },
    "Llama": {**LLAMA, "tie_embeddings": False},
    "Llama, one key-value head": {**LLAMA, "n_kv_head": 1, "norm_eps": 1e-2},
    "Llama, a wider head": {**LLAMA, "n_kv_head": 2, "head_dim": 10, "n_inner": 40},
    "Llama 3, scaled rope": {**LLAMA, **SCALED},
    "Llama 3, other factors": {
        **LLAMA,
        **SCALED,
        "rope_low_freq_factor": 0.5,
        "rope_high_freq_factor": 2.0,
    },
    "Qwen3": {**LLAMA, "qk_norm": True, "qk_norm_weights": True, "n_kv_head": 2},
    "NanoChat": {**NANOCHAT, "logit_softcap": 2.0},
    "post-norm": {"norm_position": "post"},
    "mup": MUP,
    "shared layers": {"position": "rope", "n_layer": 6, "layer_repeats": 3},
    "n-grams": {"position": "none", "ngram": 5, "ngram_buckets": 1009, "ngram_dim": 6},
    "smear": {"position": "rope", "smear": 3},
    "fast_cpu": {**NANOCHAT, "tie_embeddings": False, "ngram": 5, "ngram_buckets": 512, "smear": 2},
}


# Return a model of `BASE` and these values with random weights
def random_model(**values: Any) -> GPT:
    return make_model(**{**BASE, **values})


def export(
    model: GPT, tokenizer: Tokenizer, folder: Path, weights: str = "float32", **options: Any
) -> Path:
    save_checkpoint(model, tokenizer, folder / "model.safetensors")
    page = folder / f"{weights}.html"
    export_html(find_pretrained(folder / "model.safetensors"), page, weights, **options)
    return page


# Scripts for the page. The tokens that follow a prompt; arguments: ids, settings.
SAMPLE = """
const given = arguments;
return (async () => {
  const tokens = [];
  for await (const token of backend.generate(backend.models[0], ...given)) tokens.push(token);
  return tokens;
})()"""
DEFAULTS = {"seed": 0, "temperature": 1, "top_k": None, "top_p": 1, "min_p": 0}
