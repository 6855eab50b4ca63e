"""The decoder and its exports against a live transformers; runs where torch is (.venv-parity)."""

import copy
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from goldens.make_goldens import SIZES, VARIANTS, make_model  # noqa: E402

from mas_jax.models import families, hf, transformer  # noqa: E402 (needs torch to be worth loading)

pytestmark = pytest.mark.parity
# Longer than any window, and up to 4 times the original positions of what is stretched.
LENGTH, PROMPT, NEW = 64, 16, 24
PACKED = ((64,), (40, 24), (5,))
TEMPERATURE = 0.7


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """A transformers model with random weights, the directory it is saved in, and what we load from there."""
    model = make_model(request.param, seed=11)
    path = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(path)
    return model, path, *hf.load(path)


def batch():
    """Packed rows: tokens, positions and segments [B, T], and (row, span) of each of the sequences in them."""
    tokens = np.random.default_rng(5).integers(0, SIZES["vocab_size"], (len(PACKED), LENGTH))
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    spans = []
    for row, lengths in enumerate(PACKED):
        for number, (start, length) in enumerate(zip(np.cumsum((0, *lengths)), lengths, strict=False)):
            span = slice(start, start + length)
            positions[row, span], segments[row, span] = np.arange(length), number + 1
            spans.append((row, span))
    return tokens, positions, segments, spans


def their_logits(model):
    """Of every sequence of the batch, one behind the other."""
    tokens, _, _, spans = batch()
    return torch.cat([model(torch.tensor(tokens[row, span])[None]).logits[0] for row, span in spans])


def assert_same_logits(config, params, model):
    tokens, positions, segments, spans = batch()
    logits = our_logits(config, params, tokens, positions, segments)
    ours = np.concatenate([logits[row, span] for row, span in spans])
    with torch.no_grad():
        theirs = their_logits(model).numpy()
    assert np.abs(ours - theirs).max() <= 1e-4 * np.ptp(theirs)


@torch.no_grad()
def saved_gradients(model, path):
    """What the last backward pass gave every tensor, in the names and shapes of a checkpoint."""
    gradients = copy.deepcopy(model)
    for gradient, weight in zip(gradients.parameters(), model.parameters(), strict=True):
        gradient.copy_(weight.grad)
    gradients.save_pretrained(path)
    return load_file(path / "model.safetensors")


def opened(path, **settings):
    """The model of a directory in float32 unless told otherwise, and what transformers says about its keys."""
    settings = {"dtype": torch.float32, "attn_implementation": "eager", **settings}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **settings)
    return model.eval(), info


@jax.jit(static_argnums=0)
def our_logits(config, params, tokens, positions, segments):
    hidden = transformer.forward(config, params, tokens, positions, segments, dtype=jnp.float32)
    return transformer.head_logits(config, params, hidden, dtype=jnp.float32)


@jax.jit(static_argnums=0)
@partial(jax.grad, argnums=1)
def mean_logprob_gradient(config, params, tokens, positions, segments):
    hidden = transformer.forward(config, params, tokens, positions, segments, dtype=jnp.float32)
    inside = (segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])
    targets = jnp.pad(jnp.where(inside, tokens[:, 1:], -1), ((0, 0), (0, 1)), constant_values=-1)
    temperature = jnp.full(tokens.shape, TEMPERATURE)
    logprobs, _ = transformer.token_logprobs(config, params, hidden, targets, temperature, dtype=jnp.float32)
    return jnp.sum(logprobs) / jnp.sum(targets >= 0)


@jax.jit(static_argnums=0)
def cached_logits(config, unstacked, tokens, start, cache):
    hidden, cache, _ = transformer.forward_cached(config, unstacked, tokens, start, cache, dtype=jnp.float32)
    return transformer.head_logits(config, unstacked, hidden[:, -1], dtype=jnp.float32), cache


def test_logits_of_packed_rows_are_those_of_transformers(pair):
    model, _, config, params = pair
    assert_same_logits(config, params, model)


