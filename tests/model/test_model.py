"""The GPT against torch's transformer layers; attention, norms and activations against formulas."""

import math
import re
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from exported import MODELS
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from models import make_model
from omegaconf import OmegaConf
from refusals import refused
from small_runs import CONFIGS
from tolerance import assert_near, terms_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from minigpt import generate
from minigpt.extras.interpret.heads import attention_maps, without_head
from minigpt.model import attention
from minigpt.model.attention import (
    MultiHeadAttention,
    attend,
    attend_explicit,
    rotary_table,
    rotate,
)
from minigpt.model.changes import find_change
from minigpt.model.config import NORM_PARAMS, UP_PROJECTIONS, GPTConfig
from minigpt.model.ops import ACTIVATIONS, NORMS, apply_dropout, relu_squared, rms_norm
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


@pytest.mark.parametrize("settings", [{}, LLAMA, {"norm_position": "post", "n_kv_head": 1}])
def test_documents_in_a_row_have_the_losses_of_each_alone(settings: dict[str, Any]):
    model = make_model(**settings).train()
    lengths = [[5, 1, 10], [16]]
    tokens = torch.randint(23, (2, 16))
    targets = torch.randint(23, (2, 16))
    alone = []
    for row, ids, following in zip(lengths, tokens, targets, strict=True):
        parts = zip(ids.split(row), following.split(row), strict=True)
        alone += [model(a[None], b[None], reduction="none") for a, b in parts]
    numbers = [torch.repeat_interleave(torch.tensor(row)) for row in lengths]
    documents = torch.stack(numbers) + torch.tensor([[0], [3]])
    for recomputed in (None, 1):
        model.checkpoint_blocks = recomputed
        losses = model(tokens, targets, documents, reduction="none")
        assert_close(losses, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(tokens, targets, reduction="none"), torch.cat(alone))


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
@pytest.mark.parametrize(("name", "how"), zip(CAPTURED, ("trace", "export"), strict=True))
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
    "targets must have the shape of the logits, (1, 2, 23), got (1, 2, 22)": (
        [[1, 2]],
        torch.ones(1, 2, 22),
    ),
    "targets must be in [0, 23), or -100, which is ignored; got -1 to 2": ([[1, 2]], [[2, -1]]),
    "targets must be in [0, 23), or -100, which is ignored; got 2 to 24": ([[1, 2]], [[2, 24]]),
    "the targets have no id: all are -100, which is ignored": ([[1, 2]], [[-100, -100]]),
}


@pytest.mark.parametrize("settings", [{}, {"ngram": 2, "smear": 1, "position": "rope"}])
def test_a_batch_that_does_not_fit_is_one_clear_error(settings: dict[str, Any]):
    model = make_model(**settings)
    for message, batch in WRONG.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            model(*map(torch.tensor, batch))


def test_targets_may_be_probabilities():
    model = make_model()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    ids = torch.tensor([[2, 3, 4], [5, 6, 7]])
    p = torch.rand(2, 3, 23).softmax(-1)
    expected = -(p * model(tokens).log_softmax(-1)).sum(-1).flatten()  # (B·T,)
    assert_close(model(tokens, p, reduction="none"), expected)
    assert_close(model(tokens, p), expected.mean())
    assert_close(model(tokens, F.one_hot(ids, 23)), model(tokens, ids))
    with torch.autocast("cpu", torch.bfloat16):  # whose logits are rounded, but not the targets
        expected = -(p * model(tokens).float().log_softmax(-1)).sum(-1).mean()
        assert_close(model(tokens, p), expected, rtol=1e-5, atol=0)


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


TERMS = 24 + 6 + 9 + 24  # of the modules below: projection, scores, values, output


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    B, K, groups, T = (draw(st.integers(1, most)) for most in (2, 2, 3, 4))
    S, D, E = (draw(st.integers(1, most)) for most in (8, 6, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    shapes = {"q": (B, K * groups, T, D), "k": (B, K, S, D), "v": (B, K, S, E)}
    problem: dict[str, Any] = {}
    for name, shape in shapes.items():
        problem[name] = torch.randn(shape, generator=generator).to(dtype)
    problem["mask"] = None
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, size])) for size in (B, K * groups, T, S)]
        shape = sizes[draw(st.integers(0, 4)) :]  # from a number to (B, H, T, S)
        share = draw(st.sampled_from([0.2, 0.5, 0.9]))
        problem["mask"] = torch.rand(shape, generator=generator) < share
    problem["causal"] = draw(st.booleans())
    problem["scale"] = draw(st.none() | st.floats(0.01, 1.5))
    return problem


