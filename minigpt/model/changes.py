"""Whether a model is the one that `GPT(config)` builds, or its user changed it. Torch alone.

Fast decoding, checkpoints and exports use the weights without the model's own code, so they first
call `find_change`.
"""

from collections.abc import Callable, Iterator
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

_KINDS: tuple[type[nn.Module], ...] = (
    *(GPT, Block, MLP, Norm, NGramEmbedding, MultiHeadAttention),
    *(nn.Linear, nn.Embedding, nn.ModuleList, nn.ParameterList, nn.Identity),
)
_AT_IMPORT = {kind: dict(vars(kind)) for kind in _KINDS}
_OF_TRAINING = ("training", "dropout", "checkpoint_blocks")  # no effect in evaluation mode


def unwrap(model: Any) -> Any:
    """Return the model that DistributedDataParallel or DataParallel may wrap.

    Raises:
        UserError: it has no GPTConfig.
    """
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


def plain_kind(kind: type) -> type:
    """Return the class of a module from which FSDP2 derived its own, or the class itself."""
    return kind.__bases__[-1] if kind.__module__.startswith("torch.distributed.fsdp.") else kind


def empty_model(config: GPTConfig) -> GPT:
    """Build a model whose tensors have shapes but no memory."""
    with torch.device("meta"), _SkipNormal():
        return GPT(config)


_reference = lru_cache(maxsize=2)(empty_model)  # to build it takes longer than to compare with it


class _SkipNormal(TorchFunctionMode):
    # On the meta device torch imports its compiler for `normal_`, which takes 0.8 s.
    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return None if function is nn.init.normal_ else function(*args, **(kwargs or {}))


def find_change(model: GPT, *, for_saving: bool = False) -> str | None:
    """Return the first thing that makes a model another than `GPT(model.config)`, or None.

    A model is the same in evaluation mode if it consists of exactly the same classes, with the
    methods that they had at import, shares the same modules (layer_repeats), and has the same
    attributes and shapes, no attribute that hides one of its class, and no hooks but those of
    FSDP2. Wrappers of `torch.compile` count as what they wrap. Values of weights, whether two
    weights are tied, and further attributes may be any. `for_saving`, hooks and the rounding of the
    rotary table do not count.
    """
    if not for_saving and (
        torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    ):
        return "all modules have a global forward hook"
    return next(_changes(model, _reference(model.config), "model", {}, for_saving), None)


def _changes(
    wrapped: nn.Module,
    reference: nn.Module,
    name: str,
    seen: dict[nn.Module, nn.Module],
    for_saving: bool,
) -> Iterator[str]:
    # Only the first difference is read; after it, the rest may fail. `seen` maps references to the
    # modules that were compared with them.
    #
    # The module runs the code of its class, as it was at import.
    module = original(wrapped)
    if not for_saving and (_has_hook(wrapped) or _has_hook(module)):
        yield f"{name} has a forward hook"
    kind = type(reference)
    if kind not in _KINDS:
        yield (
            f"{name} is of class {kind.__name__}, "
            "which is not in _KINDS of minigpt/model/changes.py"
        )
    own_kind = type(module)
    if plain_kind(own_kind) is not kind:
        yield (f"{name} is of class {own_kind.__module__}.{own_kind.__name__}, not {kind.__name__}")
    for method, code in _AT_IMPORT[kind].items():
        if isfunction(code) and vars(kind).get(method) is not code:
            yield f"{kind.__name__}.{method} is replaced"
    # A module that the reference uses again is the same one.
    if seen.setdefault(reference, module) is not module:
        yield f"{name} is no longer shared"
    # No attribute hides one of the class, and those of the reference are the same.
    own = vars(module)
    known = vars(reference)
    for key in own.keys() - known.keys():
        if hasattr(own_kind, key) and key != "_compiled_call_impl":  # of Module.compile
            yield f"{name}.{key} is replaced"
    for key, value in known.items():
        is_used = key[0] != "_" and key not in _OF_TRAINING
        if is_used and (key not in own or type(own[key]) is not type(value) or own[key] != value):
            yield f"{name}.{key} is changed"
    # It has the same parameters, buffers and modules.
    for kept in ("_parameters", "_buffers", "_modules"):
        for key in sorted(own[kept].keys() ^ known[kept].keys()):
            yield f"{name}.{key} is {'new' if key in own[kept] else 'missing'}"
    for kept in ("_parameters", "_buffers"):
        for key, tensor in known[kept].items():
            # A saved rotary table may have been in half precision.
            if not _is_like(own[kept][key], tensor, 0.004 if for_saving else 0.0):
                yield f"{name}.{key} is changed in kind, shape or value"
    for key, child in known["_modules"].items():
        yield from _changes(own["_modules"][key], child, f"{name}.{key}", seen, for_saving)


def _has_hook(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(
        str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.") for hook in hooks
    )


def _is_like(tensor: Tensor | None, reference: Tensor | None, atol: float) -> bool:
    # On the meta device tensors have no values; else it is the rotary table.
    if tensor is None or reference is None:
        return tensor is reference
    kind = type(tensor)
    is_plain = kind in (nn.Parameter, Tensor) or kind.__module__ == "torch.distributed.tensor"
    if not is_plain or tensor.shape != reference.shape:
        return False
    return (
        reference.is_meta
        or tensor.is_meta
        or torch.allclose(tensor, reference.to(tensor), rtol=0, atol=atol)
    )