def test_gradients_of_the_mean_logprob_are_those_of_torch_for_every_tensor(pair, tmp_path):
    model, _, config, params = pair
    tokens, positions, segments, spans = batch()
    grads = mean_logprob_gradient(config, params, tokens, positions, segments)
    hf.save(tmp_path / "ours", config, grads)
    ours = load_file(tmp_path / "ours/model.safetensors")

    model.zero_grad()
    logits = their_logits(model).split([span.stop - span.start for _, span in spans])
    logprobs = [
        torch.log_softmax(one[:-1] / TEMPERATURE, dim=-1).gather(1, torch.tensor(tokens[row, span])[1:, None])
        for one, (row, span) in zip(logits, spans, strict=True)
    ]
    torch.cat(logprobs).mean().backward()
    theirs = saved_gradients(model, tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    whole = np.sqrt(sum(np.sum(grad**2) for grad in theirs.values()))
    for key, expected in theirs.items():
        norm = np.linalg.norm(expected)
        if not key.endswith("k_proj.bias"):
            assert norm > 1e-4 * whole, key
        # Without positions softmax takes no note of a bias of the keys: its gradient is rounding.
        assert np.linalg.norm(ours[key] - expected) <= 1e-3 * max(norm, 1e-4 * whole), key


def test_decoding_through_the_cache_gives_the_logits_and_the_tokens_of_generate(pair):
    model, _, config, params = pair
    model.generation_config.eos_token_id = None
    prompt = torch.tensor(batch()[0][:, :PROMPT])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    theirs, said = torch.stack(out.logits, dim=1), out.sequences
    with torch.no_grad():
        whole = model(said).logits[:, PROMPT - 1 : -1]
    theirs, whole = theirs.numpy(), whole.numpy()
    assert np.abs(theirs - whole).max() <= 1e-4 * np.ptp(whole), "generate is not exact"

    rows, unstacked = len(prompt), transformer.unstack(params)
    cache = transformer.init_cache(config, rows, LENGTH, jnp.float32)
    ours = []
    for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + NEW - 1))]:
        logits, cache = cached_logits(config, unstacked, said[:, start:end].numpy(), jnp.full(rows, start), cache)
        ours.append(logits)
    ours = np.stack(ours, axis=1)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.ptp(theirs)
    second, first = np.moveaxis(np.sort(theirs, axis=-1)[..., -2:], -1, 0)
    clear = first - second > 1e-3 * np.ptp(theirs)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(ours.argmax(-1)[clear], said[:, PROMPT:].numpy()[clear])


@pytest.mark.parametrize("with_source", [True, False])
def test_an_export_opens_in_transformers_with_the_same_logits_and_no_warning(pair, with_source, tmp_path, caplog):
    model, source, config, params = pair
    changed = jax.tree.map(lambda x: x * 1.01, params)
    hf.save(tmp_path / "ours", config, changed, source=source if with_source else None)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        again, info = opened(tmp_path / "ours")
    finally:
        logger.removeHandler(caplog.handler)
    assert not any(info.values()), info
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
    assert type(again) is type(model)
    assert_same_logits(config, changed, again)
    with pytest.raises(AssertionError):
        assert_same_logits(config, changed, model)


def test_a_bfloat16_export_opens_as_bfloat16(pair, tmp_path):
    _, source, config, params = pair
    changed = jax.tree.map(lambda x: x * 1.01, params)
    hf.save(tmp_path / "ours", config, changed, source=source, dtype="bfloat16")
    assert opened(tmp_path / "ours", dtype="auto")[0].dtype == torch.bfloat16
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), changed)
    # Opened anew, as a model that was once in bfloat16 keeps constants that are rounded to it.
    assert_same_logits(config, rounded, opened(tmp_path / "ours")[0])


def test_there_is_a_variant_of_every_family():
    kinds = {f"{architecture.removesuffix('Text')}ForCausalLM" for architecture, _ in VARIANTS.values()}
    assert kinds == {family.architecture for family in families.FAMILIES.values()}


def test_the_text_tower_of_a_vision_model_is_read_and_exported_as_a_text_model(tmp_path):
    text = make_model("gemma3_tied", seed=11)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    both = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=260,
        boi_token_index=261, eoi_token_index=262, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration._from_config(both, attn_implementation="eager").eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    assert_same_logits(config, params, text)
    hf.save(tmp_path / "ours", config, params, source=tmp_path / "theirs")
    again, info = opened(tmp_path / "ours")
    assert not any(info.values()), info
    assert type(again) is type(text)
    assert_same_logits(config, params, again)
