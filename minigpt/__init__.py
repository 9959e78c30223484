"""minigpt: train small GPTs and sample from them.

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigpt.checkpoints.load import load_checkpoint as load_checkpoint
    from minigpt.checkpoints.load import save_checkpoint as save_checkpoint
    from minigpt.model.attention import MultiHeadAttention as MultiHeadAttention
    from minigpt.model.config import GPTConfig as GPTConfig
    from minigpt.model.gpt import GPT as GPT
    from minigpt.runs.run import train as train
    from minigpt.sampling.generation import generate as generate

__version__ = "0.1.0"
_EXPORTS = {
    "GPT": "minigpt.model.gpt",
    "GPTConfig": "minigpt.model.config",
    "MultiHeadAttention": "minigpt.model.attention",
    "generate": "minigpt.sampling.generation",
    "load_checkpoint": "minigpt.checkpoints.load",
    "train": "minigpt.runs.run",
    "save_checkpoint": "minigpt.checkpoints.load",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'minigpt' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
