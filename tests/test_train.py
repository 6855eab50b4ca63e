"""The loop: a team learns its rule and not noise; what was sampled is what is trained, kept and scored again."""

import io
import itertools
import json
import logging
import os
import signal
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from rich.console import Console
from shapes import LENGTHS
from team import ENGINE, LEARNER, ONE_DEVICE, Letters, Parities, parity_team, save_model, talk, talking_team

from mas_jax import cli, graph, metrics
from mas_jax import train as loop
from mas_jax.archive import Archive
from mas_jax.cloning import FromJsonl, FromTraces, clone, encode, weighted
from mas_jax.cluster import LocalGroup
from mas_jax.config import AdamW, Base, Cloning, ConfigError, Example, Limits, Reward, Role
from mas_jax.models.tokenizer import load as load_tokenizer
from mas_jax.progress import Reporter
from mas_jax.rollout import rewards
from mas_jax.rollout.driver import RolloutError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


def quiet():
    return Reporter(Console(file=io.StringIO()))


def train(experiment, directory, **options):
    return loop.train(experiment, directory, quiet(), **options)


@dataclass
class Watched:
    """A finished run with what passed between loop and groups."""

    run: loop.Run
    rows: list
    calls: list

    @property
    def metrics(self):
        return metrics.read(self.run.directory / "metrics.jsonl")

    @property
    def traces(self):
        return metrics.read(self.run.directory / "traces.jsonl")


def watch(patch, name, see):
    """Call `see(group, name, rows)` at each call of a group's method."""
    real = getattr(LocalGroup, name)

    def watched(self, *args):
        see(self, name, *(args or ([],)))
        return real(self, *args)

    patch.setattr(LocalGroup, name, watched)


@pytest.fixture(scope="module")
def talked(model, tmp_path_factory):
    """Three steps of ragged conversations of two agents, in two epochs of two minibatches."""
    rows, calls = [], []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("score", "update", "push"):
            watch(patch, name, lambda group, name, rows: calls.append((name, len(rows))))
        patch.setattr(loop, "bare_row", lambda row, real=loop.bare_row: rows.append(row) or real(row))
        run = train(talking_team(model), tmp_path_factory.mktemp("run") / "talk")
    return Watched(run, rows, calls)


def test_a_team_of_two_learns_its_rule(model, tmp_path):
    train(parity_team(model), tmp_path / "run")
    (_, before), *_, (_, after) = loop.evaluations(tmp_path / "run")
    for role in ("even", "odd"):
        assert before[f"{role}/parity"] < 0.75
        assert after[f"{role}/parity"] > 0.9
        assert after[f"{role}/parity/low"] > before[f"{role}/parity/high"]


def test_a_team_whose_rewards_are_shuffled_learns_nothing(model, tmp_path, monkeypatch):
    """The same run, each role's rewards dealt out anew among the episodes of a step: nothing is left to learn from."""

    def shuffled(traces, terms, roles, real=rewards.assign):
        real(traces, terms, roles)
        rng = np.random.default_rng(len(traces))
        for role in roles:
            turns = [turn for trace in traces for turn in trace.of(role)]
            given = [turn.reward for turn in turns]
            for turn, reward in zip(turns, rng.permutation(given), strict=True):
                turn.reward = float(reward)

    monkeypatch.setattr(loop.rewards, "assign", shuffled)
    train(parity_team(model), tmp_path / "run")
    (_, before), *_, (_, after) = loop.evaluations(tmp_path / "run")
    for role in ("even", "odd"):
        assert abs(after[f"{role}/parity"] - before[f"{role}/parity"]) < 0.2
        assert after[f"{role}/parity"] < 0.75


