"""An architecture and a run as plain, checked data. Imports nothing heavy.

`GPTConfig` is every architecture that the model can be: presets in `configs/model/` are points of it,
and a checkpoint stores it as a dictionary. `check_run` looks at a composed run configuration and
finds what is wrong with it before torch is imported and before anything is written.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from minigpt.utils.checks import is_fraction, is_positive, require, whole_number
from minigpt.utils.errors import UserError

NORMS = ("layernorm", "rmsnorm", "rmsnorm_noscale")
POSITIONS = ("learned", "rope", "none")
ACTIVATIONS = {"gelu": 1, "relu": 1, "relu2": 1, "swiglu": 2}  # projections to the inner width that each takes
NORM_POSITIONS = ("pre", "post")
_LONGEST_BLOCK = 1 << 20  # positions are tables
PARAMETRIZATIONS = ("standard", "mup")


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer. The defaults are GPT-2 small (Radford et al., 2019).

    Raises:
        UserError: a value is impossible; the message names it, what it takes and the next step.
    """

    block_size: int = 1024  # longest context, tokens
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None  # heads of keys and values; fewer than n_head shares them (GQA, MQA)
    n_embd: int = 768
    head_dim: int | None = None  # width of a head; None: n_embd // n_head
    n_inner: int | None = None  # hidden width of the MLP; None: 4 n_embd (gated, as swiglu: 8/3 n_embd)
    bias: bool = True  # biases in linear layers and LayerNorms
    dropout: float = 0.0
    norm: str = "layernorm"
    norm_position: str = "pre"
    position: str = "learned"
    rope_base: float = 10000.0
    activation: str = "gelu"
    qk_norm: bool = False  # RMS-normalize queries and keys per head
    tie_embeddings: bool = True  # the output head is the token embedding
    ngram: int = 0  # embeddings of the last 2 … ngram tokens are added to each token's; 0: none
    ngram_buckets: int = 8192  # rows of the table of each n, into which n-grams are hashed
    ngram_dim: int = 16  # width of those embeddings
    smear: int = 0  # how many tokens before each are mixed into its embedding
    embed_norm: bool = False  # RMS-normalize what enters the first block
    parametrization: str = "standard"  # mup: the best learning rate does not move with the width (Yang et al., 2022)
    base_n_embd: int = 128  # width at which mup is standard
    base_head_dim: int = 32  # width of a head at which mup is standard

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            require(name, getattr(self, name), whole_number(1), "a whole number of at least 1")
        require("block_size", self.block_size, lambda v: v <= _LONGEST_BLOCK, f"at most {_LONGEST_BLOCK:,} tokens")
        for name in ("n_kv_head", "head_dim", "n_inner"):
            value = getattr(self, name)
            require(name, value, lambda v: v is None or whole_number(1)(v), "a whole number of at least 1, or null")
        for name in ("bias", "qk_norm", "tie_embeddings", "embed_norm"):
            require(name, getattr(self, name), lambda v: isinstance(v, bool), "true or false")
        require("dropout", self.dropout, is_fraction, "a number from 0 up to, but not including, 1")
        require("rope_base", self.rope_base, is_positive, "a number above 0")
        require("ngram", self.ngram, lambda v: v == 0 or whole_number(2)(v), "0, or a whole number of at least 2")
        for name in ("ngram_buckets", "ngram_dim", "base_n_embd", "base_head_dim"):
            require(name, getattr(self, name), whole_number(1), "a whole number of at least 1")
        require("smear", self.smear, whole_number(0), "a whole number of at least 0")
        for name, takes in (
            ("norm", NORMS),
            ("position", POSITIONS),
            ("activation", tuple(ACTIVATIONS)),
            ("norm_position", NORM_POSITIONS),
            ("parametrization", PARAMETRIZATIONS),
        ):
            require(name, getattr(self, name), takes.__contains__, " or ".join(takes))
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; "
                f"use a multiple of {self.n_head}, or set head_dim"
            )
        if self.n_kv_head is not None and self.n_head % self.n_kv_head:
            raise UserError(
                f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}; "
                f"every key-value head serves the same number of query heads"
            )
        if self.position == "rope" and self.head_width % 2:
            raise UserError(f"position=rope rotates pairs and needs an even head width, not {self.head_width}")

    @property
    def head_width(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def inner_width(self) -> int:
        if self.n_inner is not None:
            return self.n_inner
        # A gated activation has a third matrix: two thirds of the width keep the count (Shazeer, 2020).
        return -(-8 * self.n_embd // 3 // 8) * 8 if ACTIVATIONS[self.activation] == 2 else 4 * self.n_embd

    @property
    def up_width(self) -> int:
        """What the first matrix of the MLP widens to: all that enters the activation."""
        return ACTIVATIONS[self.activation] * self.inner_width

    @property
    def width_ratio(self) -> float:
        """Of n_embd to its base, 1 but for mup; the other widths and the heads are taken to grow along."""
        return self.n_embd / self.base_n_embd if self.parametrization == "mup" else 1.0

    @property
    def attention_scale(self) -> float | None:
        """Factor on the scores: None, which is 1/√D, and under mup one that falls as 1/D."""
        return self.base_head_dim**0.5 / self.head_width if self.parametrization == "mup" else None

    def num_params(self, *, positions: bool = True) -> int:
        """Trainable numbers of the model, known before it is built; `positions` counts learned ones too."""
        width, heads = self.n_embd, self.n_head * self.head_width
        projected = heads + 2 * (self.n_kv_head or self.n_head) * self.head_width  # queries, keys and values
        norm = {"layernorm": width * (1 + self.bias), "rmsnorm": width, "rmsnorm_noscale": 0}[self.norm]
        attention = width * (projected + heads) + self.bias * (projected + width)
        mlp = width * (self.up_width + self.inner_width) + self.bias * (self.up_width + width)
        embeddings = self.vocab_size * width * (1 if self.tie_embeddings else 2)
        if positions and self.position == "learned":
            embeddings += self.block_size * width
        if self.ngram:
            embeddings += (self.ngram - 1) * self.ngram_dim * (self.ngram_buckets + width)
        ends = (self.norm_position == "pre") * norm + self.smear * width
        return embeddings + ends + self.n_layer * (attention + mlp + 2 * norm)

    def flops_per_token(self) -> float:
        """Floating-point operations of a training step per token (Chowdhery et al., 2022, appendix B).

        Six a matrix weight (two forward, four backward) and 12·H·D·T a layer for attention over a full block.
        An untied token embedding and the table of n-grams are look-ups and cost nothing.
        """
        weights = self.num_params(positions=False)
        if not self.tie_embeddings:
            weights -= self.vocab_size * self.n_embd
        if self.ngram:
            weights -= (self.ngram - 1) * self.ngram_buckets * self.ngram_dim
        attention = 12 * self.n_layer * self.n_head * self.head_width * self.block_size
        return 6 * weights + attention

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GPTConfig":
        """Build from stored values.

        Raises:
            UserError: a name is not a field of this version, or a value is impossible.
        """
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise UserError(f"unknown model setting {', '.join(unknown)}; made by another version of minigpt?")
        return cls(**values)
