"""A model of minigpt as a class of transformers, which the export joins with the code of the
model.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from minigpt.model.attention import rotary_table
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT


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
    """A `GPT` that returns logits, and the loss if labels are given. It has no cache of keys and
    values.
    """

    config_class = MiniGPTConfig
    _tied_weights_keys = {"model.lm_head.weight": "model.wte.weight"}

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        self.model = GPT(
            GPTConfig(**{field.name: getattr(config, field.name) for field in fields(GPTConfig)})
        )
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, GPT) and module.rotary is not None:  # is not in the file
            c, device = module.config, module.rotary.device
            module.rotary = rotary_table(
                c.block_size, c.head_width, c.rope_base, scaling=c.rope_scaling
            ).to(device)

    def get_input_embeddings(self) -> Any:
        """Return the token embeddings."""
        return self.model.wte

    def get_output_embeddings(self) -> Any:
        """Return the head."""
        return self.model.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Compute the logits (B, T, V) of input_ids (B, T), and the loss of predicting each next
        label (B, T).

        Args:
            attention_mask: (B, T), 0 for padding, on the left or on the right.
            labels: -100 is ignored.
            logits_to_keep: return the logits of this many last positions (0: all), or of these
                positions.
            kwargs: position_ids that count the tokens of each row from 0; num_items_in_batch, of
                the loss; use_cache, which is ignored.

        Raises:
            ValueError: another argument is given, or the mask or the positions are others.
        """
        config, T = self.config, input_ids.size(1)
        outputs = {
            name: getattr(config, name, False)
            for name in ("output_attentions", "output_hidden_states")
        }
        given = {
            name
            for name, value in (outputs | kwargs).items()
            if value is not None and value is not False
        }
        refused = sorted(given - {"position_ids", "num_items_in_batch", "use_cache", "return_dict"})
        if not kwargs.get("return_dict", config.return_dict):
            refused.append("return_dict=False")
        if refused:
            raise ValueError(f"MiniGPTForCausalLM does not support {', '.join(refused)}")
        mask = (
            torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long()
        )
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must be {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
            )
        # Move padding from the left to the right, where causal attention ignores it.
        left = (mask == 0).long().cumprod(1).sum(1, keepdim=True)  # (B, 1)
        order = (torch.arange(T, device=input_ids.device) + left) % T  # (B, T)
        positions = order.argsort(1)
        if (mask.gather(1, order).diff(dim=1) > 0).any():
            raise ValueError(
                "attention_mask must have zeros on the left and on the right only, got some "
                "between ones"
            )
        if (ids := kwargs.get("position_ids")) is not None and (
            (ids != positions) & (mask != 0)
        ).any():
            raise ValueError("position_ids must count the tokens of each row from 0")
        logits = self.model(input_ids.gather(1, order))  # (B, T, V)
        logits = logits.gather(1, positions[..., None].expand_as(logits))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits,
                labels,
                vocab_size=config.vocab_size,
                num_items_in_batch=kwargs.get("num_items_in_batch"),  # of all accumulated batches
            )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(loss=loss, logits=logits[:, kept])

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the last `block_size` tokens (B, T), their mask, and arguments of `forward` that
        are no state.

        `generate` also passes what it has for itself: the tokenizer that finds its stop strings.
        """
        state = (
            "past_key_values",
            "cache_position",
            "next_sequence_length",
            "is_first_iteration",
            "tokenizer",
        )
        size = self.config.block_size
        inputs = {name: value for name, value in kwargs.items() if name not in state}
        if input_ids.size(1) > size:  # the last tokens count from 0
            inputs.pop("position_ids", None)
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"][:, -size:]
        return {**inputs, "input_ids": input_ids[:, -size:]}
