"""What counts as the answer in a reply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.rollout.parse import boxed, last_number, tag

BALANCED = st.recursive(
    st.text("ab1 ,\\frac", max_size=5).filter(lambda text: "\\boxed" not in text and not text.endswith("\\")),
    lambda inner: st.tuples(inner, inner, inner).map(lambda parts: f"{parts[0]}{{{parts[1]}}}{parts[2]}"),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {Correct }", "Correct"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{\text{a} \boxed{9}}", "9"),
        (r"} } \boxed{3}", "3"),
        (r"{ \boxed{3}", "3"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{}", ""),
        ("boxed{4}", None),
        (r"\boxed 4", None),
        ("", None),
    ],
)
def test_boxed_is_the_last_box_whose_braces_balance(text, answer):
    assert boxed(text) == answer


@given(content=BALANCED, before=st.text(), after=st.text("xyz} "))
def test_whatever_balances_comes_out_of_its_box(content, before, after):
    assert boxed(before + "\\boxed{" + content + "}" + after) == content.strip()


def test_many_unclosed_boxes_take_no_quadratic_time():
    assert boxed("\\boxed{" * 200_000) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("it costs $1,288.", "1288"),
        ("-5", "-5"),
        ("x = \u22125.50!", "-5.50"),
        ("10-3", "3"),
        ("10 - 3", "3"),
        ("(-3)", "-3"),
        ("1,2", "2"),
        ("1,234,567 apples", "1234567"),
        ("about .5", ".5"),
        ("7th", "7"),
        ("none", None),
        ("\u0663", None),
    ],
)
def test_last_number_is_plain(text, number):
    assert last_number(text) == number


@given(number=st.integers(), words=st.text("abc .,", max_size=10))
def test_a_number_is_found_after_any_words_with_or_without_commas(number, words):
    assert last_number(f"{words} {number:,}") == str(number)
    assert last_number(f"{words} {number}.") == str(number)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer><answer>3</answer>", "3"),
        ("</answer><answer>", None),
        ("4</answer>", None),
        ("", None),
    ],
)
def test_a_tags_content_is_the_last_complete_one(text, content):
    assert tag(text, "answer") == content
