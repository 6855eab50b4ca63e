"""Policy groups: the sampler is the policy that is trained, from the first push to the export."""

import json
import logging
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from shapes import LENGTHS, TINY
from team import ENGINE, LEARNER, ONE_DEVICE, Parities, parity_team, save_model

from mas_jax.cluster import LocalGroup, build_groups
from mas_jax.config import AdamW, Base, ConfigError, Loss, Mesh, Reward, Role
from mas_jax.graph import Row, Task, Trace, Turn
from mas_jax.learners import diagnostics
from mas_jax.learners.packing import TrainRow
from mas_jax.learners.update import learning_rate, policy_loss
from mas_jax.mesh import make_mesh
from mas_jax.models import hf
from mas_jax.rollout.driver import PolicyGroup, Request, stream_key

ADAM = AdamW(lr=1e-2, schedule="linear", decay_steps=5, floor=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def group(model):
    """One group for all tests of this file, as they never mind how far it has been trained."""
    group = LocalGroup("team", Base(str(model)), make_mesh(1, 1, 1), dtype="float32", seed=0)
    group.add_sampler(ENGINE)
    group.add_learner(LEARNER, ADAM, partial(policy_loss, Loss(kl=0.1)), reference=True)
    group.load()
    group.push()
    return group


def play(group, count=6, seed=0):
    """Rows of what the group samples now, with their sampler log-probabilities, versions and made-up credit."""
    rng = np.random.default_rng(seed)
    requests = [
        Request(
            str(i), ("ask", "say")[i % 2], rng.integers(0, TINY.vocab, 5 + 9 * i).tolist(), "",
            stream_key(seed, i), 2 + i, 1.0, (TINY.vocab,),
        )
        for i in range(count)
    ]  # fmt: skip
    group.submit(requests)
    done = {}
    while len(done) < count:
        done |= {completion.id: completion for completion in group.poll()}
    rows = []
    for request in requests:
        completion = done[request.id]
        tokens = np.asarray(request.prompt + completion.tokens, np.int32)
        sampled = np.arange(len(tokens)) >= len(request.prompt)
        old = np.zeros(len(tokens), np.float32)
        old[sampled] = completion.logprobs
        weight = np.where(sampled, np.float32(1 / sampled.sum() / count), np.float32(0))
        advantage = np.where(sampled, np.float32(rng.normal()), np.float32(0))
        rows.append(TrainRow(request.role, tokens, sampled, 1.0, advantage, weight, old, old))
    return rows, [done[request.id].versions for request in requests]


def gap(group, rows):
    scored = group.score(rows)
    return max(np.abs(f["logprobs"] - r.old_logprobs)[r.sampled].max() for f, r in zip(scored, rows, strict=True))


def flat(params):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(params)])


def test_a_local_group_is_a_policy_group(group):
    assert isinstance(group, PolicyGroup)


def test_after_each_update_and_push_the_sampler_says_what_the_new_weights_say(group):
    for _ in range(3):
        rows, versions = play(group, seed=group.version)
        assert {v for per_row in versions for v in per_row} == {group.version}
        assert gap(group, rows) < 1e-4
        before = group.version
        group.update(rows)
        assert group.version == before + 1
        assert gap(group, rows) > 1e-3
        assert group.push() == group.version
    group.push()
    assert gap(group, play(group)[0]) < 1e-4


def test_what_was_prefilled_under_old_weights_is_never_read_again(group):
    """The same prompts before and after an update: were their pages kept, the second round would be off."""
    rows, _ = play(group, seed=5)
    group.update(rows)
    group.push()
    again, _ = play(group, seed=5)
    assert gap(group, again) < 1e-4
    reused = group.scheduler.reused_tokens
    play(group, seed=5)
    assert group.scheduler.reused_tokens > reused


def test_without_a_push_the_sampler_goes_on_with_whole_old_weights(group):
    """Donating the learner's buffers must not take the sampler's with it; and the gap then shows."""
    before, _ = play(group, seed=6)
    group.update(before)
    stale, _ = play(group, seed=6)
    for one, other in zip(before, stale, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.old_logprobs, other.old_logprobs)
    assert gap(group, stale) > 1e-3
    group.push()


def test_the_reference_stays_where_the_run_started(group, model):
    _, start = hf.load(model)
    np.testing.assert_array_equal(flat(group.reference), flat(start))
    rows, _ = play(group)
    scored = group.score(rows)
    assert all(set(found) == {"logprobs", "entropy", "ref_logprobs"} for found in scored)
    assert all((found["ref_logprobs"][~row.sampled] == 0).all() for found, row in zip(scored, rows, strict=True))
    at_start = LocalGroup("team", Base(str(model)), group.mesh, dtype="float32", seed=0)
    at_start.add_sampler(ENGINE)
    at_start.learner, at_start.settings, at_start.state = (
        group.learner,
        group.settings,
        group.state._replace(params=start),
    )
    for found, first in zip(scored, at_start.score(rows), strict=True):
        np.testing.assert_allclose(found["ref_logprobs"], first["logprobs"], atol=1e-5)