def test_each_role_of_its_own_base_learns_its_rule(model, tmp_path):
    experiment = parity_team(
        model,
        params={"first": Base(str(model)), "second": Base(str(save_model(tmp_path / "other", seed=1)))},
        roles={"even": Role("first", max_tokens=4), "odd": Role("second", max_tokens=4)},
        optimizers={"first": AdamW(lr=2e-2), "second": AdamW(lr=2e-2)},
        steps=15,
    )
    order = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("score", "update"):
            watch(patch, name, lambda group, name, rows: order.append((name, group.name, {row.role for row in rows})))
        train(experiment, tmp_path / "run")
    # Every role is scored before any is updated; a role whose groups are all of one reward has no update.
    first, second = ("score", "first", {"even"}), ("score", "second", {"odd"})
    assert [call for call in order if call[0] == "score"] == [first, second] * 15
    for before, call in itertools.pairwise(order):
        assert before != first or call == second
        assert call[0] != "score" or call == first or before == first
    updates = [call[1:] for call in order if call[0] == "update"]
    assert {("first", frozenset({"even"})), ("second", frozenset({"odd"}))} == {(n, frozenset(r)) for n, r in updates}
    (_, before), *_, (_, after) = loop.evaluations(tmp_path / "run")
    for role in ("even", "odd"):
        assert after[f"{role}/parity"] > max(0.85, before[f"{role}/parity"] + 0.1)
    assert sorted(path.name for path in (tmp_path / "run" / "export").iterdir()) == ["first", "second"]


def test_rows_hold_several_turns_of_one_agent_and_are_ragged(talked):
    assert max(len(row.turns) for row in talked.rows) == 3
    assert {row.role for row in talked.rows} == {"asker", "helper"}
    assert len({len(row) for row in talked.rows}) > 5
    assert {LENGTHS[0] < len(row) for row in talked.rows} <= {True, False}


def test_the_engines_logprobs_are_the_learners_on_conversations_of_two_agents(talked):
    for record in talked.metrics[1:]:
        for role in ("asker", "helper"):
            assert record[f"{role}/gap_max"] < 1e-4
            assert abs(record[f"{role}/ppl_ratio"] - 1) < 1e-4


def test_every_array_of_a_row_is_as_long_as_its_tokens(talked):
    for row in talked.rows:
        arrays = (row.sampled, row.sampler_logprobs, row.versions, row.turn)
        assert {len(array) for array in arrays} == {len(row.tokens)}
        assert row.sampled.sum() == sum(len(turn.tokens) for turn in row.turns)
        assert (row.versions[row.sampled] >= 0).all()
        assert (row.sampler_logprobs[row.sampled] < 0).all()
        for turn in row.turns:
            assert len(turn.tokens) == len(turn.logprobs) == len(turn.versions) > 0


def test_two_epochs_of_two_minibatches_are_up_to_four_updates_and_every_row_is_in_two_of_them(talked):
    """Rows whose advantage is 0 teach nothing, and a minibatch of nothing else has no update."""
    steps: list[list[tuple[str, int]]] = []
    for name, count in talked.calls[1:]:  # the first push is that of the start
        if name == "score":
            steps.append([])
        steps[-1].append((name, count))
    updates = [[count for name, count in step if name == "update"] for step in steps]
    assert [[name for name, _ in step] for step in steps] == [["score", *["update"] * len(u), "push"] for u in updates]
    assert max(len(own) for own in updates) == 4
    assert [record["params/team/updates"] for record in talked.metrics[1:]] == np.cumsum(
        [len(u) for u in updates]
    ).tolist()
    for own, (_, scored) in zip(updates, (step[0] for step in steps), strict=True):
        assert sum(own) % 2 == 0
        assert 0 < sum(own) // 2 <= scored


def test_minibatches_are_whole_episodes_dealt_evenly_by_their_seed(talked):
    rows = talked.rows[: talked.calls[1][1]]
    parts = loop.minibatches(rows, 2, np.random.default_rng(0))
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    episodes = [{rows[i].trace.id for i in part} for part in parts]
    assert not episodes[0] & episodes[1]
    assert abs(len(episodes[0]) - len(episodes[1])) <= 1
    assert parts == loop.minibatches(rows, 2, np.random.default_rng(0))
    assert parts != loop.minibatches(rows, 2, np.random.default_rng(1))
    assert len(loop.minibatches(rows, 1000, np.random.default_rng(0))) == len({row.trace.id for row in rows})


def test_the_version_of_a_token_is_the_number_of_updates_its_policy_had_had(talked):
    had = {0: 0} | {record["step"]: record["params/team/updates"] for record in talked.metrics[1:]}
    for trace in talked.traces:
        step = int(trace["trace_id"].split("/")[0].split()[1])
        versions = {event["version"] for event in trace["events"] if event["type"] == "message"}
        assert versions <= {had[step - 1]}


