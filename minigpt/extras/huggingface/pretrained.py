"""Models of Hugging Face, in a folder or on the Hub, to start a run from."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from minigpt.checkpoints.format import explain_errors
from minigpt.checkpoints.init_from import Pretrained
from minigpt.checkpoints.load import build_model, check_size, check_vocabulary
from minigpt.extras.huggingface.chat_template import TEMPLATE_FILES
from minigpt.extras.huggingface.conversion import OWN, Family, read_config, weight_to_ours
from minigpt.extras.huggingface.tokenizer_json import (
    GENERATION,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    load_tokenizer,
)
from minigpt.extras.packages import import_extra
from minigpt.model.changes import empty_model
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json

CONFIG, WEIGHTS, SHARDS = "config.json", "model.safetensors", "model-*.safetensors"
INDEX = f"{WEIGHTS}.index.json"
HUB_FILES = [
    CONFIG,
    WEIGHTS,
    SHARDS,
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    GENERATION,
    *TEMPLATE_FILES,
]
# Buffers that old versions saved
_IGNORED = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


class HuggingFaceModel(Pretrained):
    """A folder of Hugging Face, whose weights are read by `load`."""

    @property
    def files(self) -> list[Path]:
        """The files of its weights."""
        return _weight_files(self.path)

    def load(self, config: GPTConfig | None = None) -> GPT:
        """Load the model in float32 and evaluation mode, with the block size and dropout of
        `config`.
        """
        return load_folder(self.path, config)


def find_huggingface(source: str) -> HuggingFaceModel:
    """Find a folder, or download the files of an id of the Hub; read the configuration and the
    tokenizer.

    Args:
        source: the id may end in `@` and a revision.

    Raises:
        UserError: there is no such model, or minigpt cannot read it.
    """
    path, revision = Path(source).expanduser(), None
    if path.exists():
        source = str(path.resolve())
    else:
        path = _download(source)
        revision = path.name
    with explain_errors(f"{path} cannot be loaded"):
        config, _ = read_config(read_json(path / CONFIG))
    tokenizer = load_tokenizer(path, config.vocab_size)
    with explain_errors(f"{path} cannot be loaded"):
        check_vocabulary(config, tokenizer)
    return HuggingFaceModel(path, source, revision, config, tokenizer)


def load_folder(folder: str | Path, config: GPTConfig | None = None) -> GPT:
    """Load the model of a Hugging Face folder, in float32 and evaluation mode.

    Args:
        config: a block size that is smaller than that of the folder, and dropout; None: those of
            the folder, and 0.

    Raises:
        UserError: a file is missing or damaged, or the model is not of one of `FAMILIES` and of no
            export.
    """
    with explain_errors(f"{folder} cannot be loaded"):
        stored, family = read_config(read_json(Path(folder, CONFIG)))
        weights = _read_weights(Path(folder), stored, family)
        return build_model(config or stored, weights).eval()


def _download(source: str) -> Path:
    """Download the files of a model into the cache of huggingface_hub, and return their folder."""
    name, _, revision = source.partition("@")
    first = name.partition("/")[0]
    if (
        not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
        or first in ("runs", ".", "..")
        or Path(first).exists()
    ):
        raise UserError(
            f"{source} does not exist; give a run folder, a checkpoint, or a folder or id of "
            "Hugging Face"
        )
    hub = import_extra(
        "huggingface_hub", f"{source} does not exist, and the Hugging Face Hub", "huggingface"
    )
    hub.logging.set_verbosity_error()  # without a line per retry
    try:
        return Path(
            hub.snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILES)
        )
    except Exception as error:  # its own, of HTTP and of the file system
        raise UserError(
            f"{source} does not exist, and cannot be downloaded from the Hugging Face Hub: "
            f"{' '.join(str(error).split()):.300}"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder as transformers does: the single one, or else those
    of the index.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        found = f"{WEIGHTS} or {INDEX} is missing"
        raise UserError(
            f"{found}; weights must be safetensors, because a .bin file can execute code"
        )
    with explain_errors(f"{folder / INDEX} is damaged"):
        return [
            folder / name for name in sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        ]


def _read_weights(folder: Path, config: GPTConfig, family: Family) -> dict[str, Tensor]:
    """Read the weights of a folder by our names, in float32."""
    files, theirs = _weight_files(folder), dict[str, Tensor]()
    for file in files:
        tensors = load_file(file, backend="pread")
        if twice := sorted(tensors.keys() & theirs):
            raise UserError(f"the weight {twice[0]} is in several files")
        theirs |= tensors
    theirs = {name: tensor for name, tensor in theirs.items() if not _IGNORED.search(name)}
    check_size(config, len(theirs), sum(file.stat().st_size for file in files))
    base = family.modules["wte"].partition(".")[0]
    # The model was saved without its head
    if not any(name.startswith(f"{base}.") for name in theirs):
        theirs = {f"{base}.{name}": tensor for name, tensor in theirs.items()}
    weights: dict[str, Tensor] = {}
    for name in empty_model(config).state_dict():
        if name == "lm_head.weight" and config.tie_embeddings:
            theirs.setdefault(f"model.{name}" if family is OWN else name, weights["wte.weight"])
        weights[name] = weight_to_ours(name, family, config, theirs)
    if config.tie_embeddings and not torch.equal(weights["lm_head.weight"], weights["wte.weight"]):
        raise UserError(
            "lm_head.weight differs from the embeddings; set tie_word_embeddings to false"
        )
    if theirs:
        raise UserError(f"unexpected weights: {', '.join(sorted(theirs)[:3])}")
    return weights
