"""Training of the language world model: what is right is rewarded, held-out tasks are never trained on, a run resumes."""

import gzip
import json

import pytest
import torch

from text_agents.autoresearch import backends, world_training
from text_agents.autoresearch.world_config import WorldTrainConfig
from text_agents.language_policy import LanguagePolicy
from vla_wmrl import arguments, checkpoint, cli
from vla_wmrl.tracking import read_jsonl
from vla_wmrl.world_model.language import Case, parse_prediction

STATUSES = ("valid", "runtime_error", "no_submission", "malformed")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight executions on each of two training tasks and a held-out one."""
    path = tmp_path_factory.mktemp("data") / "executions.jsonl.gz"
    rows = [
        {"task": t, "held_out": t == "c", "description": f"Task {t}.", "inventory": "x: int64", "brief": "Python"}
        for t in "abc"
    ]
    for task in "abc":
        for i in range(8):
            status = STATUSES[i % 4]
            code = f"x = {i} +" if status == "malformed" else f"print({i})"
            reward = {"valid": 0.95, "runtime_error": 0.1, "no_submission": 0.2, "malformed": 0.0}[status]
            error = ("ValueError", 1) if status == "runtime_error" else (None, None)
            rows.append({"task": task, "id": i, "code": code, "status": status, "reward": reward, "cpu_s": 1.0,
                         "error_type": error[0], "error_line": error[1]})  # fmt: skip
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(r) + "\n" for r in rows))
    return path


def known(status, bucket=None, error=None, line=None):
    return world_training.Executed(Case("t", "d", "i", "b", "print(1)"), status, bucket, error, line, [1])


def test_the_reward_of_the_true_answer_is_one_and_of_what_cannot_be_read_zero():
    for case in (known("valid", "high"), known("runtime_error", None, "KeyError", 3), known("no_submission")):
        answer = world_training.answer_of(case)
        first = parse_prediction(answer).outcomes[0]
        assert (first.status, first.bucket, first.error_line) == (case.status, case.bucket, case.error_line)
        assert world_training.reward_of(answer, case) == 1.0
    right = world_training.answer_of(known("valid", "high"))
    assert world_training.reward_of(right, known("valid", "low")) == 0.5
    assert world_training.reward_of(right, known("no_submission")) == 0.0
    assert world_training.reward_of("The outcome will be described by the sandbox.", known("valid", "high")) == 0.0


def go(folder, data, model, *argv):
    common = [f"--output_dir={folder}", f"--data={data}", f"--model.path={model}", "--grpo.n_groups=4", "--save_every=1"]
    return cli.main(["research", "world", *common, "--model.max_new_tokens=224", "--eval_per_task=2", *argv])


def test_imitation_lowers_the_loss_and_a_resumed_run_is_the_same_run(data, tiny_long_model, tmp_path, capsys):
    argv = ("--lora.rank=0", "--grpo.lr=0.01")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert go(whole, data, tiny_long_model, "--steps=4", *argv) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "before: status_at_1" in out and "after: status_at_1" in out and "2 held-out programs, 0 missing" in out
    nll = [r["loss/nll"] for r in read_jsonl(whole / "metrics.jsonl")]
    assert nll[-1] < nll[0] - 0.1
    manifest = json.loads((whole / "manifest.json").read_text())["sessions"][0]
    assert (manifest["programs"], manifest["left_out"]) == (12, 4), "malformed ones are the compile gate's"
    assert go(parts, data, tiny_long_model, "--steps=2", *argv) == 0
    assert go(parts, data, tiny_long_model, "--steps=4", "--resume=true") == 0, capsys.readouterr().err
    a, b = (checkpoint.load(checkpoint.latest(f))["trainer"]["learner"]["weights"] for f in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_reinforcement_steps_where_answers_differ_in_reward_and_trains_on_no_held_out_task(
    data, tiny_long_model, tmp_path, monkeypatch
):
    seen = []
    monkeypatch.setattr(world_training, "reward_of", lambda answer, case: seen.append(case.case.task) or float(len(answer) % 3))
    monkeypatch.setattr(world_training, "_judge", lambda *a: None)
    argv = ("--method=rwml", "--steps=2", "--grpo.group_size=3", "--grpo.n_groups=2", "--lora.rank=2")
    assert go(tmp_path / "run", data, tiny_long_model, *argv) == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert set(seen) == {"a", "b"} and len(seen) == 2 * 2 * 3
    assert rows[0]["loss/skipped"] == 0 and rows[0]["loss/log_ratio_abs_max"] < 1e-4
    trained = backends.TransformersBackend(str(tmp_path / "run" / "model"))  # an adapter's folder
    plain = LanguagePolicy.from_pretrained(str(tiny_long_model)).model
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(trained.model.state_dict()[name], plain.state_dict()[name])


def test_a_language_model_is_judged_by_the_harness_like_any_predictor(data, tiny_long_model, tmp_path, capsys):
    argv = [f"--data={data}", "--predictor=language", f"--model={tiny_long_model}", "--per_task=2", "--bootstrap=0"]
    output = tmp_path / "found.json"
    assert cli.main(["research", "fidelity", *argv, "--max_tokens=192", f"--output={output}"]) == 0, capsys.readouterr().err
    found = json.loads(output.read_text())
    figures = found["held_out_tasks"]["language"]["figures"]
    assert (figures["n"], figures["missing"]) == (2, 0) and found["solutions"] == 6


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["world"], "--output_dir"),
        (["world", "--output_dir=x", "--data=nowhere"], "no file nowhere"),
        (["world", "--output_dir=x", "--method=wrml"], "wrml"),
        (["world", "--output_dir=x", "--resume=true"], "nothing to resume"),
        (["world", "--output_dir=x", "--model.temperature=0"], "temperature"),
        (["fidelity", "--data=x", "--url=http://localhost"], "--predictor=language"),
        (["fidelity", "--data=x", "--per_task=0"], "per_task=0"),
    ],
)
def test_mistakes_are_one_line(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["research", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not list(tmp_path.iterdir())


def test_prompts_beyond_the_limit_lose_their_inventory_and_then_are_left_out(data, tiny_long_model):
    from text_agents.autoresearch import fidelity

    policy, rows = LanguagePolicy.from_pretrained(str(tiny_long_model)), fidelity.read_rows(data)
    rows = rows.assign(inventory="y" * 1500)
    full = len(world_training.executed(policy, rows, 8000)[0].prompt)
    short = world_training.executed(policy, rows, full - 500)
    assert len(short) == 18 and len(short[0].prompt) < full - 500
    assert world_training.executed(policy, rows, 50) == []
    arguments.load(WorldTrainConfig, ["--output_dir=x"])