@given(problems())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_fused_and_explicit_attention_equal_the_formula_in_value_and_gradient(
    problem: dict[str, Any],
):
    inputs = [problem[name].requires_grad_() for name in "qkv"]
    dtype = problem["q"].dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_weights = formula(**{**problem, **dict(zip("qkv", exact, strict=True))})
    direction = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    references = torch.autograd.grad(expected, exact, direction.double())
    explicit, weights = attend_explicit(**problem)
    assert_near(weights.double(), expected_weights, *inputs, terms=8 + 6, dtype=dtype)
    for y in (attend(**problem), explicit):
        assert y.dtype == dtype
        assert_near(y.double(), expected, *inputs, terms=8 + 6, dtype=dtype)
        gradients = torch.autograd.grad(y, inputs, direction)
        for gradient, reference in zip(gradients, references, strict=True):
            assert_near(gradient.double(), reference, *inputs, terms=2 * (8 + 6), dtype=dtype)


@pytest.mark.parametrize(
    ("bias", "causal", "padded"), [(True, True, True), (False, True, False), (True, False, True)]
)
def test_output_and_weights_equal_those_of_torchs_module(bias: bool, causal: bool, padded: bool):
    reference = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiHeadAttention(24, 4, bias=bias, causal=causal, scale=0.2)
    weights = {}
    for name, weight in reference.state_dict().items():
        weights[name.replace("in_proj_", "qkv.").replace("out_proj", "out")] = weight
    ours.load_state_dict(weights)
    for name, projection in reference.named_parameters():
        if name.startswith("in_proj"):  # of the queries: the module's own scale is 1/√6
            projection.data[:24] *= 0.2 * math.sqrt(6)
    x = torch.randn(2, 7, 24)
    masks: dict[str, Any] = {"attn_mask": torch.ones(7, 7).triu(1).bool() if causal else None}
    mask = None
    if padded:
        masks["key_padding_mask"] = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
        mask = ~masks["key_padding_mask"][:, None, None]
    expected, expected_weights = reference(x, x, x, **masks, average_attn_weights=False)
    assert_near(ours(x, mask=mask), expected, terms=TERMS)
    assert_near(ours.attention_weights(x, mask=mask), expected_weights, terms=TERMS)


def test_rotation_multiplies_pairs_as_complex_numbers():
    x = torch.randn(2, 10, 3, 8)
    start = 1_000_003
    positions = torch.arange(start, start + 10)[:, None, None]
    angle = positions * 50.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turn = torch.polar(torch.ones_like(angle), angle)
    expected = torch.complex(x[..., :4], x[..., 4:]) * turn
    rotated = rotate(x, rotary_table(10, 8, 50.0, start=start))
    assert_near(rotated, torch.cat((expected.real, expected.imag), -1).float(), x, terms=2)


# The fused kernel, and the formula
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_weights(dtype: torch.dtype):
    attention = MultiHeadAttention(64, 4, dropout=0.2).to(dtype)
    attention.out = nn.Identity()
    # A token sees itself alone
    y = attention(torch.randn(5000, 1, 64, dtype=dtype)).unflatten(-1, (4, 16))
    # Of 20,000 weights, more than five standard deviations; dropout of the output is rarer
    assert (y == 0).all(-1).float().mean().item() == pytest.approx(0.2, abs=0.015)


def test_a_width_that_heads_do_not_divide_is_refused():
    refused(r"^n_embd must be divisible by n_head=4, got 10", MultiHeadAttention, 10, 4)


def formula(q, k, v, *, causal, mask, scale) -> tuple[Tensor, Tensor]:
    # Compute attention one query at a time over its visible keys: output and weights
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    visible = torch.ones(B, H, T, S, dtype=torch.bool) if mask is None else mask.expand(B, H, T, S)
    scale = 1 / math.sqrt(D) if scale is None else scale
    rows = []
    outputs = []
    for b, h, t in product(range(B), range(H), range(T)):
        group = h * K // H
        seen = visible[b, h, t] & (torch.arange(S) <= (t + S - T if causal else S))
        raised = (k[b, group] @ q[b, h, t] * scale).exp() * seen
        rows.append(raised / (raised.sum() if seen.any() else 1))
        outputs.append(rows[-1] @ v[b, group])
    return torch.stack(outputs).view(B, H, T, -1), torch.stack(rows).view(B, H, T, S)