def test_failed_episodes_are_counted_kept_as_traces_and_never_trained(talked, model):
    failed = [trace for trace in talked.traces if trace["events"][-1]["stop"] == "failed"]
    assert failed
    assert all("planted failure" in trace["events"][-1]["error"] for trace in failed)
    assert sum(record["failed"] for record in talked.metrics[1:]) == len(failed)
    assert sum(record["episodes"] for record in talked.metrics[1:]) == len(talked.traces) == 3 * 3 * 4
    assert not {row.trace.id for row in talked.rows} & {trace["trace_id"] for trace in failed}


def test_too_many_failed_episodes_stop_the_run_with_their_cause(model, tmp_path):
    experiment = talking_team(model, tasks=Letters(broken=1), limits=Limits(failures=0.1))
    with pytest.raises(RolloutError, match=r"episodes failed .*ValueError: planted failure"):
        train(experiment, tmp_path / "run")


def test_the_archive_holds_what_the_traces_say_token_for_token(talked, model):
    archive = Archive(talked.run.directory / "rollouts.zarr")
    held = archive.read(0, archive.length)
    tokenizer, covered = load_tokenizer(model), np.zeros(archive.length, bool)
    for trace in talked.traces:
        for event in trace["events"]:
            if event["type"] != "message":
                continue
            start, stop = event["tokens"]
            assert stop - start == event["sampled_tokens"]
            ids = held["tokens"][start:stop].tolist()
            assert tokenizer.decode(ids[:-1] if event["finish"] == "stop" else ids) == event["text"]
            assert held["sampled"][start:stop].all()
            assert (held["version"][start:stop] == event["version"]).all()
            assert (held["sampler_logprobs"][start:stop] < 0).all()
            np.testing.assert_array_equal(held["advantage"][start:stop], np.float32(event["advantage"]))
            prompt = held["tokens"][start - event["prompt_tokens"] : start].tolist()
            assert len(prompt) == event["prompt_tokens"]
            assert not covered[start:stop].any()  # a sampled token is kept once
            covered[start:stop] = True
    np.testing.assert_array_equal(covered, held["sampled"])
    assert (held["version"][~covered] == -1).all()
    assert (held["sampler_logprobs"][~covered] == 0).all()
    assert (held["advantage"][~covered] == 0).all()


def test_the_ids_a_prompt_entered_the_engine_with_are_those_of_its_text(talked, model):
    """First turns, which nothing sampled precedes: no token is added to what the template wrote."""
    tokenizer = load_tokenizer(model)
    firsts = [row.turns[0] for row in talked.rows]
    assert all(turn.prompt == tokenizer.encode(turn.prompt_text) for turn in firsts)


def test_the_advantages_of_a_group_sum_to_nothing(talked):
    """GRPO over finished episodes: one sample an episode, so the mean over a task's episodes is 0."""
    found = {}
    for trace in talked.traces:
        if trace["events"][-1]["stop"] == "done":
            values = [event["advantage"] for event in trace["events"] if event["type"] == "message"]
            found.setdefault(trace["trace_id"].split("#")[0], []).append(np.mean(values))
    assert any(np.abs(values).max() > 0.1 for values in found.values())
    for values in found.values():
        assert abs(np.mean(values)) < 1e-6


def test_metrics_have_a_line_for_the_start_and_one_a_step(talked):
    records = talked.metrics
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert [record.get("epoch") for record in records] == [None, 3 / 5, 6 / 5, 9 / 5]
    assert {0, 3} == {record["step"] for record in records if "eval/parity" in record}
    for name in ("reward/parity", "asker/reward", "helper/length", "asker/cut_share", "helper/zero_variance_share",
                 "params/team/grad_norm", "asker/grad_share", "helper/clip_high", "params/team/lr", "asker/inflation",
                 "asker/rollout_chi2", "time/step", "time/rollout"):  # fmt: skip
        assert all(np.isfinite(record[name]) for record in records[1:] if name in record)
        assert any(name in record for record in records[1:]), name
    assert "nonfinite" not in json.dumps(records)


