"""The GPT compared with torch's transformer layers, its published sizes and invariants."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from exported import MODELS
from small_runs import composed
from tolerance import assert_near, terms_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from minigpt import attention, generate
from minigpt.config import NORM_POSITIONS, POSITIONS, GPTConfig
from minigpt.interpret.heads import attention_maps, without_head
from minigpt.model import GPT
from minigpt.ops import ACTIVATIONS, NORMS

TINY = {"block_size": 16, "vocab_size": 29, "n_layer": 2, "n_head": 4, "n_embd": 32}
LLAMA = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tie_embeddings": False}


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_logits_equal_those_of_torchs_transformer_layers(norm_position: str, activation: str):
    pre = norm_position == "pre"
    model = tiny(norm_position=norm_position, activation=activation)
    tokens = torch.randint(29, (3, 16))
    x = F.embedding(tokens, model.wte.weight) + model.wpe.weight
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(32, 4, 128, 0.0, activation, batch_first=True, norm_first=pre).eval()
        layer.load_state_dict(
            {
                "self_attn.in_proj_weight": block.attention.qkv.weight,
                "self_attn.in_proj_bias": block.attention.qkv.bias,
                **{f"self_attn.out_proj.{kind}": tensor for kind, tensor in block.attention.out.state_dict().items()},
                **{f"linear1.{kind}": tensor for kind, tensor in block.mlp.up.state_dict().items()},
                **{f"linear2.{kind}": tensor for kind, tensor in block.mlp.down.state_dict().items()},
                **{f"norm1.{kind}": tensor for kind, tensor in block.norm_1.state_dict().items()},
                **{f"norm2.{kind}": tensor for kind, tensor in block.norm_2.state_dict().items()},
            }
        )
        x = layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(16), is_causal=True)
    if pre:
        x = F.layer_norm(x, (32,), model.final_norm.weight, model.final_norm.bias)
    assert_near(model(tokens), x @ model.wte.weight.T, terms=terms_of(model.config))


@pytest.mark.parametrize(
    ("norm", "position", "activation", "norm_position"), product(NORMS, POSITIONS, ACTIVATIONS, NORM_POSITIONS)
)
def test_changing_a_future_token_does_not_change_earlier_logits(
    norm: str, position: str, activation: str, norm_position: str
):
    model = tiny(norm=norm, position=position, activation=activation, norm_position=norm_position)
    tokens = torch.randint(29, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 29
    moved = (model(changed) - model(tokens)).abs().amax(dim=(0, 2))
    assert (moved[:9] == 0).all()
    assert (moved[9:] > 1e-5).all()


def test_the_presets_of_gpt2_have_the_published_sizes():
    sizes = {"gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200}
    assert {
        name: GPTConfig(**composed(f"model={name}", "model.vocab_size=50257").model).num_params() for name in sizes
    } == sizes


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_every_tensor_is_on_the_device_of_the_input(settings: dict[str, Any]):
    """The meta device stands for a GPU: an operation on it and on a tensor of the CPU raises."""
    model = GPT(GPTConfig(**{**TINY, "n_layer": 3, "dropout": 0.1, **settings})).to("meta")
    tokens = torch.zeros(2, model.config.block_size, dtype=torch.long, device="meta")
    loss = model(tokens, tokens)
    loss.backward()
    assert loss.device.type == "meta"
    if model.rotary is not None:
        model.rotary = torch.zeros(model.rotary.shape)
        with pytest.raises(RuntimeError, match="expected device meta"):
            model(tokens)


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_the_parameter_count_of_a_config_equals_that_of_the_model(settings: dict[str, Any]):
    config = GPTConfig(**{**TINY, "n_layer": 3, **settings})
    with torch.device("meta"):
        model = GPT(config)
    assert config.num_params() == model.num_params()
    learned_positions = config.position == "learned"
    assert config.num_params(positions=False) == model.num_params() - learned_positions * 32 * config.block_size


def test_repeated_layers_are_those_of_a_model_with_copies_of_their_weights():
    settings = {**LLAMA, "n_layer": 6, "ngram": 3}
    shared, copies = tiny(**settings, layer_repeats=3), tiny(**settings)
    copies.load_state_dict(shared.state_dict())
    tokens = torch.randint(29, (2, 16))
    assert_close(shared(tokens), copies(tokens))
    assert len({id(block) for block in shared.blocks}) == 2
    loss, other = (model(tokens[:, :-1], tokens[:, 1:]) for model in (shared, copies))
    loss.backward()
    other.backward()
    gradients = [copies.blocks[i].mlp.up.weight.grad for i in (1, 3, 5)]
    assert_close(shared.blocks[1].mlp.up.weight.grad, sum(gradients))
    for layers in (slice(None), slice(3, 4)):
        assert_close(attention_maps(shared, tokens[0], layers), attention_maps(copies, tokens[0], layers))
    assert_close(without_head(shared, 3, 1)(tokens), without_head(copies, 3, 1)(tokens))
    sampled = [generate(model, [1, 2], max_new_tokens=40, seed=1)[0].tokens for model in (shared, copies)]
    assert sampled[0] == sampled[1]


def test_tied_embeddings_are_one_matrix_with_the_sum_of_both_gradients():
    tied, untied = tiny(), tiny(tie_embeddings=False)
    assert tied.lm_head.weight is tied.wte.weight
    assert untied.lm_head.weight is not untied.wte.weight
    assert untied.num_params() - tied.num_params() == 29 * 32
    untied.load_state_dict(tied.state_dict())
    tokens, targets = torch.randint(29, (2, 3, 16))
    for model in (tied, untied):
        model(tokens, targets).backward()
    assert_near(tied.wte.weight.grad, untied.wte.weight.grad + untied.lm_head.weight.grad, terms=3 * 16)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_weights_are_initialized_as_gpt2s(activation: str):
    config = GPTConfig(vocab_size=999, n_layer=8, n_head=4, n_embd=256, block_size=256, activation=activation)
    for name, parameter in GPT(config).named_parameters():
        if parameter.dim() == 2:
            into_the_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 8) if into_the_stream else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < std / 20, name
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


CHANGES: dict[str, Any] = {
    "block_size": 17,
    "vocab_size": 30,
    "n_layer": 3,
    "n_head": 2,
    "n_kv_head": 2,
    "n_embd": 36,
    "head_dim": 6,
    "n_inner": 50,
    "bias": False,
    "qkv_bias": False,
    "layer_repeats": 2,
    "dropout": 0.5,
    "norm": "rmsnorm",
    "norm_eps": 0.1,
    "norm_position": "post",
    "position": "none",
    "rope_base": 100.0,
    "rope_factor": 8.0,
    "rope_low_freq_factor": 3.0,
    "rope_high_freq_factor": 9.0,
    "rope_original_block_size": 100,
    "activation": "relu",
    "qk_norm": True,
    "qk_norm_weights": True,
    "tie_embeddings": False,
    "ngram": 3,
    "ngram_buckets": 50,
    "ngram_dim": 5,
    "ngram_dropout": 0.5,
    "smear": 2,
    "embed_norm": True,
    "logit_softcap": 0.5,
    "parametrization": "mup",
    "base_n_embd": 64,
    "base_head_dim": 16,
}


@pytest.mark.parametrize("name", GPTConfig.__dataclass_fields__)
def test_every_setting_changes_the_model(name: str):
    base = TINY | ({"position": "rope", "rope_original_block_size": 16} if name.startswith("rope_") else {})
    base |= {"rope_factor": 4.0} if name.startswith("rope_") and name not in ("rope_base", "rope_factor") else {}
    base |= {"qk_norm": True} if name == "qk_norm_weights" else {}
    base |= {"ngram": 2} if name.startswith("ngram_") else {}
    base |= {"parametrization": "mup"} if name.startswith("base_") else {}
    assert same(fingerprint(base), fingerprint(base))
    assert not same(fingerprint(base), fingerprint(base | {name: CHANGES[name]}))


def test_an_ngram_embedding_depends_on_the_last_n_tokens_only():
    model = tiny(ngram=3, ngram_buckets=1_000_003)
    tokens = torch.randint(29, (1, 16))
    embedded = model.ngrams(tokens, None)
    for changed in range(16):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 29
        differs = (model.ngrams(other, None) != embedded).any(-1)[0]
        assert differs.tolist() == [changed <= t <= changed + 2 for t in range(16)]
    again = torch.cat((tokens[:, 5:8], tokens[:, 5:8]), dim=1)  # the same three tokens, the same embedding
    assert_close(model.ngrams(again, None)[0, 5], embedded[0, 7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_computed_in_float32_or_more(dtype: torch.dtype, reduction: str):
    model, ids = tiny().to(dtype), torch.randint(29, (1300, 16))  # a sum above the largest float16
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).flatten(0, 1).double(), ids.flatten(), reduction=reduction)
        loss = model(ids, ids, reduction=reduction)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_an_empty_batch_has_empty_logits():
    model = tiny(position="rope", ngram=2, smear=1, qk_norm=True)
    assert model(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4, 29)


def test_an_input_longer_than_the_context_raises():
    model = tiny(position="rope")
    with pytest.raises(ValueError, match=r"17 tokens exceed block_size=16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    cache = model.new_cache(1)
    model(torch.zeros(1, 12, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match=r"17 tokens exceed block_size=16"):
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    assert model(torch.zeros(1, 4, dtype=torch.long), cache=cache).shape == (1, 4, 29)


@pytest.mark.parametrize("place", ["embedding", "attention", "mlp"])
def test_dropout_zeroes_its_fraction_and_scales_the_rest(place: str):
    model = tiny(dropout=0.2, n_embd=64)
    layer = model.blocks[0] if place == "embedding" else getattr(model.blocks[0], place)
    seen: list[Tensor] = []  # of the embedding, what goes into the first block
    if place == "embedding":
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    else:
        layer.register_forward_hook(lambda *given: seen.append(given[-1]))
    tokens = torch.randint(29, (100, 16))
    model(tokens)
    if place == "embedding":
        model.training = True  # and not the modules inside
    else:
        layer.train()
    model(tokens)
    plain, dropped = seen
    zeros = dropped == 0
    # Of 102,400 numbers, more than five standard deviations.
    assert zeros.float().mean().item() == pytest.approx(0.2, abs=0.0065)
    if place != "attention":  # whose weights are dropped as well
        assert_near(dropped[~zeros], plain[~zeros] / 0.8, terms=2)


def test_ngram_dropout_zeroes_whole_embeddings_and_scales_the_rest():
    model, seen = tiny(ngram=4, ngram_dropout=0.2), list[Tensor]()
    model.ngrams.out.register_forward_pre_hook(lambda _, given: seen.append(given[0].unflatten(-1, (3, -1))))
    tokens = torch.randint(29, (1000, 16))
    model(tokens)
    model.train()
    model(tokens)
    plain, dropped = seen
    kept = (dropped != 0).any(-1)
    assert kept.float().mean().item() == pytest.approx(0.8, abs=0.01)  # of 48,000: more than five standard deviations
    assert_near(dropped[kept], plain[kept] / 0.8, terms=2)


@pytest.mark.parametrize(
    "settings",
    [{}, LLAMA, {"head_dim": 24, "n_kv_head": 2}, {"n_layer": 6, "layer_repeats": 3}],
    ids=["gpt2", "llama", "grouped", "shared"],
)
def test_flops_per_token_equal_those_of_a_training_step(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    # Every matrix product in sight of the counter.
    monkeypatch.setattr(attention, "attend", lambda *args, **options: attention.attend_explicit(*args, **options)[0])
    model = GPT(GPTConfig(**{**TINY, "n_embd": 128, "vocab_size": 512, "block_size": 64, **settings}))
    tokens, targets = torch.randint(29, (2, 3, 64))
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets).backward()
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(model.config.flops_per_token(), rel=0.01)


def tiny(**settings: Any) -> GPT:
    """Return a small model in evaluation mode, with weights large enough that every part changes the logits."""
    model = GPT(GPTConfig(**{**TINY, **settings})).eval()
    draw_weights(model)
    return model


def draw_weights(model: nn.Module) -> None:
    """Make every parameter random: matrices and biases around 0, norm weights around 1."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and module.weight is not None:
            module.weight.data += 1


Fingerprint = tuple[dict[str, torch.Size], Tensor]


def same(one: Fingerprint, other: Fingerprint) -> bool:
    return one[0] == other[0] and torch.allclose(one[1], other[1], atol=1e-4)


def fingerprint(settings: dict[str, Any]) -> Fingerprint:
    """Return the shapes of the weights, and logits in training mode."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**settings))
    draw_weights(model)
    torch.manual_seed(0)
    logits = model(torch.arange(16).view(1, 16))
    return {name: p.shape for name, p in model.named_parameters()}, logits.detach()
