"""The command line: bad input ends with 2 and words that name field, value and remedy; good input does what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from team import save_model

from mas_jax import cli, metrics
from mas_jax.cluster import LocalGroup

pytestmark = pytest.mark.jax
ROOT = Path(__file__).resolve().parents[1]

CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from dataclasses import replace
from mas_jax import AdamW, Base, Call, Reward, Role, user, workflow
from mas_jax.config import Cloning, Example
from team import LEARNER, ONE_DEVICE, Letters, talking_team

@workflow(roles=("asker", "helper"))
def stranger(task, team):
    yield Call("nobody", [user(task.prompt)])

@workflow(roles=("asker", "helper"))
def toolless(task, team):
    from mas_jax import Tool
    yield Tool("calculator", "1")

def examples():
    return [Example(str(i), "abc"[i], "bcd"[i]) for i in range(3)]

def broken():
    raise RuntimeError("no such book")

experiment = talking_team({model!r}, steps=1)
{more}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def write(tmp_path, model):
    """Writes a config file that ends with these lines."""

    def write(more: str = "") -> str:
        path = tmp_path / "team_config.py"
        path.write_text(CONFIG.format(tests=str(ROOT / "tests"), model=str(model), more=more))
        return str(path)

    return write


def run(*argv) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(arg) for arg in argv])
    return stop.value.code or 0


def assert_refused(capsys, *parts: str) -> None:
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert said.err.startswith("mas-jax: error: ")
    for part in parts:
        assert part in said.err


BAD_EXPERIMENTS = {
    "a role that the workflow calls and the config lacks": (
        "experiment = replace(experiment, workflow=stranger)",
        ("roles = 'nobody'", "the workflow calls this role", "['asker', 'helper']"),
    ),
    "a role that was declared and has no entry": (
        "experiment = replace(experiment, roles={'asker': Role('team', max_tokens=4)})",
        ("roles = ['asker']", "'helper', which has no entry; add it"),
    ),
    "a role without params": (
        "experiment = replace(experiment, roles={'asker': Role('team', max_tokens=4), 'helper': Role('they', max_tokens=4)})",
        ("roles.helper.params = 'they'", "there are ['team']"),
    ),
    "a tool that the config lacks": (
        "experiment = replace(experiment, workflow=toolless)",
        ("tools = 'calculator'", "the workflow uses this tool"),
    ),
    "an empty task set": (
        "experiment = replace(experiment, tasks=Letters(train=0))",
        ("tasks = 'Letters'", "gave no training tasks"),
    ),
    "a group of one": (
        "experiment = replace(experiment, group_size=1)",
        ("group_size = 1", "use 2 or more"),
    ),
    "an unknown method": (
        "experiment = replace(experiment, method='dr_mass')",
        ("method = 'dr_mass'", "did you mean 'dr_mas'"),
    ),
    "a temperature of 0 in training": (
        "experiment = replace(experiment, roles=experiment.roles | {'asker': Role('team', max_tokens=4, temperature=0.0)})",
        ("roles.asker.temperature = 0.0", "set a temperature above 0"),
    ),
    "a context that chunks do not fill": (
        "experiment = replace(experiment, rollout=replace(experiment.rollout, context=100))",
        ("rollout.context = 100", "multiple of rollout.chunk = 16"),
    ),
    "replies that leave no room for a prompt": (
        "experiment = replace(experiment, roles=experiment.roles | {'asker': Role('team', max_tokens=500)})",
        ("roles.asker.max_tokens = 500", "rollout.context = 128"),
    ),
    "nothing to learn": (
        "experiment = replace(experiment, params={'team': replace(experiment.params['team'], train=False)})",
        ("params = ['team']", "every entry is frozen"),
    ),
    "an optimizer of nothing": (
        "experiment = replace(experiment, optimizers={'tem': AdamW()})",
        ("optimizers.tem", "there are ['team']"),
    ),
}


@pytest.mark.parametrize(("more", "parts"), BAD_EXPERIMENTS.values(), ids=BAD_EXPERIMENTS)
def test_an_experiment_that_cannot_work_is_refused_before_a_model_is_read(
    write, tmp_path, capsys, monkeypatch, more, parts
):
    monkeypatch.setattr(LocalGroup, "load", lambda self: pytest.fail("a model was read"))
    assert run("train", write(more), "--run-dir", tmp_path / "run") == 2
    assert_refused(capsys, *parts)


def spoilt(model, path, name, change):
    """A copy of the model directory in which one JSON file is changed."""
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((path / name).read_text())
    change(settings)
    (path / name).write_text(json.dumps(settings))
    return path


BAD_MODELS = {
    "missing weights": (
        ("config.json", lambda config: config.update(num_hidden_layers=3, layer_types=None)),
        ("path = ", "missing model.layers.2.mlp.up_proj.weight"),
    ),
    "left-over weights": (
        ("config.json", lambda config: config.update(num_hidden_layers=1, layer_types=None)),
        ("path = ", "left over model.layers.1.mlp.up_proj.weight"),
    ),
    "mis-shaped weights": (
        ("config.json", lambda config: config.update(intermediate_size=32)),
        ("path = ", "model.layers.0.mlp.up_proj.weight has shape [64, 32], config.json gives [32, 32]"),
    ),
    "another family": (
        ("config.json", lambda config: config.update(architectures=["GPT2LMHeadModel"])),
        ("architectures = ['GPT2LMHeadModel']", "Qwen3ForCausalLM"),
    ),
    "no template": (
        ("tokenizer_config.json", lambda settings: settings.pop("chat_template")),
        ("no chat template", "add chat_template to tokenizer_config.json"),
    ),
    "another tokenizer": (
        ("config.json", lambda config: config.update(vocab_size=100)),
        ("params.team.path", "272 ids, the model 100"),
    ),
    "too few positions": (
        ("config.json", lambda config: config.update(max_position_embeddings=64)),
        ("rollout.context = 128", "64 positions"),
    ),
}


@pytest.mark.parametrize(("spoil", "parts"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_a_model_that_does_not_fit_is_refused(write, model, tmp_path, capsys, spoil, parts):
    path = spoilt(model, tmp_path / "spoilt", *spoil)
    assert run("train", write(), "--run-dir", tmp_path / "run", "--params.team.path", path) == 2
    assert_refused(capsys, *parts)


def test_a_model_that_is_nowhere_is_refused(write, tmp_path, capsys):
    flags = ("--params.team.path", tmp_path / "nowhere")
    assert run("train", write(), "--run-dir", tmp_path / "run", *flags) == 2
    assert_refused(capsys, "path = ", "no such directory", "give its directory")
    assert run("eval", write(), *flags) == 2
    assert_refused(capsys, "no such directory")


def test_heads_that_the_mesh_does_not_divide_are_refused(write, tmp_path, capsys):
    assert run("train", write(), "--run-dir", tmp_path / "run", "--mesh.tensor", "8") == 2
    assert_refused(capsys, "mesh.tensor = 8", "heads = 4", "use one of [1, 2, 4]")


def test_more_devices_than_there_are_are_refused(write, tmp_path, capsys):
    assert run("train", write(), "--run-dir", tmp_path / "run", "--mesh.data", "16") == 2
    assert_refused(capsys, "mesh.data = 16", "there are 8")


def test_a_run_directory_that_cannot_be_written_is_refused(write, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", "/proc/run"):
        assert run("train", write(), "--run-dir", path) == 2
        assert_refused(capsys, f"run_dir = '{path}'", "cannot be written", "choose another")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = 1", ("it must set `experiment` to Experiment(...)", "nothing of that name")),
        ("experiment = 3", ("there is a int",)),
        ("1 / 0", ("it raises ZeroDivisionError",)),
        ("def f(:", ("it raises SyntaxError",)),
        (None, ("no such file",)),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, capsys, text, parts):
    path = tmp_path / "odd.py"
    if text is not None:
        path.write_text(text)
    assert run("train", path) == 2
    assert_refused(capsys, "CONFIG = ", *parts)


def test_a_config_of_the_other_kind_is_refused(write, capsys):
    assert run("sft", write()) == 2
    assert_refused(capsys, "Cloning", "there is a Experiment")


def test_wrong_commands_and_flags_exit_with_2(write, tmp_path, capsys):
    assert run("trian") == 2
    assert_refused(capsys, "command = 'trian'", "train")
    assert run("train", write(), "--run-dir", tmp_path / "run", "--rolout.slots", "4") == 2
    said = capsys.readouterr()
    assert "--rollout.slots" in said.out + said.err
    assert run("train", write(), "--batch", "many") == 2
    assert run("trace", "play", tmp_path) == 2


def test_commands_on_a_directory_without_a_run_are_refused(tmp_path, capsys):
    assert run("export", tmp_path) == 2
    assert_refused(capsys, f"run_dir = '{tmp_path}'", "no run was started there")
    assert run("trace", "show", tmp_path) == 2
    assert_refused(capsys, str(tmp_path))


def test_tasks_that_raise_are_a_failure_with_its_cause(write, tmp_path):
    """The user's own code is at fault: its traceback is what helps, and the exit code is not 0."""
    with pytest.raises(RuntimeError, match="no such book"):
        cli.run(["train", write("experiment = replace(experiment, tasks=broken)"), "--run-dir", str(tmp_path / "run")])


