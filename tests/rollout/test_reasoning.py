"""Training and held-out questions never meet, and only exact answers count."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_jax.config import ConfigError, Task
from mas_jax.rollout.tasks.reasoning import SHORT, exact, is_heldout, reasoning

ONE_DIGIT = {"products": {"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2}}


@pytest.fixture(scope="module")
def drawn():
    """(training, held-out) of two generators, one with a space of 100 questions."""
    pytest.importorskip("reasoning_gym")
    return reasoning("products", "gcd", train=300, heldout=60, options=ONE_DIGIT)()


def of(name, tasks):
    return [task for task in tasks if task.data == {"generator": name}]


def test_no_question_is_on_both_sides_or_twice(drawn):
    train, heldout = drawn
    prompts = [task.prompt for task in train + heldout]
    assert len(set(prompts)) == len(prompts)
    assert len({task.id for task in train + heldout}) == len(prompts)


@pytest.mark.usefixtures("drawn")
def test_a_question_is_on_the_same_side_for_every_seed_size_and_wording():
    for seed, train, short in ((0, 30, True), (1, 300, True), (7, 80, False)):
        sides = reasoning("products", train=train, heldout=20, seed=seed, options=ONE_DIGIT, short=short)()
        for held, tasks in enumerate(sides):
            expressions = [t.prompt.removeprefix("Solve the following multiplication: ").split(".")[0] for t in tasks]
            keys = [text if short else text.replace(" ", "") + "=" for text in expressions]
            assert [is_heldout(key) for key in keys] == [bool(held)] * len(tasks)


@pytest.mark.usefixtures("drawn")
def test_the_same_settings_draw_the_same_tasks_and_another_seed_others():
    first, second, other = (reasoning("gcd", train=20, heldout=5, seed=seed)() for seed in (3, 3, 4))
    assert first == second
    assert not {task.prompt for task in first[0]} & {task.prompt for task in other[0]}


def test_generators_share_the_count_and_take_turns(drawn):
    train, heldout = drawn
    assert len(of("gcd", train)) == 150 and len(of("gcd", heldout)) == 30
    assert [task.data["generator"] for task in train[:4]] == ["products", "gcd", "products", "gcd"]


def test_a_small_space_gives_fewer_tasks(drawn):
    train, heldout = drawn
    products = of("products", train) + of("products", heldout)
    assert 95 <= len(products) <= 100
    assert 10 <= len(of("products", heldout)) <= 30


def test_short_prompts_are_the_expression_and_answers_are_right(drawn):
    for task in of("products", drawn[0]):
        left, right = task.prompt.removesuffix("=").split("*")
        assert int(left) * int(right) == int(task.answer)
    assert of("gcd", drawn[0])[0].prompt.startswith("gcd ")


@pytest.mark.usefixtures("drawn")
def test_every_short_form_is_short_and_one_for_each_question():
    short, full = (
        reasoning(*sorted(SHORT.keys() - {"products", "gcd"}), train=35, heldout=7, short=flag)()[0]
        for flag in (True, False)
    )
    assert [task.id for task in short] == [task.id for task in full]
    assert all(len(a.prompt) < len(b.prompt) and a.answer == b.answer for a, b in zip(short, full, strict=True))
    other = reasoning("syllogism", train=1, heldout=1)()[0][0]
    assert "(Answer Yes or No)" in other.prompt


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["prodcts"], {}, "near names: products"),
        (["graph_color"], {}, "many right answers"),
        (["gcd"], {"gcd": {"max_digits": 1}}, "its options are .*max_value"),
        (["products"], {"products": {"min_digits": 0}}, "min_digits must be positive"),
        (["count_bits"], {"count_bits": {"min_n": 1, "max_n": 1}}, "question is left"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_remedy(names, options, words):
    with pytest.raises(ConfigError, match=words):
        reasoning(*names, train=5, heldout=5, options=options)()


def test_settings_are_checked_before_the_package_is_loaded():
    for call in (
        reasoning,
        lambda: reasoning("gcd", "gcd"),
        lambda: reasoning("gcd", "lcm", heldout=1),
        lambda: reasoning("gcd", options={"lcm": {}}),
        lambda: reasoning("gcd", options={"gcd": {"seed": 1}}),
    ):
        with pytest.raises(ConfigError):
            call()


def test_a_missing_package_is_named_on_the_call_and_not_before(monkeypatch):
    tasks = reasoning("gcd")
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        tasks()


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("4", " 4\n", True),
        ("4", "xxx-4", False),
        ("4", "4 apples", False),
        ("4", "4.0", False),
        ("-5", "5", False),
        ("5", "-5", False),
        ("1288", "1,288", True),
        ("1288", "12,88", False),
        ("7", "+007", True),
        ("0", "-0", True),
        ("4", "\u0664", False),
        ("Yes", "yes", False),
        ("Yes", "", False),
        ("56/243", "56/243", True),
    ],
)
def test_only_the_exact_answer_counts(answer, text, right):
    assert exact(Task("t", "", answer), text) is right


@given(st.integers(), st.integers())
def test_whole_numbers_are_compared_as_numbers(a, b):
    assert exact(Task("t", "", str(a)), f"{b:+,}") is (a == b)


def test_a_reply_of_very_many_digits_is_merely_wrong():
    assert not exact(Task("t", "", "4"), "4" * 100_000)
