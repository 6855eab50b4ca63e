"""The decoder against recorded answers of transformers (tests/goldens); needs no torch."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mas_jax.models import families, hf, transformer

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
LENGTH = 64


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    config, params = hf.load(GOLDENS / request.param)
    with np.load(GOLDENS / request.param / "golden.npz") as file:
        return config, params, dict(file)


def prompts(record):
    return np.split(record["tokens"], np.cumsum(record["lengths"])[:-1])


@jax.jit(static_argnums=0)
def all_logits(config, params, tokens, segments):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden = transformer.forward(config, params, tokens, positions, segments, dtype=jnp.float32)
    return transformer.head_logits(config, params, hidden, dtype=jnp.float32)


@jax.jit(static_argnums=0)
@partial(jax.grad, argnums=1)
def mean_logprob_gradient(config, params, tokens, segments):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden = transformer.forward(config, params, tokens, positions, segments, dtype=jnp.float32)
    targets = jnp.pad(jnp.where(segments[:, 1:] > 0, tokens[:, 1:], -1), ((0, 0), (0, 1)), constant_values=-1)
    ones = jnp.ones(tokens.shape, jnp.float32)
    logprobs, _ = transformer.token_logprobs(config, params, hidden, targets, ones, dtype=jnp.float32)
    return jnp.sum(logprobs) / jnp.sum(targets >= 0)


def padded(rows):
    tokens = np.zeros((len(rows), LENGTH), int)
    segments = np.zeros((len(rows), LENGTH), int)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    return jnp.asarray(tokens), jnp.asarray(segments)


def test_logits_of_ragged_prompts_are_those_of_transformers(golden):
    config, params, record = golden
    logits = all_logits(config, params, *padded(prompts(record)))
    ours = np.concatenate([logits[i, :length] for i, length in enumerate(record["lengths"])])
    assert np.abs(ours - record["logits"]).max() <= 1e-4 * np.ptp(record["logits"])


def test_there_is_a_golden_of_every_family_below_200_kb_each():
    sizes = dict.fromkeys(families.FAMILIES, 0)
    for name in NAMES:
        sizes[hf.read_config(GOLDENS / name).family] += sum(file.stat().st_size for file in (GOLDENS / name).iterdir())
    assert min(sizes.values()) > 0
    assert max(sizes.values()) < 200_000


def test_gradients_of_the_mean_logprob_are_those_of_torch(golden, tmp_path):
    """Of every norm and bias, of a matrix that sees all of attention, and of what gives tokens to experts."""
    config, params, record = golden
    tokens, segments = padded(prompts(record)[-1:])
    grads = mean_logprob_gradient(config, params, tokens, segments)
    hf.save(tmp_path / "gradient", config, grads)  # in the names and shapes of the checkpoint
    ours = load_file(tmp_path / "gradient/model.safetensors")
    theirs = {key.removeprefix("grad/"): value for key, value in record.items() if key.startswith("grad/")}
    matrices = ("0.self_attn.k_proj.weight", "0.mlp.gate.weight")
    assert theirs.keys() == {key for key in ours if ours[key].ndim == 1 or key.endswith(matrices)}
    for key, expected in theirs.items():
        assert np.linalg.norm(ours[key] - expected) <= 1e-3 * np.linalg.norm(expected), key


def test_greedy_tokens_are_those_of_transformers_wherever_the_choice_is_clear(golden):
    config, params, record = golden
    rows = [np.concatenate([prompt, new]) for prompt, new in zip(prompts(record), record["greedy"], strict=True)]
    logits = all_logits(config, params, *padded(rows))
    new = record["greedy"].shape[1]
    ours = np.stack([np.argmax(logits[i, n - 1 : n - 1 + new], axis=-1) for i, n in enumerate(record["lengths"])])
    clear = record["margins"] > 1e-2
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(ours[clear], record["greedy"][clear])


def test_greedy_decoding_through_the_cache_follows_transformers_until_a_choice_is_unclear(golden):
    config, params, record = golden
    unstacked = transformer.unstack(params)

    @jax.jit
    def step(tokens, start, cache):
        hidden, cache, _ = transformer.forward_cached(config, unstacked, tokens, start, cache, dtype=jnp.float32)
        return jnp.argmax(transformer.head_logits(config, params, hidden[:, -1], dtype=jnp.float32), axis=-1), cache

    rows = prompts(record)
    cache = transformer.init_cache(config, len(rows), LENGTH, jnp.float32)
    # One token at a time: a row still inside its prompt is fed the prompt, then what it said itself.
    fed, said = [list(row) for row in rows], [[] for _ in rows]
    for at in range(max(record["lengths"]) + record["greedy"].shape[1] - 1):
        tile = jnp.asarray([[row[min(at, len(row) - 1)]] for row in fed])
        choice, cache = step(tile, jnp.full(len(rows), at), cache)
        for row, own, pick in zip(fed, said, choice.tolist(), strict=True):
            if at >= len(row) - 1:
                row.append(pick)
                own.append(pick)
    checked = 0
    for own, greedy, margins in zip(said, record["greedy"], record["margins"], strict=True):
        sure = int(np.argmax(margins <= 1e-2)) if np.any(margins <= 1e-2) else len(margins)
        assert own[:sure] == greedy[:sure].tolist()
        checked += sure
    assert checked > len(rows)
