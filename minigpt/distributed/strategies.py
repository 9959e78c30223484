"""How a run is spread over processes: DDP, FSDP2 and DiLoCo."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, OptimStateKeyType, fully_shard

from minigpt.checkpoints.resume import read_unaveraged
from minigpt.distributed.process_group import gather_objects, keeps_files
from minigpt.model import GPT


class DDP(DDPStrategy):
    """One replica of the model per device; gradients are averaged while the backward pass computes them.

    Every host writes the checkpoints, so that a run continues without any one of them.

    Args:
        compress: send gradients in bfloat16, half the bytes. Lightning's `ddp_comm_hook` acts on GPUs alone.
    """

    def __init__(self, *, compress: bool = False, **options: Any) -> None:
        # The only buffer of the model is constant.
        super().__init__(broadcast_buffers=False, gradient_as_bucket_view=True, **options)
        self.compress = compress

    def _setup_model(self, model: Any) -> Any:
        # A static graph cannot begin with a backward pass that sends nothing, as the first of an accumulation.
        self._ddp_kwargs["static_graph"] = model.trainer.accumulate_grad_batches == 1
        replica = super()._setup_model(model)
        if self.compress:  # the lambda passes a check that refuses gloo, which can sum bfloat16 too
            replica.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        return replica

    @property
    def saves(self) -> bool:
        """Whether this rank writes checkpoints: one on each disk."""
        assert self.lightning_module is not None
        return keeps_files(Path(self.lightning_module.trainer.default_root_dir))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.saves:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)


class FSDP(ModelParallelStrategy):
    """Weights, gradients and optimizer state sharded over the devices, block by block (FSDP2).

    Args:
        reshard_after_forward: free the gathered weights of a block after its forward pass and gather them again in the
            backward pass; false: keep them, which takes memory and saves a third of the communication.
    """

    def __init__(self, *, reshard_after_forward: bool = True, **options: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **options)  # rank 0 gathers and writes it
        self.reshard_after_forward = reshard_after_forward

    def shard(self, model: GPT) -> None:
        """Shard the parameters of a model in place; with autocast, blocks are gathered in its precision."""
        reduced = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision_plugin.precision)
        # The residual stream stays in float32, as on one device.
        mixed = MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32, cast_forward_inputs=False)
        policy = mixed if reduced else MixedPrecisionPolicy()
        for block in dict.fromkeys(model.blocks):
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
        fully_shard(model)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer state into their shards; return the rest of the checkpoint.

        Lightning's strategy would read our file with torch.load.
        """
        from torch.distributed.checkpoint import state_dict  # slow to import

        assert self.model is not None
        content: dict[str, Any] = {"state_dict": {}, "optimizer_states": [{}]}
        if self.global_rank == 0:  # only its host needs the file
            content = read_unaveraged(Path(checkpoint_path))
        (optimizer,), (state,) = self.optimizers, content["optimizer_states"]
        content["optimizer_states"] = []
        options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state_dict.set_model_state_dict(self.model, content.pop("state_dict"), options=options)
        if state:
            state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, self.model)
        state_dict.set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state, options=options)
        rest = [content]
        distributed.broadcast_object_list(rest)
        return rest[0]


class DiLoCo(DDP):
    """Workers that train apart and average what they learned every `outer_every` steps (https://arxiv.org/abs/2311.08105).

    The mean change of the weights is the gradient of an outer optimizer, SGD with Nesterov momentum. Each worker keeps
    the state of its own optimizer.

    Args:
        outer_every: optimizer steps between two averages; there is one more before every validation.
        outer_lr, outer_momentum: learning rate and momentum of the outer optimizer.
        compress: send the changes in bfloat16, half the bytes.
    """

    def __init__(
        self,
        *,
        outer_every: int = 20,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.8,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.outer_every, self.outer_lr, self.outer_momentum = outer_every, outer_lr, outer_momentum
        self.outer: torch.optim.SGD  # of the weights as of the last outer step

    def _setup_model(self, model: nn.Module) -> Any:
        return model  # no replica: gradients stay with the worker

    def _register_ddp_hooks(self) -> None:
        """Do nothing: there is no replica."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self.trainer, self.weights = trainer, [p for p in trainer.lightning_module.parameters() if p.requires_grad]
        shared = [nn.Parameter(p.detach().clone()) for p in self.weights]
        self.outer = torch.optim.SGD(shared, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=True)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        step = self.trainer.global_step + 1
        validates = step * self.trainer.accumulate_grad_batches % self.trainer.val_check_batch == 0
        if step % self.outer_every == 0 or validates:  # checkpoints are of weights that all workers have
            self.outer_step()
        return result

    @torch.no_grad()
    def outer_step(self) -> None:
        """Average the changes of all workers since the last outer step, and continue from the same weights."""
        shared = self.outer.param_groups[0]["params"]
        changes = torch._foreach_sub(shared, self.weights)
        sent = torch.cat([change.flatten() for change in changes])
        mean = self.reduce(sent.bfloat16() if self.compress else sent).to(sent.dtype)
        for p, change in zip(shared, mean.split([p.numel() for p in shared]), strict=True):
            p.grad = change.view_as(p)
        self.outer.step()
        torch._foreach_copy_(self.weights, shared)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Add the outer momentum and every worker's optimizer state; called on all ranks, after an outer step."""
        workers = gather_objects(checkpoint["optimizer_states"][0])
        momentum = [self.outer.state[p]["momentum_buffer"] for p in self.outer.param_groups[0]["params"]]
        checkpoint["diloco"] = {"workers": workers, "momentum": momentum}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore a worker; one more than the checkpoint has starts as a copy of another."""
        if saved := checkpoint.get("diloco"):
            mine = saved["workers"][self.global_rank % len(saved["workers"])]
            checkpoint = {**checkpoint, "optimizer_states": [mine]}
            for p, buffer in zip(self.outer.param_groups[0]["params"], saved["momentum"], strict=True):
                self.outer.state[p]["momentum_buffer"] = buffer.to(p.device)
        super().load_optimizer_state_dict(checkpoint)