def assert_same(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor
) -> None:
    # Compare results, and the gradients of a random weighting of them by every input
    found = []
    for one in (function, reference):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y = one(*leaves)
        weighting = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        found.append([y.detach(), *torch.autograd.grad((y * weighting).sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert_near(a, b, terms=288)  # numbers in the largest input


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_rms_norm_equals_torchs(scale: float):
    x = scale * torch.randn(2, 4, 9, 8)
    weight, bias = torch.randn(2, 8)

    def reference(x: Tensor, w: Tensor | None = None, b: Any = 0.0) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w, eps=1e-5) + b

    for tensors in ([x], [x.transpose(0, -2), weight], [x, weight, bias]):
        assert_same(rms_norm, reference, *tensors)


def test_on_a_gpu_autocast_computes_norms_with_weights_in_float32():
    # Others are computed in the type of their input
    before = torch.is_autocast_enabled("cuda")
    found = {}
    try:
        torch.set_autocast_enabled("cuda", True)  # `torch.autocast` asks for a GPU
        with FakeTensorMode():  # types and shapes alone, on any device
            x = torch.empty(2, 8, device="cuda", dtype=torch.bfloat16)
            weight = torch.empty(8, device="cuda")
            for name, norm in NORMS.items():
                found[name, True] = norm(x, None).dtype
                found[name, False] = norm(x, weight).dtype
    finally:
        torch.set_autocast_enabled("cuda", before)
    reduced = {key for key, dtype in found.items() if dtype == torch.bfloat16}
    assert reduced == {("rmsnorm", True), ("rmsnorm_noscale", True)}
    assert set(found.values()) == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_weights_of_a_norm_may_have_another_type_than_its_input(
    dtypes: tuple[torch.dtype, torch.dtype],
):
    x = torch.randn(2, 4, 8).to(dtypes[0])
    weight = torch.randn(8).to(dtypes[1])
    for norm in NORMS.values():
        assert torch.equal(norm(x, weight), norm(x, weight.to(x.dtype)))


def test_rms_norm_of_zeros_is_zero_and_has_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    y = rms_norm(x)
    y.sum().backward()
    assert not y.any()
    assert x.grad.isfinite().all()


def test_relu_squared_equals_torchs_and_in_bfloat16_that_of_64_bits_rounded():
    x = torch.randn(3, 5, 16)
    assert_same(relu_squared, lambda x: F.relu(x).square(), x)
    x = x.bfloat16().requires_grad_()
    positive = F.relu(x.detach().double())
    assert_near(relu_squared(x).double(), positive.square(), terms=1, dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(relu_squared(x).sum(), x)
    assert_near(found.double(), 2 * positive, terms=1, dtype=torch.bfloat16)


@pytest.mark.parametrize(("p", "dtype"), [(0.1, torch.float32), (0.5, torch.bfloat16)])
def test_dropout_drops_each_element_independently_and_scales_the_rest(p: float, dtype: torch.dtype):
    x = torch.ones(1_000_003, dtype=dtype, requires_grad=True)
    y = apply_dropout(x, p)
    dropped = (y == 0).float()
    deviation = (p * (1 - p) / len(x)) ** 0.5
    for i in range(4):  # elements that share a random number
        assert dropped[i::4].mean().item() == pytest.approx(p, abs=5 * 2 * deviation)
    centered = dropped - p
    for lag in (1, 2, 3, 4, 8):
        covariance = (centered[lag:] * centered[:-lag]).mean().item()
        assert covariance == pytest.approx(0, abs=5 * p * (1 - p) / len(x) ** 0.5)
    kept = y[dropped == 0].double()
    assert_near(kept, torch.full_like(kept, 1 / (1 - p)), terms=1, dtype=dtype)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y)
    assert apply_dropout(x, p, training=False) is x
    torch.manual_seed(0)
    assert torch.equal(apply_dropout(x, p), y)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_model_has_per_sample_gradients_and_second_derivatives_in_forward_and_reverse_mode():
    settings = {"norm": "rmsnorm", "activation": "relu2", "position": "rope", "qk_norm": True}
    model = make_model(std=None, smear=1, **settings)
    weights = dict(model.named_parameters())
    ids = torch.randint(23, (3, 9))

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Tensor:  # (9,)
        return torch.func.functional_call(model, weights, (ids[None, :-1], ids[None, 1:]))

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
    for i in range(3):
        gradients = torch.autograd.grad(loss(weights, ids[i]), [*weights.values()])
        assert_close([*gradients], [gradient[i] for gradient in per_sample.values()])
    # The fused kernel has neither
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        vectors = {name: torch.randn_like(weight) for name, weight in weights.items()}
        of_first = torch.func.grad(lambda weights: loss(weights, ids[0]))
        _, forward = torch.func.jvp(of_first, (weights,), (vectors,))
        first = loss(weights, ids[0])
        gradients = torch.autograd.grad(first, [*weights.values()], create_graph=True)
        products = torch.autograd.grad(gradients, [*weights.values()], [*vectors.values()])
    assert_close([*products], [*forward.values()], rtol=1e-4, atol=1e-4)


def gated_tanh(x: Tensor) -> Tensor:
    gate, x = x.chunk(2, dim=-1)
    return gate.tanh() * x


def mean_abs_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x / (x.abs().mean(-1, keepdim=True) + eps) * weight + bias


@pytest.mark.parametrize(
    ("setting", "functions", "function", "sizes", "size"),
    [
        ("activation", ACTIVATIONS, gated_tanh, UP_PROJECTIONS, 2),
        ("norm", NORMS, mean_abs_norm, NORM_PARAMS, ("weight", "bias")),
    ],
)
def test_a_function_and_its_size_add_an_activation_or_a_norm_to_model_and_sampling(
    setting: str,
    functions: Any,
    function: Any,
    sizes: Any,
    size: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    refused(f"model.{setting} must be one of", GPTConfig, **{setting: "new"})
    monkeypatch.setitem(functions, "new", function)
    monkeypatch.setitem(sizes, "new", size)
    model = make_model(**{setting: "new"})
    prompt = [3, 1]
    assert model.config.num_params() == model.num_params()
    (sample,) = generate(model, prompt, max_new_tokens=14, logprobs=True)
    full = model(torch.tensor([prompt + sample.tokens]))[0, 1:-1].log_softmax(-1)  # without a cache
    expected = full.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
    assert_near(torch.tensor(sample.logprobs), expected, full, terms=terms_of(model.config))


# The first of the five notebooks from which minigpt started: three tokens of width 2, no biases.
TOKENS = torch.tensor([[[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]])  # (1, 3, 2)
THREE_HEADS = [
    [1.0100, 1.0641, -0.7081, -0.8268, 0.6226, 0.1312],
    [0.2040, 0.7057, -0.7417, -0.9193, 0.5522, 0.2499],
    [3.4989, 2.2427, -0.7190, -0.8447, 0.5669, 0.2324],
]


def test_000_self_attention_with_and_without_a_mask():
    assert_printed(full_width_heads(3)(TOKENS)[0], THREE_HEADS)
    plain = full_width_heads(1)
    causal = full_width_heads(1, causal=True)
    weights = [[0.3573, 0.4011, 0.2416], [0.3410, 0.6047, 0.0542], [0.0722, 0.0320, 0.8959]]
    assert_printed(plain.attention_weights(TOKENS)[0, 0], weights)
    masked = [[1, 0, 0], [0.3606, 0.6394, 0], weights[2]]
    assert_printed(causal.attention_weights(TOKENS)[0, 0], masked)
    visible = torch.ones(3, 3, dtype=torch.bool).tril()  # true where the notebook's mask is false
    for output in (causal(TOKENS)[0], plain(TOKENS, mask=visible)[0]):
        assert_printed(output, [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]])


def full_width_heads(n_head: int, *, causal: bool = False) -> MultiHeadAttention:
    """Return concatenated heads as wide as the tokens, with notebook 000's weights."""
    torch.manual_seed(42)
    drawn = [nn.Linear(2, 2, bias=False).weight for _ in range(3 * n_head)]
    attention = MultiHeadAttention(2, n_head, head_dim=2, bias=False, causal=causal)
    attention.out = nn.Identity()
    attention.qkv.weight.data = torch.cat(drawn[::3] + drawn[1::3] + drawn[2::3]).detach()
    return attention


def assert_printed(actual: Tensor, figures: object) -> None:
    """Assert that values equal the figures that a notebook prints, to 4 decimals."""
    assert_close(actual, torch.tensor(figures, dtype=actual.dtype), atol=5.5e-5, rtol=0)
