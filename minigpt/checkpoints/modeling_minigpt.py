"""A model of minigpt as a class of transformers, which the export joins with the code of the model."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from minigpt.attention import rotary_table
from minigpt.config import GPTConfig
from minigpt.model import GPT


class MiniGPTConfig(PretrainedConfig):
    """The values of `GPTConfig`."""

    model_type = "minigpt"
    attribute_map = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
        "max_position_embeddings": "block_size",
    }

    def __init__(self, **kwargs: Any) -> None:
        for field in fields(GPTConfig):
            setattr(self, field.name, kwargs.pop(field.name, field.default))
        super().__init__(**kwargs)


class MiniGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """A `GPT` that returns logits, and the loss if labels are given. It has no cache of keys and values."""

    config_class = MiniGPTConfig
    _tied_weights_keys = {"model.lm_head.weight": "model.wte.weight"}

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        self.model = GPT(GPTConfig(**{field.name: getattr(config, field.name) for field in fields(GPTConfig)}))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, GPT) and module.rotary is not None:  # is not in the file
            c, device = module.config, module.rotary.device
            module.rotary = rotary_table(c.block_size, c.head_width, c.rope_base, scaling=c.rope_scaling).to(device)

    def get_input_embeddings(self) -> Any:
        """Return the token embeddings."""
        return self.model.wte

    def get_output_embeddings(self) -> Any:
        """Return the head."""
        return self.model.lm_head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        """Compute the logits (B, T, V) of input_ids (B, T), and the loss of predicting each next label (B, T).

        Args:
            attention_mask: (B, T), 0 for padding, on the left or on the right.
            labels: -100 is ignored.
        """
        order = torch.arange(input_ids.size(1), device=input_ids.device).expand_as(input_ids)  # (B, T)
        if attention_mask is not None:  # move padding from the left to the right, where causal attention ignores it
            left = (attention_mask == 0).long().cumprod(1).sum(1, keepdim=True)  # (B, 1)
            order = (order + left) % input_ids.size(1)
        logits = self.model(input_ids.gather(1, order))  # (B, T, V)
        logits = logits.gather(1, order.argsort(1)[..., None].expand_as(logits))
        loss = None
        if labels is not None:  # kwargs can hold the number of tokens of all accumulated batches
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the last `block_size` tokens (B, T), and their mask."""
        mask, size = kwargs.get("attention_mask"), self.config.block_size
        return {"input_ids": input_ids[:, -size:], "attention_mask": None if mask is None else mask[:, -size:]}