def test_a_stale_sampler_is_warned_of_in_the_very_next_step(model, tmp_path, monkeypatch, caplog):
    pushes = []

    def push_once(self, real=LocalGroup.push):
        pushes.append(self.version)
        if len(pushes) == 1:
            return real(self)
        self.scheduler.version = self.version  # the version is right, the weights are not
        return self.version

    monkeypatch.setattr(LocalGroup, "push", push_once)
    optimizers = {"team": AdamW(lr=5e-2)}
    with caplog.at_level(logging.WARNING, logger="mas_jax"):
        train(parity_team(model, steps=2, optimizers=optimizers), tmp_path / "run")
    found = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert found[1]["even/gap"] < 1e-4
    assert found[2]["even/gap"] > LEARNER.gap_alarm
    assert "the sampler is not the policy being trained" in caplog.text


def test_the_exported_team_scores_what_the_trained_one_scored(talked, tmp_path, capsys):
    """Another process would load it the same way: `mas-jax eval CONFIG --params.team.path EXPORT`."""
    directory = talked.run.directory
    experiment = replace(talked.run.experiment, params={"team": Base(str(directory / "export" / "team"))})
    assert cli._evaluate(experiment, tmp_path / "again.jsonl") == 0
    again = metrics.read(tmp_path / "again.jsonl")
    kept = metrics.read(directory / "eval_3.jsonl")
    for one in (*again, *kept):
        del one["costs"]["wall_clock_s"]
        for event in one["events"]:
            event.pop("version", None)
    assert again == kept
    assert f"{talked.metrics[-1]['eval/parity']:.3f}" in capsys.readouterr().out


def test_a_finished_run_is_left_as_it_is_and_more_steps_go_on_from_its_end(model, tmp_path):
    short = talking_team(model, steps=1)
    train(short, tmp_path / "run")
    kept = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(short, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == kept
    train(replace(short, steps=2), tmp_path / "run")
    longer = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in longer] == [0, 1, 2]
    assert longer[2]["params/team/updates"] > longer[1]["params/team/updates"] > 0


def test_another_config_is_refused_in_words_and_taken_with_force(model, tmp_path):
    train(talking_team(model, steps=1), tmp_path / "run")
    changed = talking_team(model, steps=2, optimizers={"team": AdamW(lr=1e-4, warmup=2)})
    with pytest.raises(ConfigError) as caught:
        train(changed, tmp_path / "run")
    text = str(caught.value)
    assert "optimizers.team.lr: 0.003 -> 0.0001" in text
    assert "--force" in text
    assert "steps" not in text
    run = train(changed, tmp_path / "run", force=True)
    assert run.step == 2
    assert metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]["params/team/lr"] == pytest.approx(1e-4)