def test_a_run_of_failing_episodes_exits_with_1_and_the_cause(write, tmp_path, capsys):
    more = "from mas_jax.config import Limits\nexperiment = replace(experiment, tasks=Letters(broken=1), limits=Limits(failures=0.0))"
    assert run("train", write(more), "--run-dir", tmp_path / "run") == 1
    said = capsys.readouterr()
    assert "mas-jax: the run stopped:" in said.err
    assert "ValueError: planted failure" in said.err
    assert "Traceback" not in said.err


def test_another_process_says_the_same_and_exits_with_2(write, tmp_path):
    command = [
        sys.executable,
        "-m",
        "mas_jax",
        "train",
        write(),
        "--run-dir",
        str(tmp_path / "run"),
        "--group-size",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert done.returncode == 2
    assert "mas-jax: error: group_size = 1" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_run_is_trained_shown_scored_exported_and_refused_to_another_config(write, tmp_path, capsys):
    config, directory = write(), tmp_path / "run"
    assert run("train", config, "--run-dir", directory, "--steps", "2", "--seed", "3") == 0
    said = capsys.readouterr().out
    for part in ("held-out tasks: step 0 -> step 2", "step 1/2 | parity 0.", f"mas-jax trace show {directory}"):
        assert part in said
    assert f"mas-jax eval {config} --params.team.path {directory}/export/team" in said

    kept = (directory / "command.json").read_bytes(), (directory / "config.json").read_bytes()
    assert run("train", config, "--run-dir", directory, "--steps", "2", "--seed", "4") == 2
    assert_refused(capsys, "seed: 3 -> 4", "--force")
    assert kept == ((directory / "command.json").read_bytes(), (directory / "config.json").read_bytes())

    assert run("trace", "show", directory, "--limit", "1") == 0
    shown = capsys.readouterr().out
    assert "asker" in shown
    assert "step 1/0" in shown

    trained = (directory / "export" / "team" / "model.safetensors").read_bytes()
    assert run("export", directory, "--out", tmp_path / "newest") == 0
    assert (tmp_path / "newest" / "team" / "model.safetensors").read_bytes() == trained
    assert run("export", directory, "--step", "1", "--out", tmp_path / "first") == 0
    assert (tmp_path / "first" / "team" / "model.safetensors").read_bytes() != trained
    capsys.readouterr()
    assert run("export", directory, "--step", "7") == 2
    assert_refused(capsys, "step = 7", "checkpoints of steps [1, 2]")

    flags = ("--seed", "3", "--params.team.path", directory / "export" / "team", "--out", tmp_path / "eval.jsonl")
    assert run("eval", config, *flags) == 0
    scored = [trace["rewards"] for trace in metrics.read(tmp_path / "eval.jsonl")]
    assert scored == [trace["rewards"] for trace in metrics.read(directory / "eval_2.jsonl")]


def test_sft_writes_a_directory_that_train_takes(write, tmp_path, capsys):
    path = write(
        "experiment = Cloning(experiment.params['team'], examples, steps=2, batch=2, learner=LEARNER, mesh=ONE_DEVICE)"
    )
    assert run("sft", path, "--run-dir", tmp_path / "sft") == 0
    out = tmp_path / "sft" / "export"
    assert str(out) in capsys.readouterr().out
    assert run("train", write(), "--run-dir", tmp_path / "run", "--params.team.path", out) == 0


def test_methods_are_listed_with_their_papers(capsys):
    assert run("methods") == 0
    said = capsys.readouterr().out
    assert "dr_mas" in said
    assert "arXiv 2602.08847" in said
    assert run("methods", "rloo") == 0
    assert "leave_one_out" in capsys.readouterr().out
    assert run("methods", "nothing") == 2


def test_an_evaluation_whose_traces_cannot_be_written_is_refused_before_it_is_played(capsys):
    config = Path(__file__).parents[1] / "configs" / "quickstart.py"
    assert cli.run(["eval", str(config), "--out", "/proc/nowhere/traces.jsonl"]) == 2
    assert "out = '/proc/nowhere/traces.jsonl': cannot be written" in capsys.readouterr().err
