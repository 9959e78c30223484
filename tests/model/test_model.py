"""The GPT compared with torch's transformer layers, its published sizes and invariants."""

import math
import re
from functools import cache
from typing import Any

import pytest
import torch
from exported import MODELS
from hydra import compose, initialize_config_dir
from models import make_model
from omegaconf import OmegaConf
from small_runs import CONFIGS
from tolerance import assert_near, terms_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from minigpt import generate
from minigpt.extras.interpret.heads import attention_maps, without_head
from minigpt.model import attention
from minigpt.model.changes import find_change
from minigpt.model.config import NORM_PARAMS, UP_PROJECTIONS, GPTConfig
from minigpt.model.ops import ACTIVATIONS, NORMS
from minigpt.sampling.fast.fast_decoder import FastDecoder

LLAMA = {
    "position": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
THEIRS = {"attention.qkv.": "self_attn.in_proj_", "attention.out": "self_attn.out_proj"}
THEIRS |= {"mlp.up": "linear1", "mlp.down": "linear2", "norm_1": "norm1", "norm_2": "norm2"}


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_logits_equal_those_of_torchs_transformer_layers(norm_position: str):
    pre = norm_position == "pre"
    model = make_model(norm_position=norm_position)
    tokens = torch.randint(23, (3, 16))
    x = F.embedding(tokens, model.wte.weight) + model.wpe.weight
    for block in model.blocks:
        weights = block.state_dict()
        for name, their_name in THEIRS.items():
            weights = {key.replace(name, their_name): weight for key, weight in weights.items()}
        layer = nn.TransformerEncoderLayer(
            16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=pre
        ).eval()
        layer.load_state_dict(weights)
        x = layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(16), is_causal=True)
    if pre:
        x = F.layer_norm(x, (16,), model.final_norm.weight, model.final_norm.bias)
    assert_near(model(tokens), x @ model.wte.weight.T, terms=terms_of(model.config))


def test_the_presets_of_gpt2_have_the_published_sizes():
    sizes = {"gpt2": 124_439_808, "gpt2_medium": 354_823_168}
    sizes |= {"gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200}
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for name, size in sizes.items():
            preset = compose(f"model/{name}").model
            assert GPTConfig(**{**preset, "vocab_size": 50257}).num_params() == size


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_a_model_has_the_parameters_that_its_config_counts_and_all_tensors_on_its_device(
    settings: dict[str, Any],
):
    model = make_model(std=None, **{"dropout": 0.1, **settings}).train()
    learned = model.wpe.weight.numel() if model.config.position == "learned" else 0
    assert model.config.num_params() == model.num_params()
    assert model.config.num_params(positions=False) == model.num_params() - learned
    # Which stands for a GPU
    tokens = torch.zeros(2, model.config.block_size, dtype=torch.long, device="meta")
    with torch.no_grad():
        assert model.to("meta")(tokens, tokens).device.type == "meta"


def test_repeated_layers_are_those_of_a_model_with_copies_of_their_weights():
    settings = {**LLAMA, "n_layer": 6, "ngram": 3}
    shared = make_model(**settings, layer_repeats=3)
    copies = make_model(**settings)
    copies.load_state_dict(shared.state_dict())
    tokens = torch.randint(23, (2, 16))
    assert_close(shared(tokens), copies(tokens))
    assert len({id(block) for block in shared.blocks}) == 2
    for model in (shared, copies):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    gradients = [copies.blocks[i].mlp.up.weight.grad for i in (1, 3, 5)]
    assert_close(shared.blocks[1].mlp.up.weight.grad, sum(gradients))
    for layers in (slice(None), slice(3, 4)):
        maps = attention_maps(shared, tokens[0], layers)
        assert_close(maps, attention_maps(copies, tokens[0], layers))
    assert_close(without_head(shared, 3, 1)(tokens), without_head(copies, 3, 1)(tokens))
    sample = generate(shared, [1, 2], max_new_tokens=20)
    assert sample == generate(copies, [1, 2], max_new_tokens=20)


def test_tied_embeddings_are_one_matrix_with_the_sum_of_both_gradients():
    tied = make_model()
    untied = make_model(tie_embeddings=False)
    assert tied.lm_head.weight is tied.wte.weight
    untied.load_state_dict(tied.state_dict())
    tokens, targets = torch.randint(23, (2, 3, 16))
    for model in (tied, untied):
        model(tokens, targets).backward()
    both = untied.wte.weight.grad + untied.lm_head.weight.grad
    assert_near(tied.wte.weight.grad, both, terms=3 * 16)


def test_weights_are_initialized_as_gpt2s():
    sizes = {"vocab_size": 999, "n_layer": 8, "n_embd": 128, "block_size": 256}
    for name, parameter in make_model(std=None, **sizes).named_parameters():
        if parameter.dim() == 2:
            into_the_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 8) if into_the_stream else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < std / 20, name
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


