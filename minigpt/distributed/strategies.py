"""How a run is spread over processes: DDP and FSDP2."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, strategies
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from minigpt.checkpoints.resume import read_unaveraged
from minigpt.distributed.muon_ranks import Replicas, Shards
from minigpt.model.gpt import GPT
from minigpt.training.optim import Muon


class DDP(strategies.DDPStrategy):
    """One replica of the model per device, which average gradients during the backward pass.

    Args:
        compress: send gradients in bfloat16, half the bytes. Lightning's `ddp_comm_hook` acts on
            GPUs alone.
    """

    def __init__(self, *, compress: bool = False, **options: Any) -> None:
        # The only buffer of the model is constant.
        super().__init__(broadcast_buffers=False, gradient_as_bucket_view=True, **options)
        self.compress = compress

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        _share_muon(self.optimizers[0], Replicas)

    def _setup_model(self, model: Any) -> torch.nn.parallel.DistributedDataParallel:
        # A static graph cannot begin with a backward pass that sends nothing, as the first of an
        # accumulation.
        self._ddp_kwargs["static_graph"] = model.trainer.accumulate_grad_batches == 1
        replica = super()._setup_model(model)
        if self.compress:
            # The lambda passes a check that refuses gloo, which can sum bfloat16 too; torch looks
            # for a parameter of this name.
            replica.register_comm_hook(
                None, lambda state, bucket: bf16_compress_hook(state, bucket)
            )
        return replica


class FSDP(strategies.ModelParallelStrategy):
    """Weights, gradients and optimizer state sharded over the devices, block by block (FSDP2).

    Args:
        reshard_after_forward: free the gathered weights of a block after its forward pass and
            gather them again in the backward pass; false: keep them, which takes memory and saves a
            third of the communication.
    """

    def __init__(self, *, reshard_after_forward: bool = True, **options: Any) -> None:
        # Rank 0 gathers and writes a checkpoint.
        super().__init__(save_distributed_checkpoint=False, **options)
        self.reshard_after_forward = reshard_after_forward

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        _share_muon(self.optimizers[0], Shards)

    def shard(self, model: GPT) -> None:
        # Shard the parameters of a model in place; gather blocks in the precision of autocast.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import

        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(
            self.precision_plugin.precision
        )
        # The sums between blocks keep their precision, as on one device.
        policy = MixedPrecisionPolicy(
            dtype,
            torch.float32 if dtype else None,
            cast_forward_inputs=False,
        )
        for block in dict.fromkeys(model.blocks):
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
        fully_shard(model)

    def lightning_module_state_dict(self) -> dict[str, torch.Tensor]:
        # The weights, which rank 0 gathers; one rank copies its shards, as an EMA is swapped there.
        if self.world_size > 1:
            return super().lightning_module_state_dict()
        return {
            name: weight.clone() for name, weight in super().lightning_module_state_dict().items()
        }

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        # Load weights and optimizer state into their shards; return the rest of the checkpoint.
        # Lightning's strategy would read our file with torch.load.
        from torch.distributed.checkpoint import state_dict  # slow to import

        # Read the file on rank 0, which has what all load.
        assert self.model is not None
        content: dict[str, Any] = {"state_dict": {}, "optimizer_states": [{}]}
        if self.global_rank == 0:
            content = read_unaveraged(Path(checkpoint_path))
        weights = content.pop("state_dict")
        state = content["optimizer_states"].pop()
        if state:
            # Take a weight by its first name alone, as torch does, not by those of the further uses
            # of a block; and name the parameters of the optimizer, which the file numbers in the
            # order of the groups, whatever strategy wrote it.
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            weights = {name: weights[name] for name in names.values()}
            name_of: dict[int, str] = {}
            for group, saved in zip(
                self.optimizers[0].param_groups,
                state["param_groups"],
                strict=True,
            ):
                group_names = [names[parameter] for parameter in group["params"]]
                name_of.update(zip(saved["params"], group_names, strict=True))
                saved["params"] = group_names
            state["state"] = {name_of[number]: each for number, each in state["state"].items()}
        # Scatter the state, and send the rest.
        options = state_dict.StateDictOptions(
            full_state_dict=True,
            broadcast_from_rank0=True,
            strict=False,
        )
        state_dict.set_model_state_dict(self.model, weights, options=options)
        state_dict.set_optimizer_state_dict(
            self.model,
            self.optimizers,
            optim_state_dict=state,
            options=options,
        )
        return self.broadcast(content)


def _share_muon(optimizer: torch.optim.Optimizer, kind: type[Replicas | Shards]) -> None:
    if isinstance(optimizer, Muon):
        optimizer.ranks = kind(distributed_c10d._get_default_group())
