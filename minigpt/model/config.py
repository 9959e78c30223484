"""An architecture as plain, checked data. Imports nothing heavy.

`GPTConfig` holds every architecture that the model can be, and a checkpoint stores it as a
dictionary. `gpt2.yaml` in `configs/model/` repeats its defaults, because Hydra sets only existing
keys; the other presets are deltas.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from minigpt.utils.checks import (
    BOOLEAN,
    FRACTION,
    POSITIVE,
    POSITIVE_INT,
    Rule,
    integer,
    one_of,
    or_null,
)
from minigpt.utils.errors import UserError, require

# Sizes of the activations and norms of `minigpt.model.ops`, known without importing torch.
# Projections of the MLP's input: 2 if gated.
UP_PROJECTIONS = {"gelu": 1, "gelu_tanh": 1, "relu": 1, "relu2": 1, "swiglu": 2}
NORM_PARAMS = {"layernorm": ("weight", "bias"), "rmsnorm": ("weight",), "rmsnorm_noscale": ()}


@dataclass(frozen=True)
class GPTConfig:
    """Describe a decoder-only transformer; by default GPT-2 small with an exact GELU.

    Source: https://github.com/openai/gpt-2
    """

    block_size: int = 1024  # maximum context length, tokens
    vocab_size: int = 50257
    n_layer: int = 12
    # Uses of each block: n_layer / layer_repeats blocks have weights, and are run in turn.
    layer_repeats: int = 1
    n_head: int = 12
    n_kv_head: int | None = None  # fewer than n_head is grouped-query attention; None: n_head
    n_embd: int = 768
    head_dim: int | None = None  # width of a head; None: n_embd / n_head
    n_inner: int | None = None  # hidden width of the MLP; None: 4 n_embd, or 8/3 n_embd if gated
    bias: bool = True  # biases in linear layers and LayerNorms
    qkv_bias: bool | None = None  # biases of queries, keys and values; None: as bias
    dropout: float = 0.0
    norm: str = "layernorm"
    norm_eps: float = 1e-5  # added to the variance or the mean square
    norm_position: str = "pre"
    position: str = "learned"
    rope_base: float = 10000.0
    # Llama 3's scaling of rope for a longer context: long wavelengths are multiplied by a factor,
    # fully above rope_original_block_size / low, and not below rope_original_block_size / high.
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_block_size: int = 8192  # context length before the scaling, tokens
    activation: str = "gelu"
    qk_norm: bool = False  # RMS-normalize queries and keys per head
    qk_norm_weights: bool = False  # with learned weights (D,), as Qwen3
    tie_embeddings: bool = True  # share the weights of the token embedding and the output head
    ngram: int = 0  # add embeddings of the last 2 … ngram tokens; 0: none
    ngram_buckets: int = 8192  # rows of the hash table of each n
    ngram_dim: int = 16  # width of an n-gram embedding
    ngram_dropout: float = 0.0
    smear: int = 0  # previous token embeddings added to each, with learned factors per channel
    embed_norm: bool = False  # RMS-normalize the input of the first block
    logit_softcap: float | None = None  # limit of the logits: c tanh(logits / c)
    parametrization: str = "standard"  # mup: the optimal learning rate is the same at every width
    base_n_embd: int = 128  # n_embd at which mup equals standard
    base_head_dim: int = 32  # head width at which mup equals standard

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            require(f"model.{name}", getattr(self, name), *rule)
        check_heads(self.n_embd, self.n_head, self.n_kv_head, self.head_dim, prefix="model.")
        require(
            "model.n_layer",
            self.n_layer,
            lambda v: v % self.layer_repeats == 0,
            f"divisible by model.layer_repeats={self.layer_repeats}",
        )
        if self.position == "rope":
            require(
                "model.head_dim",
                self.head_width,
                lambda v: v % 2 == 0,
                "even with model.position=rope",
            )
        if self.qk_norm_weights:
            require("model.qk_norm", self.qk_norm, bool, "true with model.qk_norm_weights=true")
        require(
            "model.rope_high_freq_factor",
            self.rope_high_freq_factor,
            lambda v: v > self.rope_low_freq_factor,
            f"above model.rope_low_freq_factor={self.rope_low_freq_factor}",
        )

    @property
    def head_width(self) -> int:
        """Width D of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def inner_width(self) -> int:
        """Hidden width of the MLP."""
        if self.n_inner is not None:
            return self.n_inner
        if UP_PROJECTIONS[self.activation] == 1:
            return 4 * self.n_embd
        # A gated MLP has three matrices, and as many parameters with 2/3 of the width: 8/3 n_embd,
        # rounded up to a multiple of 8.
        return -(-8 * self.n_embd // 3 // 8) * 8

    @property
    def up_width(self) -> int:
        """Output width of the first matrix of the MLP: twice the hidden width if it is gated."""
        return self.inner_width * UP_PROJECTIONS[self.activation]

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def rope_scaling(self) -> tuple[float, float, float, int] | None:
        """The scaling of `rotary_table`, or None."""
        factors = (self.rope_factor, self.rope_low_freq_factor, self.rope_high_freq_factor)
        return None if self.rope_factor == 1 else (*factors, self.rope_original_block_size)

    @property
    def norm_params(self) -> tuple[str, ...]:
        """Names of the parameters of a norm, of n_embd values each."""
        return tuple(name for name in NORM_PARAMS[self.norm] if name != "bias" or self.bias)

    @property
    def width_ratio(self) -> float:
        """n_embd / base_n_embd under mup, which takes all widths to grow alike; else 1."""
        return self.n_embd / self.base_n_embd if self.parametrization == "mup" else 1.0

    @property
    def attention_scale(self) -> float | None:
        """Factor on the attention scores: under mup proportional to 1/D; None is 1/√D."""
        return self.base_head_dim**0.5 / self.head_width if self.parametrization == "mup" else None

    @property
    def block_params(self) -> int:
        """Number of parameters of a block."""
        width = self.n_embd
        heads = self.n_head * self.head_width
        qkv = heads + 2 * (self.n_kv_head or self.n_head) * self.head_width
        attention = width * (qkv + heads) + self.has_qkv_bias * qkv + self.bias * width
        mlp = width * (self.up_width + self.inner_width) + self.bias * (self.up_width + width)
        norms = 2 * width * len(self.norm_params) + 2 * self.qk_norm_weights * self.head_width
        return attention + mlp + norms

    def num_params(self, *, positions: bool = True) -> int:
        """Return the number of parameters, with or without those of learned positions."""
        width = self.n_embd
        total = self.n_layer // self.layer_repeats * self.block_params
        total += self.vocab_size * width * (1 if self.tie_embeddings else 2) + self.smear * width
        total += max(0, self.ngram - 1) * self.ngram_dim * (self.ngram_buckets + width)
        if positions and self.position == "learned":
            total += self.block_size * width
        if self.norm_position == "pre":  # a final norm
            total += width * len(self.norm_params)
        return total

    def flops_per_token(self) -> float:
        """Estimate the floating-point operations of a training step per token.

        6 per weight and layer that uses it (2 forward, 4 backward), and 12·H·D·T per layer for
        attention over T = block_size tokens. Table look-ups (an untied token embedding, n-gram
        embeddings) count 0.

        Source: PaLM, appendix B, https://arxiv.org/abs/2204.02311
        """
        weights = self.num_params(positions=False)
        weights += (self.n_layer - self.n_layer // self.layer_repeats) * self.block_params
        if not self.tie_embeddings:
            weights -= self.vocab_size * self.n_embd
        weights -= max(0, self.ngram - 1) * self.ngram_buckets * self.ngram_dim
        return 6 * weights + 12 * self.n_layer * self.n_head * self.head_width * self.block_size

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GPTConfig":
        """Build a config from stored values; raise UserError for an unknown name or bad value."""
        if unknown := sorted(set(values) - set(cls.__dataclass_fields__)):
            raise UserError(
                f"unknown model setting {', '.join(unknown)}; made by another version of minigpt?"
            )
        return cls(**values)


def check_heads(
    n_embd: int, n_head: int, n_kv_head: int | None, head_dim: int | None, *, prefix: str = ""
) -> None:
    """Raise UserError if heads do not divide the width, or key-value heads the heads.

    Args:
        prefix: of the keys in the message.
    """
    if head_dim is None:
        require(
            f"{prefix}n_embd",
            n_embd,
            lambda v: v % n_head == 0,
            f"divisible by {prefix}n_head={n_head}",
            f"use a multiple of {n_head}, or set {prefix}head_dim",
        )
    if n_kv_head is not None:
        require(
            f"{prefix}n_head",
            n_head,
            lambda v: v % n_kv_head == 0,
            f"divisible by {prefix}n_kv_head={n_kv_head}",
        )


RULES: dict[str, Rule] = {
    "block_size": integer(1, 1 << 20),  # positions are stored as tables
    "vocab_size": POSITIVE_INT,
    "n_layer": POSITIVE_INT,
    "layer_repeats": POSITIVE_INT,
    "n_head": POSITIVE_INT,
    "n_embd": POSITIVE_INT,
    "ngram_buckets": POSITIVE_INT,
    "ngram_dim": POSITIVE_INT,
    "base_n_embd": POSITIVE_INT,
    "base_head_dim": POSITIVE_INT,
    "rope_original_block_size": POSITIVE_INT,
    "n_kv_head": or_null(POSITIVE_INT),
    "head_dim": or_null(POSITIVE_INT),
    "n_inner": or_null(POSITIVE_INT),
    "bias": BOOLEAN,
    "qk_norm": BOOLEAN,
    "qk_norm_weights": BOOLEAN,
    "tie_embeddings": BOOLEAN,
    "embed_norm": BOOLEAN,
    "qkv_bias": or_null(BOOLEAN),
    "dropout": FRACTION,
    "ngram_dropout": FRACTION,
    "norm": one_of(NORM_PARAMS),
    "norm_position": one_of(("pre", "post")),
    "position": one_of(("learned", "rope", "none")),
    "rope_base": POSITIVE,
    "rope_low_freq_factor": POSITIVE,
    "rope_high_freq_factor": POSITIVE,
    "norm_eps": POSITIVE,
    "rope_factor": (lambda v: POSITIVE[0](v) and v >= 1, "a finite number ≥ 1"),
    "logit_softcap": or_null(POSITIVE),
    "activation": one_of(UP_PROJECTIONS),
    "ngram": (lambda v: integer(0)[0](v) and v != 1, "0, or an integer ≥ 2"),
    "smear": integer(0),
    "parametrization": one_of(("standard", "mup")),
}
