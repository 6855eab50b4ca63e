"""The decoder and its exports against a live transformers; runs where torch is (.venv-parity)."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from goldens.make_goldens import make_model  # noqa: E402

from mas_jax.models import hf, transformer  # noqa: E402 (needs torch to be worth loading)

pytestmark = pytest.mark.parity
MODELS = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)]
NEW = 16


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}_{'tied' if p[1] else 'untied'}")
def pair(request, tmp_path_factory):
    """A transformers model with random weights, the directory it is saved in, and what we load from there."""
    family, tied = request.param
    model = make_model(family, tied, seed=11)
    path = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(path)
    return model, path, *hf.load(path)


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


@jax.jit(static_argnums=0)
def our_logits(config, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden = transformer.forward(config, params, tokens, positions, jnp.ones_like(tokens), dtype=jnp.float32)
    return transformer.head_logits(config, params, hidden, dtype=jnp.float32)


def batch():
    """Byte tokens alone: torch's embedding withholds the gradient of the padding token."""
    return np.random.default_rng(5).integers(0, 256, (3, 64))


def test_logits_are_those_of_transformers(pair):
    model, _, config, params = pair
    theirs = their_logits(model, batch())
    assert np.abs(our_logits(config, params, jnp.asarray(batch())) - theirs).max() <= 1e-4 * np.ptp(theirs)


def test_greedy_tokens_are_those_of_generate_wherever_the_choice_is_clear(pair):
    model, _, config, params = pair
    prompt = batch()[:, :16]
    out = model.generate(
        torch.tensor(prompt), attention_mask=torch.ones(prompt.shape, dtype=torch.long), max_new_tokens=NEW,
        min_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    raw = np.stack([step.numpy() for step in out.logits], axis=1)
    eos = model.config.eos_token_id
    raw[..., eos] = -np.inf  # min_new_tokens forbids it
    top = np.sort(raw, axis=-1)
    clear = top[..., -1] - top[..., -2] > 1e-2
    assert clear.mean() > 0.5
    ours = np.array(our_logits(config, params, jnp.asarray(out.sequences.numpy())))[:, 15:-1]
    ours[..., eos] = -np.inf
    new = out.sequences.numpy()[:, 16:]
    np.testing.assert_array_equal(ours.argmax(-1)[clear], new[clear])


@pytest.mark.parametrize("with_source", [True, False])
def test_an_export_opens_in_transformers_with_the_same_logits_and_no_warning(pair, with_source, tmp_path, caplog):
    model, source, config, params = pair
    changed = jax.tree.map(lambda x: x * 1.01, params)
    hf.save(tmp_path / "ours", config, changed, source=source if with_source else None)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        opened, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", output_loading_info=True, dtype=torch.float32
        )
    finally:
        logger.removeHandler(caplog.handler)
    assert not any(info.values()), info
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
    assert type(opened) is type(model)
    theirs = their_logits(opened.eval(), batch())
    assert np.abs(our_logits(config, changed, jnp.asarray(batch())) - theirs).max() <= 1e-4 * np.ptp(theirs)
    assert np.abs(theirs - their_logits(model, batch())).max() > 1e-3 * np.ptp(theirs)


def test_a_bfloat16_export_opens_as_bfloat16(pair, tmp_path):
    _, source, config, params = pair
    hf.save(tmp_path / "ours", config, params, source=source, dtype="bfloat16")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert opened.dtype == torch.bfloat16
    theirs = their_logits(opened.float().eval(), batch())
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert np.abs(our_logits(config, rounded, jnp.asarray(batch())) - theirs).max() <= 1e-4 * np.ptp(theirs)


def test_gradients_of_the_token_logprobs_are_those_of_torch(pair):
    model, _, config, params = pair
    tokens = batch()
    logs = torch.log_softmax(model(torch.tensor(tokens)).logits[:, :-1] / 0.7, dim=-1)
    model.zero_grad()
    torch.gather(logs, 2, torch.tensor(tokens[:, 1:, None])).sum().backward()

    def loss(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        hidden = transformer.forward(config, params, tokens, positions, jnp.ones_like(tokens), dtype=jnp.float32)
        targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        temperature = jnp.full(tokens.shape, 0.7)
        return jnp.sum(transformer.token_logprobs(config, params, hidden, targets, temperature, dtype=jnp.float32)[0])

    ours = jax.jit(jax.grad(loss))(params, jnp.asarray(tokens))
    theirs = dict(model.named_parameters())
    pairs = {
        "model.embed_tokens.weight": ours["embed"],
        "model.layers.1.self_attn.o_proj.weight": ours["layers"]["attention"]["o"][1].reshape(32, 32).T,
        "model.layers.0.self_attn.k_proj.weight": ours["layers"]["attention"]["k"][0].reshape(32, 16).T,
        "model.layers.0.mlp.down_proj.weight": ours["layers"]["mlp"]["down"][0].T,
    }
    for name, grad in pairs.items():
        expected = theirs[name].grad.numpy()
        assert np.linalg.norm(grad - expected) <= 1e-4 * np.linalg.norm(expected), name