def test_a_config_that_failed_before_it_ran_may_be_mended_in_the_same_directory(model, tmp_path):
    wrong = talking_team(model, params={"team": Base(str(tmp_path / "nothing"))}, steps=1)
    with pytest.raises(ConfigError, match="path"):
        train(wrong, tmp_path / "run")
    assert train(talking_team(model, steps=1), tmp_path / "run").step == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, r"group_size = 1: grpo compares"),
        ({"tasks": Letters(train=0)}, r"tasks = 'Letters': gave no training tasks"),
        ({"tasks": Letters(heldout=0)}, r"tasks = 'Letters': gave no held-out tasks"),
        ({"method": "gropo"}, r"method = 'gropo': did you mean 'grpo'"),
        ({"tasks": lambda: (Letters()()[0], Letters()()[0])}, r"tasks = \['t0', 't1', 't2'\]: these ids are both"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_read(model, tmp_path, changes, message, monkeypatch):
    monkeypatch.setattr(loop, "build_groups", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(ConfigError, match=message):
        train(talking_team(model, **changes), tmp_path / "run")


def test_a_run_directory_that_cannot_be_written_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir = .*cannot be written"):
        train(talking_team(model), tmp_path / "file" / "run")


def test_a_reward_that_gives_nan_fails_its_episode_alone(model, tmp_path):
    @dataclass(frozen=True)
    class Sometimes:
        def __call__(self, trace):
            return float("nan") if trace.sample == 0 else 1.0 + trace.sample % 2

    experiment = talking_team(
        model,
        rewards=(Reward(Sometimes(), name="odd"),),
        steps=1,
        limits=Limits(failures=1.0),
        tasks=Letters(heldout=2),
    )
    train(experiment, tmp_path / "run")
    last = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["failed"] == 3
    assert last["params/team/updates"] > 0
    assert np.isfinite(last["params/team/grad_norm"])
    failed = [t for t in metrics.read(tmp_path / "run" / "traces.jsonl") if t["events"][-1]["stop"] == "failed"]
    assert all("must be finite" in trace["events"][-1]["error"] for trace in failed)


def test_a_reward_that_always_raises_stops_the_run_with_its_cause(model, tmp_path):
    def broken(trace):
        raise ZeroDivisionError("no such luck")

    experiment = talking_team(model, rewards=(Reward(broken),), steps=1, tasks=Letters(heldout=2))
    with pytest.raises(RolloutError, match="reward broken: ZeroDivisionError: no such luck"):
        train(experiment, tmp_path / "run")


def test_n_calls_of_one_role_in_an_episode_keep_their_own_advantages():
    """The rewards of same-named turns land where they were earned, and none overwrites another."""
    from mas_jax.config import Task
    from mas_jax.learners import methods

    traces = []
    for sample in range(2):
        turns = [
            graph.Turn(
                str(i), "solver", 0, "team", i, [i], [7 + i], [-1.0], [0], "", "stop", reward=float(sample * 3 + i)
            )
            for i in range(3)
        ]
        traces.append(graph.Trace(Task("t", ""), sample, "g", turns))
    rows = [row for trace in traces for row in graph.rows(trace)]
    loop.assign_credit(rows, methods.lookup("dr_mas", 2))
    given = [turn.advantage for trace in traces for turn in trace.turns]
    assert len(set(given)) == 6
    assert given == sorted(given)
    spread = np.concatenate([row.per_token([turn.advantage for turn in row.turns])[row.sampled] for row in rows])
    np.testing.assert_allclose(spread, np.float32(given))


@dataclass(frozen=True)
class Copies:
    """Demonstrations: the answer to a letter is the letter after it."""

    def __call__(self):
        return [Example(str(i), chr(97 + i), chr(98 + i), ("one", "two")[i % 2]) for i in range(8)]


def cloning(model, **changes):
    settings = Cloning(
        Base(str(model)),
        Copies(),
        AdamW(lr=1e-2),
        steps=40,
        batch=8,
        checkpoint_every=20,
        learner=LEARNER,
        mesh=ONE_DEVICE,
    )
    return replace(settings, **changes)


def test_cloning_learns_its_demonstrations_and_resumes_exactly(model, tmp_path):
    out = clone(cloning(model), tmp_path / "whole", quiet())
    whole = metrics.read(tmp_path / "whole" / "metrics.jsonl")
    assert whole[0]["one/nll"] > 2
    assert whole[-1]["one/nll"] < 0.1
    clone(cloning(model, steps=20), tmp_path / "parts", quiet())
    again = clone(cloning(model), tmp_path / "parts", quiet())
    assert metrics.read(tmp_path / "parts" / "metrics.jsonl") == whole
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_cloning_trains_the_reply_and_its_stop_and_nothing_of_the_prompt(model):
    tokenizer = load_tokenizer(model)
    row = encode(tokenizer, Example("x", "ab", "cd"))
    text = tokenizer.render([{"role": "user", "content": "ab"}])
    assert row.tokens.tolist() == [*tokenizer.encode(text), *tokenizer.encode("cd"), tokenizer.stop_ids[0]]
    assert row.sampled.tolist() == [False] * len(tokenizer.encode(text)) + [True] * 3
    rows = weighted([row, encode(tokenizer, Example("y", text, "c", rendered=True))])
    assert sum(row.weight.sum() for row in rows) == pytest.approx(1)
    assert rows[1].tokens.tolist()[:-2] == rows[0].tokens.tolist()[:-3]


def test_examples_of_a_run_are_its_finished_turns_of_enough_reward(talked, tmp_path):
    path = tmp_path / "traces.jsonl"
    traces = talked.traces
    message = next(event for event in traces[0]["events"] if event["type"] == "message")
    message |= {"finish": "stop", "reward": 2.0}
    path.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    (example, *rest) = FromTraces(str(path), reward=1.5)()
    assert not rest
    assert example == Example(
        f"{traces[0]['trace_id']}:{message['id']}", message["prompt"], message["text"], message["role"], True
    )
    assert FromTraces(str(path), reward=1.5, roles=("nobody",))() == []


def test_examples_from_json_lines_name_the_line_that_lacks_something(tmp_path):
    path = tmp_path / "demos.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"id": 7, "prompt": "c", "response": "d", "role": "judge"}\n')
    assert FromJsonl(str(path))() == [Example("1", "a", "b"), Example("7", "c", "d", "judge")]
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"line 2 = .*has no text under \['response'\]"):
        FromJsonl(str(path))()
    path.write_text('{"prompt": \n')
    with pytest.raises(ConfigError, match="line 1"):
        FromJsonl(str(path))()
    with pytest.raises(ConfigError, match="no such file"):
        FromJsonl(str(tmp_path / "none"))()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"examples": lambda: []}, "gave no examples"),
        ({"steps": 0}, "steps = 0"),
        ({"base": Base("x", train=False)}, r"base\.train = False"),
    ],
)
def test_cloning_refuses_what_cannot_work(model, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        clone(cloning(model, **changes), tmp_path / "run", quiet())


def test_parities_of_nothing_said_are_left_out():
    from mas_jax.config import Task

    assert Parities((("a", 0),))(graph.Trace(Task("t", ""), 0, "g")) == {}


def test_a_prompt_longer_than_the_window_is_a_budget_stop_in_the_trace(model, tmp_path):
    """Conversations outgrow a window of 64 tokens: the episode ends there, is scored and trained on what was said."""
    experiment = talking_team(
        model,
        workflow=partial(talk, rounds=8),
        tasks=Letters(heldout=2),
        rollout=replace(ENGINE, context=64),
        steps=1,
    )
    train(experiment, tmp_path / "run")
    traces = metrics.read(tmp_path / "run" / "traces.jsonl")
    stopped = [trace for trace in traces if trace["events"][-1]["stop"] == "budget"]
    assert stopped
    for trace in stopped:
        assert "does not fit the window rollout.context = 64" in trace["events"][-1]["error"]
        assert "parity" in trace["rewards"]
    last = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["budget_stops"] == len(stopped)
    assert last["failed"] == 0
    assert last["params/team/updates"] > 0


def test_sigterm_between_the_first_evaluation_and_the_first_update_is_resumed_with_that_evaluation_once(
    model, tmp_path, monkeypatch
):
    real = loop.held_out

    def evaluated_then_told_to_stop(run):
        found = real(run)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    experiment = talking_team(model, steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "held_out", evaluated_then_told_to_stop)
        with pytest.raises(loop.Preempted):
            train(experiment, tmp_path / "run")
    assert [record["step"] for record in metrics.read(tmp_path / "run" / "metrics.jsonl")] == [0]
    for name in ("run", "whole"):
        train(experiment, tmp_path / name)
    ours, theirs = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    plain = [
        [{k: v for k, v in record.items() if not k.startswith("time/")} for record in one] for one in (ours, theirs)
    ]
    assert plain[0] == plain[1]
    assert [record["step"] for record in ours] == [0, 1]


def test_a_turn_that_no_reward_applies_to_is_no_sample_of_its_group_and_not_trained():
    from mas_jax.config import Task
    from mas_jax.learners import methods

    traces = []
    for sample in range(4):
        turn = graph.Turn("0", "solver", 0, "team", 1, [1], [7, 9], [-1.0, -1.0], [0, 0], "", "stop")
        traces.append(graph.Trace(Task("a", "a"), sample, "0/a", [turn]))
    rewards.assign(
        traces, (Reward(lambda t: None if t.sample == 0 else float(t.sample > 1), name="some"),), ("solver",)
    )
    found = [row for trace in traces for row in graph.rows(trace)]
    loop.assign_credit(found, methods.METHODS["dr_grpo"])
    np.testing.assert_allclose([trace.turns[0].advantage for trace in traces], [0, -2 / 3, 1 / 3, 1 / 3])
    assert [trace.turns[0].judged for trace in traces] == [False, True, True, True]


def test_cloning_ends_a_reply_with_the_stop_id_that_the_template_writes(tmp_path):
    path = save_model(tmp_path / "two_stops")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.stop_ids[0] == 3
    row = encode(tokenizer, Example("1", "a", "b"))
    assert row.tokens[-1] == tokenizer.token_to_id("<|end|>") and row.sampled[-1]