def test_updates_are_counted_and_their_rate_is_that_of_their_number(group):
    before = group.version
    for i in range(2):
        found = group.update(play(group, seed=i)[0])
        assert found["params/team/updates"] == before + i + 1
        assert found["params/team/lr"] == learning_rate(ADAM, before + i)
        assert found["params/team/skipped"] == 0
        group.push()


def test_the_shares_of_the_roles_add_up_and_each_has_its_numbers(group):
    found = group.update(play(group)[0])
    assert found["ask/grad_share"] + found["say/grad_share"] == pytest.approx(1)
    norms = found["ask/grad_norm"], found["say/grad_norm"]
    assert abs(norms[0] - norms[1]) <= found["params/team/grad_norm"] <= sum(norms)
    assert found["ask/ratio"] == pytest.approx(1, abs=1e-4)
    for name in ("loss", "policy_loss", "clip_low", "clip_high", "max_ratio", "approx_kl", "chi2", "kl"):
        assert np.isfinite(found[f"ask/{name}"])
    group.push()


def test_a_gradient_that_is_not_finite_is_skipped_and_said(group):
    rows, _ = play(group)
    before, version = flat(group.params), group.version
    rows[0].advantage = np.where(rows[0].sampled, np.float32(np.nan), np.float32(0))
    found = group.update(rows)
    assert found["params/team/skipped"] == 1
    assert found["params/team/updates"] == version
    np.testing.assert_array_equal(flat(group.params), before)


def test_the_gap_is_measured_per_role_and_warned_of(group, caplog):
    group.push()
    rows, _ = play(group)
    scored = group.score(rows)

    def seen(row, shift=0.0):
        turn = Turn("0", row.role, 0, "team", 1, [], [], [], [], "", "stop")
        unused = np.zeros(len(row.tokens), np.int32)
        logprobs = np.where(row.sampled, row.old_logprobs + np.float32(shift), np.float32(0))
        return Row(Trace(Task("t", ""), 0, "g"), [turn], row.tokens, row.sampled, logprobs, unused, unused)

    fine = diagnostics.mismatch([seen(row) for row in rows], scored, 0.05)
    assert fine["ask/gap_max"] < 1e-4
    assert abs(fine["ask/ppl_ratio"] - 1) < 1e-4
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        off = diagnostics.mismatch([seen(row, 0.1 * (row.role == "say")) for row in rows], scored, 0.05)
    assert off["say/gap"] == pytest.approx(0.1, abs=1e-4)
    assert off["ask/gap"] < 1e-4
    (record,) = caplog.records
    assert "not the policy being trained" in record.getMessage()
    assert "role say" in record.getMessage()


def test_an_export_loads_with_the_same_weights_and_its_sampler_says_the_same(group, tmp_path):
    group.push()
    group.export(tmp_path / "out")
    config, params = hf.load(tmp_path / "out")
    assert config == group.config
    np.testing.assert_array_equal(flat(params), flat(group.params))
    again = LocalGroup("team", Base(str(tmp_path / "out"), train=False), group.mesh, dtype="float32", seed=0)
    again.add_sampler(ENGINE)
    again.load()
    again.push()
    for one, other in zip(play(group, seed=9)[0], play(again, seed=9)[0], strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.old_logprobs, other.old_logprobs)
    assert again.tokenizer.stop_ids == group.tokenizer.stop_ids
    said = [{"role": "user", "content": "abc"}]
    assert again.tokenizer.render(said) == group.tokenizer.render(said)


def two_bases(model, other, **changes):
    return parity_team(
        model,
        params={"first": Base(str(model)), "second": Base(str(other), **changes)},
        roles={"even": Role("first", max_tokens=4), "odd": Role("second", max_tokens=4)},
        optimizers={"first": AdamW(lr=1e-2), "second": AdamW(lr=1e-2)},
        rewards=(Reward(Parities((("even", 0), ("odd", 1))), name="parity"),),
    )


def test_groups_of_separate_bases_learn_apart_and_a_frozen_one_never_changes(model, tmp_path):
    groups = build_groups(two_bases(model, save_model(tmp_path / "other", seed=1), train=False))
    assert [group.learns for group in groups.values()] == [True, False]
    for group in groups.values():
        group.push()
    still, moved = flat(groups["second"].params), flat(groups["first"].params)
    said, _ = play(groups["second"], seed=3)
    for i in range(20):
        groups["first"].update(play(groups["first"], seed=i)[0])
        for group in groups.values():
            group.push()
    assert groups["second"].version == 0
    np.testing.assert_array_equal(flat(groups["second"].params), still)
    assert not np.array_equal(flat(groups["first"].params), moved)
    for one, other in zip(said, play(groups["second"], seed=3)[0], strict=True):
        np.testing.assert_array_equal(one.old_logprobs, other.old_logprobs)