# Settings, of which the last changes the model.
SETTINGS = """
    block_size=17 vocab_size=24 n_layer=3 layer_repeats=2 n_head=4 n_kv_head=1 n_embd=36 head_dim=6
    n_inner=50 bias=false qkv_bias=false dropout=0.5 norm=rmsnorm norm_eps=0.1 norm_position=post
    position=none position=rope,rope_base=100.0
    position=rope,rope_original_block_size=16,rope_factor=8.0
    scaled,rope_low_freq_factor=3.0 scaled,rope_high_freq_factor=9.0
    scaled,rope_original_block_size=100
    activation=relu qk_norm=true qk_norm=true,qk_norm_weights=true tie_embeddings=false
    smear=2 embed_norm=true
    ngram=3 ngram=2,ngram_buckets=50 ngram=2,ngram_dim=5 ngram=2,ngram_dropout=0.5 logit_softcap=0.5
    parametrization=mup parametrization=mup,base_n_embd=64 parametrization=mup,base_head_dim=16
""".replace("scaled", "position=rope,rope_factor=4.0,rope_original_block_size=16").split()


@cache
@torch.no_grad()
def outputs(*given: str) -> Tensor:
    """Return the logits in training of a model with these settings."""
    model = make_model(**OmegaConf.from_dotlist(list(given))).train()
    torch.manual_seed(0)
    return model(torch.arange(16)[None])


