"""Real models against a live transformers: logits, likelihoods, replies, tokenizers, exports; `make parity-slow`."""

import logging
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mas_jax.cluster import LocalGroup  # noqa: E402 (needs torch to be worth loading)
from mas_jax.config import Base, Rollout  # noqa: E402
from mas_jax.mesh import make_mesh  # noqa: E402
from mas_jax.models import hf, tokenizer, transformer  # noqa: E402
from mas_jax.rollout.driver import Request, stream_key  # noqa: E402
from tests.parity.test_transformers import opened  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.slow]

ASSETS = Path(__file__).parents[2] / "assets"
MAKE = {"smollm2-135m": "smollm2", "gemma3-270m": "gemma3"}
PARAGRAPH = (
    "When the sun shines on the sea, some of the water turns into vapour and rises into the air. High above the ground the "
    "air is colder, and the vapour turns back into tiny drops of water that form clouds. When the drops become too heavy, "
    "they fall to the ground as rain or snow. The rain flows into streams and rivers, and the rivers carry the water back "
    "to the sea, where the cycle begins again."
)
BEYOND = " ".join([PARAGRAPH] * 8)  # longer than the 512 keys that Gemma's local layers see
COMPARED = 64  # last positions of it, since all logits of 262,144 ids would not be small
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHATS = [
    QUESTION,
    [
        {"role": "user", "content": " 2 + 3 ?\n"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Why?"},
    ],
    [{"role": "system", "content": "Be brief. "}, *QUESTION],
]
TEXTS = [
    "", " ", "Plain English, with don't and it's.", "  two  blanks\n\n\nand lines\t\ttabs \n ", "0 12 345 6789 3.14 1e-5",
    "def f(xs):\n    return {x: x ** 2 for x in xs}  # squares\n", "a\r\nb\u00a0c\u200bd \x00 \u2581e",
    "gr\u00fc\u00df dich, \u4f60\u597d, \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f642 e\u0301", PARAGRAPH,
    "<|im_start|>user\nhi<|im_end|>\n", "<start_of_turn>user\nhi<end_of_turn>\n",
]  # fmt: skip
ENGINE = Rollout(slots=1, context=128, prefill_rows=1, chunk=32, block=8)


ONLY_SMOLLM2 = pytest.mark.parametrize("path", ["smollm2-135m"], indirect=True)
ONLY_GEMMA3 = pytest.mark.parametrize("path", ["gemma3-270m"], indirect=True)


@pytest.fixture(scope="module", params=MAKE)
def path(request):
    found = ASSETS / request.param
    if not (found / "config.json").is_file():
        pytest.skip(f"needs {found.relative_to(ASSETS.parent)}: make {MAKE[request.param]}")
    return found


@pytest.fixture(scope="module")
def theirs(path):
    return opened(path)[0]


@pytest.fixture(scope="module")
def ours(path):
    return hf.load(path)


@pytest.fixture(scope="module")
def tokenizers(path):
    return tokenizer.load(path), transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def official():
    """The tokenizer that Google published."""
    found = ASSETS / "tokenizers" / "gemma3"
    if not (found / "tokenizer.json").is_file():
        pytest.skip("needs assets/tokenizers/gemma3: make tokenizers")
    return tokenizer.load(found)


@jax.jit(static_argnums=(0, 1))
def last_logits(config, count, params, tokens):
    """Logits [1, count, V] of the last positions of a row."""
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = transformer.forward(config, params, tokens, positions, jnp.ones_like(tokens), dtype=jnp.float32)
    return transformer.head_logits(config, params, hidden[:, -count:], dtype=jnp.float32)


@jax.jit(static_argnums=0)
def logprobs(config, params, tokens):
    """Log-probability [1, T - 1] of every token but the first."""
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = transformer.forward(config, params, tokens, positions, jnp.ones_like(tokens), dtype=jnp.float32)
    targets = jnp.concatenate([tokens[:, 1:], jnp.full((1, 1), -1)], axis=1)
    ones = jnp.ones(tokens.shape, jnp.float32)
    return transformer.token_logprobs(config, params, hidden, targets, ones, dtype=jnp.float32)[0][:, :-1]


@torch.no_grad()
def their_logits(model, ids, count):
    return model(torch.tensor([ids]), logits_to_keep=count).logits.numpy()


def text_ids(encoder, text):
    """Ids of a text as these models saw them: Gemma's begin with BOS, SmolLM2's do not."""
    return encoder(text).input_ids


def assert_same_logits(ours, theirs, ids, count):
    expected = their_logits(theirs, ids, count)
    found = last_logits(ours[0], count, ours[1], jnp.asarray([ids]))
    assert np.abs(found - expected).max() <= 1e-4 * np.ptp(expected)


def greedy(path, prompt, tokens):
    """What our engine says after a prompt, at temperature 0."""
    group = LocalGroup("team", Base(str(path)), make_mesh(1, 1, 1), dtype="float32", seed=0)
    group.add_sampler(ENGINE)
    group.load()
    group.push()
    group.submit([Request("a", "solver", list(prompt), "", stream_key("a"), tokens, 0.0, group.tokenizer.stop_ids)])
    while group.scheduler.busy:
        if done := group.poll():
            return done[0].tokens


def assert_greedy_is_that_of_generate(model, prompt, said):
    """Equal up to the first token whose lead over the second best is within rounding; there is none such here."""
    asked = torch.tensor([prompt])
    out = model.generate(
        asked, attention_mask=torch.ones_like(asked), max_new_tokens=len(said), do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    logits = torch.stack(out.logits, dim=1)[0].numpy()
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    assert (first - second > 1e-3 * np.ptp(logits)).all()
    assert said == out.sequences[0, len(prompt) :].tolist()


def test_logits_of_a_paragraph_are_those_of_transformers(ours, theirs, tokenizers):
    ids = text_ids(tokenizers[1], PARAGRAPH)
    assert 75 <= len(ids) <= 95
    assert_same_logits(ours, theirs, ids, len(ids))


def test_logits_of_a_chat_are_those_of_transformers(ours, theirs, tokenizers):
    ids = tokenizers[0].encode(tokenizers[0].render(QUESTION))
    assert_same_logits(ours, theirs, ids, len(ids))


def test_logits_far_beyond_the_window_of_local_layers_are_those_of_transformers(ours, theirs, tokenizers):
    ids = text_ids(tokenizers[1], BEYOND)
    assert len(ids) > 600
    assert_same_logits(ours, theirs, ids, COMPARED)


def test_plain_english_is_as_likely_as_to_transformers_and_hardly_surprising(ours, theirs, tokenizers):
    ids = text_ids(tokenizers[1], PARAGRAPH)
    found = math.exp(-jnp.mean(logprobs(*ours, jnp.asarray([ids]))))
    with torch.no_grad():
        tokens = torch.tensor([ids])
        expected = math.exp(theirs(tokens, labels=tokens).loss)
    assert abs(found - expected) <= 0.01 * expected
    assert found < 15


@ONLY_SMOLLM2
def test_the_chat_model_names_the_capital_of_france_in_the_words_of_generate(path, theirs, tokenizers):
    prompt = tokenizers[0].encode(tokenizers[0].render(QUESTION))
    said = greedy(path, prompt, 24)
    assert "Paris" in tokenizers[0].decode(said)
    assert said[-1] in tokenizers[0].stop_ids
    assert_greedy_is_that_of_generate(theirs, prompt, said)


@ONLY_GEMMA3
def test_the_base_model_answers_a_question_in_the_words_of_generate(path, theirs, tokenizers):
    prompt = text_ids(tokenizers[1], "Question: What is the capital of France?\nAnswer:")
    said = greedy(path, prompt, 8)
    assert tokenizers[0].decode(said).startswith(" Paris")
    assert_greedy_is_that_of_generate(theirs, prompt, said)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_the_auto_tokenizer(tokenizers, text):
    ours, theirs = tokenizers
    ids = theirs(text, add_special_tokens=False).input_ids
    assert ours.encode(text) == ids
    assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("messages", CHATS)
def test_chats_are_rendered_as_by_the_auto_tokenizer(tokenizers, messages):
    ours, theirs = tokenizers
    assert ours.render(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert set(ours.stop_ids) >= {theirs.eos_token_id}


@ONLY_GEMMA3
@pytest.mark.parametrize("text", TEXTS)
def test_gemmas_rebuilt_merges_give_the_ids_of_the_official_tokenizer(tokenizers, official, text):
    assert tokenizers[0].encode(text) == official.encode(text)


@ONLY_GEMMA3
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_gemmas_chats_are_rendered_as_by_the_official_template(tokenizers, official, messages, prompt):
    expected = official.render(messages, generation_prompt=prompt)
    assert tokenizers[0].render(messages, generation_prompt=prompt) == expected


def test_an_export_holds_the_same_bits_and_opens_without_a_word_about_keys(path, ours, tmp_path, caplog):
    hf.save(tmp_path / "ours", *ours, source=path, dtype="bfloat16")
    exported, source = load_file(tmp_path / "ours/model.safetensors"), load_file(path / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(array.dtype == ml_dtypes.bfloat16 for array in exported.values())
    for key, array in source.items():
        np.testing.assert_array_equal(exported[key].view(np.uint16), array.view(np.uint16))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        _, info = opened(tmp_path / "ours", dtype="auto")
    finally:
        logger.removeHandler(caplog.handler)
    assert not any(info.values()), info
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