def spoilt(model, path, **changes):
    """A copy of the model directory with other values in config.json."""
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_tokenizer_of_another_model_is_refused_before_weights_are_read(model, tmp_path):
    path = spoilt(model, tmp_path / "small", vocab_size=200)
    with pytest.raises(ConfigError, match=r"params\.team\.path.*272 ids, the model 200"):
        build_groups(parity_team(path))


def test_weights_that_do_not_fit_the_config_are_listed(model, tmp_path):
    path = spoilt(model, tmp_path / "deep", num_hidden_layers=3, layer_types=None)
    with pytest.raises(ConfigError, match=r"missing model\.layers\.2\.input_layernorm\.weight"):
        build_groups(parity_team(path))


def test_heads_that_the_mesh_does_not_divide_are_refused(model):
    with pytest.raises(ConfigError, match=r"mesh\.tensor = 8: the model's heads = 4"):
        build_groups(parity_team(model, mesh=Mesh(data=1, fsdp=1, tensor=8)))


def test_rows_that_the_mesh_does_not_divide_are_refused(model):
    learner = replace(LEARNER, rows=6)
    with pytest.raises(ConfigError, match=r"learner\.rows = 6: must be a multiple of mesh data x fsdp = 4"):
        build_groups(parity_team(model, mesh=Mesh(data=2, fsdp=2, tensor=1), learner=learner))
    with pytest.raises(ConfigError, match=r"rollout\.prefill_rows = 4: must be a multiple of mesh data x fsdp = 8"):
        build_groups(parity_team(model, mesh=Mesh(data=1, fsdp=8, tensor=1)))


def test_a_system_prompt_or_an_option_that_the_template_does_not_take_is_refused_before_weights_are_read(
    model, tmp_path
):
    path = spoilt(model, tmp_path / "gemma")
    (path / "model.safetensors").unlink()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    team = parity_team(path)
    role, own = next(iter(team.roles.items()))
    with pytest.raises(ConfigError, match=rf"roles\.{role}\.system = 'Be brief': begin the first user message"):
        build_groups(replace(team, roles=team.roles | {role: replace(own, system="Be brief")}))
    with pytest.raises(ConfigError, match=rf"roles\.{role}\.template = .*enable_thinking"):
        build_groups(replace(team, roles=team.roles | {role: replace(own, template={"enable_thinking": False})}))


def test_a_tokenizer_without_a_template_is_refused(model, tmp_path):
    path = spoilt(model, tmp_path / "bare")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no chat template"):
        build_groups(parity_team(path))


def test_a_row_longer_than_every_line_is_an_error_that_names_the_setting(group):
    row = play(group, 1)[0][0]
    long = np.zeros(LENGTHS[-1] + 1, np.int32)
    zeros = np.zeros(len(long), np.float32)
    with pytest.raises(ValueError, match=r"129 tokens; learner\.lengths"):
        group.score([row, TrainRow("ask", long, zeros > 0, 1.0, zeros, zeros, zeros, zeros)])


def test_adapters_are_refused_where_there_are_none(group):
    request = Request("r", "ask", [1], "", stream_key(1), 2, 1.0, (0,), gate=np.ones(4, np.float32))
    with pytest.raises(ConfigError, match=r"roles\.ask.*adapters"):
        group.submit([request])


def test_a_learner_on_eight_devices_goes_the_way_of_one(model):
    """One update and a push from sharded weights; log-probabilities of sampler and learner stay together."""
    settings = parity_team(model, mesh=Mesh(data=2, fsdp=2, tensor=2))
    spread = build_groups(settings)["team"]
    spread.push()
    one = build_groups(replace(settings, mesh=ONE_DEVICE))["team"]
    one.push()
    rows, _ = play(one)
    assert gap(spread, rows) < 1e-4
    found, alone = spread.update(rows), one.update(rows)
    assert found["params/team/grad_norm"] == pytest.approx(alone["params/team/grad_norm"], rel=1e-4)
    assert found["ask/loss"] == pytest.approx(alone["ask/loss"], abs=1e-5)
    spread.push()
    assert gap(spread, play(spread)[0]) < 1e-4


def test_an_untied_model_without_its_head_is_refused_in_words(tmp_path):
    from safetensors.numpy import load_file, save_file

    path = save_model(tmp_path / "headless", config=replace(TINY, tied=False))
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    group = LocalGroup("team", Base(str(path)), make_mesh(1, 1, 1), dtype="float32", seed=0)
    with pytest.raises(ConfigError, match=r"params\.team\.path.*missing lm_head\.weight \(if the embedding"):
        group.load()
