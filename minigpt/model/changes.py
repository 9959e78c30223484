"""What a model consists of: whether it is the one that `GPT(config)` builds, or its user changed it. Torch alone.

Fast decoding, checkpoints and exports use the weights without the model's own code, so they first
call `find_change`.
"""

from collections.abc import Iterator
from functools import lru_cache
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from minigpt.model.attention import MultiHeadAttention
from minigpt.model.config import GPTConfig
from minigpt.model.embeddings import NGramEmbedding
from minigpt.model.gpt import GPT, MLP, Block, Norm
from minigpt.utils.errors import UserError

_KINDS: Any = (
    *(GPT, Block, MLP, Norm, NGramEmbedding, MultiHeadAttention),
    *(nn.Linear, nn.Embedding, nn.ModuleList, nn.ParameterList, nn.Identity),
)
_METHODS = {kind: {name: f for name, f in vars(kind).items() if isfunction(f)} for kind in _KINDS}
_OF_TRAINING = (
    "training",
    "dropout",
    "checkpoint_blocks",
)  # attributes without effect in evaluation mode


def unwrap(model: Any) -> Any:
    """Return the model, without DistributedDataParallel or DataParallel; raise UserError if it has no GPTConfig."""
    while isinstance(original(model), nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = original(model).module
    if not isinstance(model, nn.Module) or not isinstance(
        getattr(model, "config", None), GPTConfig
    ):
        raise UserError(
            f"the model must be a GPT, or a module with its `config`, got {type(model).__name__}; "
            f"pass the GPT inside of it"
        )
    return model


def original(module: Any) -> Any:
    """Return the module that `torch.compile` wraps, or the module itself."""
    compiled = type(module).__module__ == "torch._dynamo.eval_frame"
    return module._modules.get("_orig_mod", module) if compiled else module


def plain_kind(kind: Any) -> Any:
    """Return the class of a module from which FSDP2 derived its own, or the class itself."""
    return kind.__bases__[-1] if kind.__module__.startswith("torch.distributed.fsdp.") else kind


def empty_model(config: GPTConfig) -> GPT:
    """Build a model whose tensors have shapes but no memory."""
    with torch.device("meta"), _SkipNormal():
        return GPT(config)


class _SkipNormal(TorchFunctionMode):
    """Skip `normal_`: on the meta device torch imports its compiler for it, which takes 0.8 s."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return None if function is nn.init.normal_ else function(*args, **(kwargs or {}))


def find_change(model: Any, *, for_saving: bool = False) -> str | None:
    """Return the first thing that makes a model another than `GPT(model.config)` in evaluation mode, or None.

    It consists of exactly the same classes, with the methods that they had at import, and has the
    same attributes and shapes, no attribute that hides one of its class, and no hooks but those of
    FSDP2. Wrappers of `torch.compile` count as what they wrap. Values and sharing of weights, and
    further attributes, may be any. `for_saving`, hooks and the rounding of the rotary table do not
    count.
    """
    if not for_saving and (
        torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    ):
        return "all modules have a global forward hook"
    return next(_changes(model, _reference(model.config), "model", {}, for_saving), None)


_reference = lru_cache(maxsize=2)(empty_model)  # it takes longer than the comparison


def _changes(
    module: Any, reference: Any, name: str, seen: dict[Any, Any], for_saving: bool
) -> Iterator[str]:
    """Yield the differences of a module from its reference; `seen` maps references to modules."""
    wrapped, module = module, original(module)
    kind, expected = type(module), type(reference)
    if not for_saving and any(map(_has_hook, {wrapped, module})):
        yield f"{name} has a forward hook"
    if expected not in _KINDS:
        yield f"{name} is of class {expected.__name__}, which is not in _KINDS of minigpt/model/changes.py"
        return
    if plain_kind(kind) is not expected:
        yield f"{name} is of class {kind.__module__}.{kind.__name__}, not {expected.__name__}"
        return
    if changed := [
        f for f, code in _METHODS.get(expected, {}).items() if vars(expected).get(f) is not code
    ]:
        yield f"{expected.__name__}.{changed[0]} is replaced"
    if reference in seen:
        if seen[reference] is not module:
            yield f"{name} is no longer shared"
        return
    seen[reference] = module
    own, known = vars(module), vars(reference)
    for key in own.keys() - known.keys():
        if hasattr(kind, key) and key != "_compiled_call_impl":  # of Module.compile
            yield f"{name}.{key} is replaced"
    for key, value in known.items():
        is_used = key[0] != "_" and key not in _OF_TRAINING
        if is_used and (key not in own or type(own[key]) is not type(value) or own[key] != value):
            yield f"{name}.{key} is changed"
    for kept in ("_parameters", "_buffers", "_modules"):
        if different := own[kept].keys() ^ known[kept].keys():
            yield f"{name}.{min(different)} is {'new' if min(different) in own[kept] else 'missing'}"
            return
    for kept in ("_parameters", "_buffers"):
        for key, tensor in known[kept].items():
            if not _is_like(
                own[kept][key], tensor, 0.004 if for_saving else 0.0
            ):  # it was in half precision
                yield f"{name}.{key} is changed in kind, shape or value"
    for key, child in known["_modules"].items():
        yield from _changes(own["_modules"][key], child, f"{name}.{key}", seen, for_saving)


def _has_hook(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(
        not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
        for hook in hooks
    )


def _is_like(tensor: Tensor | None, reference: Tensor | None, atol: float) -> bool:
    """Whether two tensors have the same shape, and the values of a reference that has values: the rotary table."""
    if tensor is None or reference is None:
        return tensor is reference
    is_plain = (
        type(tensor) in (nn.Parameter, Tensor)
        or type(tensor).__module__ == "torch.distributed.tensor"
    )
    if not is_plain or tensor.shape != reference.shape:
        return False
    return (
        reference.is_meta
        or tensor.is_meta
        or torch.allclose(tensor, reference.to(tensor), rtol=0, atol=atol)
    )