@pytest.mark.parametrize("given", SETTINGS)
def test_every_setting_changes_the_model_and_what_repeats_its_forward_pass(given: str):
    values = given.split(",")
    before = outputs(*values[:-1])
    found = outputs(*values)
    assert before.shape != found.shape or not torch.allclose(before, found, atol=1e-4)
    model = make_model(**OmegaConf.from_dotlist(values))
    assert find_change(model) is None
    assert model.num_params() == model.config.num_params()
    text = torch.arange(model.config.block_size) % 23
    close = {"terms": terms_of(model.config)}
    with torch.no_grad():
        decoder = FastDecoder(model, [text[:3].tolist()], 1, len(text))
        logits = [decoder.step(token[None])[0].clone() for token in text[2:]]
        assert_near(torch.stack(logits), model(text[None])[0, 2:], **close)
        attention = model.blocks[0].attention
        x = torch.randn(1, len(text), model.config.n_embd)
        v = attention._project(x, None)[2].transpose(1, 2)
        v = v.repeat_interleave(attention.n_head // attention.n_kv_head, dim=1)  # (1, H, T, D)
        y = (attention.attention_weights(x, rotary=model.rotary) @ v).transpose(1, 2).flatten(2)
        assert_near(attention.out(y), attention(x, rotary=model.rotary), **close)


def test_every_setting_activation_and_norm_has_its_test_and_its_size():
    tested = [given.rpartition(",")[2].partition("=")[0] for given in SETTINGS]
    assert {*tested} == {*GPTConfig.__dataclass_fields__}
    assert ACTIVATIONS.keys() == UP_PROJECTIONS.keys()
    assert NORMS.keys() == NORM_PARAMS.keys()


def test_an_ngram_embedding_depends_on_the_last_n_tokens_only():
    model = make_model(ngram=3, ngram_buckets=50_021)
    tokens = torch.randint(23, (1, 2 + 16))  # the first two are context alone
    embedded = model.ngrams(tokens)
    for changed in range(18):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 23
        differs = (model.ngrams(other) != embedded).any(-1)[0]
        assert differs.tolist() == [changed <= t <= changed + 2 for t in range(2, 18)]
    embedded.sum().backward()
    used = model.ngrams.table.weight.grad.any(-1).unflatten(0, (2, -1))
    assert used.any(-1).all()  # bigrams and trigrams have rows of their own
    again = tokens[:, 5:8].repeat(1, 3)  # the same three tokens, the same embedding
    assert_close(model.ngrams(again)[0, 3], embedded[0, 5])


def test_smear_adds_the_embeddings_of_previous_tokens_times_its_factors_before_the_norm():
    model = make_model(smear=2, embed_norm=True, position="none")
    tokens = torch.randint(23, (1, 16))
    x = model.wte(tokens)
    second, first = model.smear  # the last is for the previous token
    x = x + first * F.pad(x, (0, 0, 1, -1)) + second * F.pad(x, (0, 0, 2, -2))
    assert_close(model.embed(tokens, slice(16), None), F.rms_norm(x, (16,), eps=1e-5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_loss_is_computed_in_float32_or_more(dtype: torch.dtype):
    model = make_model().to(dtype)
    ids = torch.randint(23, (1300, 16))  # a sum above the largest float16
    with torch.no_grad():
        logits = model(ids).flatten(0, 1).double()
        expected = F.cross_entropy(logits, ids.flatten(), reduction="sum")
        loss = model(ids, ids, reduction="sum")
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_an_input_longer_than_the_context_raises():
    model = make_model(position="rope")
    cache = model.new_cache(1)
    model(torch.zeros(1, 12, dtype=torch.long), cache=cache)
    for n, options in ((17, {}), (5, {"cache": cache})):
        with pytest.raises(ValueError, match=r"17 tokens exceed block_size=16"):
            model(torch.zeros(1, n, dtype=torch.long), **options)


CAPTURED = {
    "gpt2": (torch.bfloat16, {}),
    "fast_cpu, one key-value head": (torch.float32, {**MODELS["fast_cpu"], "n_kv_head": 1}),
}


@pytest.mark.xdist_group("compiled")  # one worker imports torch's compiler
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["export", "trace"])
@pytest.mark.parametrize("name", CAPTURED)
def test_an_exported_or_traced_model_computes_texts_of_every_length(name: str, how: str):
    dtype, settings = CAPTURED[name]
    # More than the formula attends to
    model = make_model(**{**settings, "block_size": 300, "n_layer": 1}).to(dtype)
    example = torch.randint(23, (2, 10))
    if how == "export":
        sizes = {0: torch.export.Dim("B", min=1, max=9), 1: torch.export.Dim("T", min=1, max=300)}
        captured = torch.export.export(model, (example,), dynamic_shapes=(sizes,)).module()
    else:
        captured = torch.jit.trace(model, (example,))
    for shape in ((1, 1), (1, 7), (3, 1), (2, 300)):
        ids = torch.randint(23, shape)
        with torch.no_grad():
            assert_near(captured(ids), model(ids), terms=terms_of(model.config))


def test_a_cache_is_filled_also_where_activations_are_recomputed():
    model = make_model().train()
    ids = torch.randint(23, (1, 6))
    cache = model.new_cache(1, 6)
    model.checkpoint_blocks = 1
    parts = [model(ids[:, :4], cache=cache), model(ids[:, 4:], cache=cache)]
    assert_near(torch.cat(parts, 1), model(ids), terms=terms_of(model.config))


def test_an_index_error_of_a_hook_is_not_blamed_on_the_tokens():
    model = make_model()
    model.wte.register_forward_hook(lambda module, args, x: [][0])
    with pytest.raises(IndexError, match="list index"):
        model(torch.tensor([[1, 2]]))


WRONG = {
    "token ids must be in [0, 23), got 1 to 23": ([[1, 23]], [[1, 2]]),
    "token ids must be in [0, 23), got -1 to 2": ([[-1, 2]],),
    "targets must have the shape of the tokens, (1, 3), got (1, 2)": ([[1, 2, 3]], [[1, 2]]),
    "targets must be in [0, 23), or -100, which is ignored; got -1 to 2": ([[1, 2]], [[2, -1]]),
    "targets must be in [0, 23), or -100, which is ignored; got 2 to 24": ([[1, 2]], [[2, 24]]),
    "the targets have no id: all are -100, which is ignored": ([[1, 2]], [[-100, -100]]),
}


@pytest.mark.parametrize("settings", [{}, {"ngram": 2, "smear": 1, "position": "rope"}])
def test_a_batch_that_does_not_fit_is_one_clear_error(settings: dict[str, Any]):
    model = make_model(**settings)
    for message, given in WRONG.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            model(*map(torch.tensor, given))


def test_a_loss_of_nan_weights_and_one_under_vmap_are_no_error():
    model = make_model()
    ids = torch.randint(23, (3, 1, 16))
    rows = torch.func.vmap(model)(ids, ids)  # (3,)
    assert_close(rows, torch.stack([model(row, row) for row in ids]))
    model.wte.weight.data[:] = math.nan
    assert model(ids[0], ids[0]).isnan()


@pytest.mark.parametrize("place", ["", "blocks.0.attention", "blocks.0.mlp"])
def test_dropout_zeroes_its_fraction_and_scales_the_rest(place: str):
    model = make_model(dropout=0.2, n_embd=64)
    seen = list[Tensor]()
    if place:
        model.get_submodule(place).register_forward_hook(lambda *given: seen.append(given[-1]))
    else:  # of the embedding, what goes into the first block
        model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for training in (False, True):
        model.get_submodule(place).training = training  # and not the modules inside
        model(torch.arange(1600).view(100, 16) % 23)
    plain, dropped = seen
    # Of 102,400 numbers, more than five standard deviations.
    assert (dropped == 0).float().mean().item() == pytest.approx(0.2, abs=0.0065)
    if place != "blocks.0.attention":  # whose weights are dropped as well
        assert_near(dropped[dropped != 0], plain[dropped != 0] / 0.8, terms=2)


def test_dropout_of_ngrams_drops_whole_embeddings():
    model = make_model(ngram=4, ngram_dropout=0.2).train()
    seen = list[Tensor]()
    model.ngrams.out.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(torch.randint(23, (100, 16)))
    zeros = (seen[0] == 0).unflatten(-1, (3, -1))  # 4,800 embeddings
    assert torch.equal(zeros.all(-1), zeros.any(-1))
    assert zeros.float().mean().item() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    "settings", [{}, LLAMA, {"head_dim": 24, "n_kv_head": 2}, {"n_layer": 6, "layer_repeats": 3}]
)
def test_flops_per_token_equal_those_of_a_training_step(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    # Every matrix product in sight of the counter.
    explicit = attention.attend_explicit
    monkeypatch.setattr(attention, "attend", lambda *args, **options: explicit(*args, **options)[0])
    sizes = {"n_head": 4, "n_embd": 128, "vocab_size": 512, "block_size": 64}
    model = make_model(std=None, **{**sizes, **settings})
    tokens = torch.randint(23, (1, 64))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    flops = counter.get_total_flops() / tokens.numel()
    assert flops == pytest.approx(model.config.flops_per_token(), rel=0.01)
