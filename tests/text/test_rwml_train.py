"""`vla-wmrl text rwml`: learns on a random model, resumes bit-equal, evaluates on other games, names mistakes."""

import json

import numpy as np
import pytest

from text_agents.config import RwmlConfig
from text_agents.rwml import evaluate, rewards, train, triplets
from vla_wmrl import cli
from vla_wmrl.config import GrpoConfig
from vla_wmrl.tracking import read_jsonl

ROOMS = ("desk", "shelf", "bed", "sofa", "drawer", "cabinet")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Triplets of 6 tasks, whose next states are one word each; `val` has a task of its own."""

    def of(task_id, room):
        commands, seen = [f"go to {room} 1", "look"], [f"You see a {room} 1.", f"{room} 1", f"{room} 1"]
        return triplets.from_episode("alfworld", task_id, "find it", 0, commands, seen)

    folder = tmp_path_factory.mktemp("triplets")
    found = [t for i, room in enumerate(ROOMS) for t in of(f"task-{i}", room)]
    triplets.write(folder, {"train": found[:-2], "val": found[-2:]}, {"env": "alfworld"})
    return folder


@pytest.fixture
def argv(data, tiny_model):
    return [
        "text", "rwml", f"--triplets={data}", f"--model.path={tiny_model}", "--model.max_new_tokens=6", "--history=1",
        "--grpo.n_groups=2", "--grpo.group_size=3", "--grpo.lr=1e-3", "--lora.rank=2", "--save_every=1", "--eval.limit=2",
    ]  # fmt: skip


@pytest.fixture
def graded(monkeypatch):
    """Rewards by the parity of a reply's length: contrast for a model that knows no tags."""
    monkeypatch.setattr(rewards, "rewards", lambda outputs, *_: np.array([float(len(o) % 2) for o in outputs]))


def rows(folder):
    timed = ("time/",)
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.parametrize("method", ["rwml", "sft"])
def test_a_run_resumed_after_two_updates_equals_one_of_four(method, argv, tmp_path, graded):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [*argv, f"--method={method}", "--eval.before=false"]
    assert cli.main([*argv, "--steps=4", f"--output_dir={whole}"]) == 0
    assert cli.main([*argv, "--steps=2", "--eval.after=false", f"--output_dir={parts}"]) == 0
    assert cli.main([*argv, "--steps=4", "--eval.after=true", f"--output_dir={parts}", "--resume"]) == 0
    assert len(rows(whole)) == 4 and rows(parts) == rows(whole)
    name = "model/adapter_model.safetensors"
    assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert any(row["loss/grad_norm"] > 0 for row in rows(whole) if "loss/grad_norm" in row)
    assert json.loads((whole / "eval_after.json").read_text())["n"] == 2


def test_imitation_lowers_the_loss_and_a_trained_adapter_can_be_gone_on_from(argv, tmp_path, graded):
    sft = [*argv, "--method=sft", "--grpo.n_groups=10", "--grpo.lr=1e-2", "--lora.rank=8", "--eval.before=false"]
    assert cli.main([*sft, "--steps=6", f"--output_dir={tmp_path / 'sft'}"]) == 0
    losses = [row["loss/nll"] for row in rows(tmp_path / "sft")]
    assert losses[-1] < losses[0] - 0.1
    on = [*argv, f"--start={tmp_path / 'sft' / 'model'}", "--steps=1", f"--output_dir={tmp_path / 'rwml'}"]
    assert cli.main(on) == 0
    after, before = (read_jsonl(tmp_path / run) for run in ("sft/eval_after.jsonl", "rwml/eval_before.jsonl"))
    assert [r["output"] for r in after] == [r["output"] for r in before]


def test_a_prompt_that_cannot_fit_is_left_out_at_the_start_and_does_not_end_a_run_half_way(data, argv, tmp_path, tiny_model):
    """A run ended after 60 of 80 updates, when the one long prompt of 1,250 was drawn."""
    folder, (known, held) = tmp_path / "long", (triplets.read(data, "train"), triplets.read(data, "val"))
    long = triplets.from_episode("alfworld", "task-long", "find it " * 400, 0, ["look"], ["desk 1", "desk 1"])
    triplets.write(folder, {"train": [*known, *long], "val": held}, {"env": "alfworld"})
    argv = [a for a in argv if not a.startswith("--triplets")]
    run = tmp_path / "run"
    assert cli.main([*argv, f"--triplets={folder}", "--model.max_prompt_tokens=600", "--method=sft", "--passes=1",
                     "--eval.before=false", "--eval.after=false", f"--output_dir={run}"]) == 0  # fmt: skip
    (manifest,) = json.loads((run / "manifest.json").read_text())["sessions"]
    assert (manifest["train_triplets"], manifest["train_triplets_too_long"]) == (len(known), 1)


def test_every_pass_over_the_triplets_sees_each_once_and_a_batch_depends_on_its_step_only(data):
    some = triplets.read(data, "train")
    seen = [t.id for step in range(5) for t in train.batch_of(some, step, 2, seed=0)]
    assert sorted(seen) == sorted(t.id for t in some)
    later = [t.id for step in range(5, 10) for t in train.batch_of(some, step, 2, seed=0)]
    assert sorted(later) == sorted(seen) and later != seen
    cfg = RwmlConfig(passes=2, grpo=GrpoConfig(n_groups=4))
    assert train.planned_steps(cfg, 10) == 5


def test_a_task_that_is_trained_on_is_not_held_out(data, argv, tmp_path, capsys):
    assert cli.main([*argv, f"--eval.triplets={data}", f"--output_dir={tmp_path / 'run'}"]) == 2
    assert "both trained on and held out" in capsys.readouterr().err


def test_an_interrupted_evaluation_goes_on_and_its_summary_is_that_of_one_in_one(data, tiny_model, tmp_path):
    from text_agents.language_policy import LanguagePolicy

    cfg = RwmlConfig(history=1)
    cfg.model.max_new_tokens, cfg.eval.batch = 4, 1
    policy, embedder = LanguagePolicy.from_pretrained(str(tiny_model)), rewards.Embedder()
    held = triplets.read(data, "train")[:3]
    whole = evaluate.evaluate(policy, held, embedder, cfg, tmp_path / "whole.jsonl", "whole")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "torn.jsonl").write_text(lines[0] + lines[1][:20])
    assert evaluate.evaluate(policy, held, embedder, cfg, tmp_path / "torn.jsonl", "torn") == whole
    assert whole["n"] == 3 and whole["accuracy"] == 0.0 and whole["tagged"] == 0.0


def test_a_run_that_trains_on_does_not_report_the_earlier_models_predictions(argv, tmp_path):
    on = [*argv, "--method=sft", "--grpo.lr=1e-2", "--lora.rank=8", "--eval.before=false"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli.main([*on, "--steps=1", f"--output_dir={parts}"]) == 0
    assert {r["updates"] for r in read_jsonl(parts / "eval_after.jsonl")} == {1}
    assert cli.main([*on, "--steps=6", f"--output_dir={parts}", "--resume"]) == 0
    assert cli.main([*on, "--steps=6", f"--output_dir={whole}"]) == 0
    assert (parts / "eval_after.jsonl").read_text() == (whole / "eval_after.jsonl").read_text()


def test_a_right_prediction_counts_and_a_generic_one_does_not(data):
    cfg, held = RwmlConfig(), triplets.read(data, "train")[:2]
    said = [f"<think>x</think><next_state>{held[0].next_state}</next_state>", "<next_state>You will see things.</next_state>"]
    first, second = evaluate.judge(held, said, rewards.Embedder(), cfg)
    assert (first["reward"], first["exact"], second["reward"], second["exact"]) == (1.0, True, 0.0, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--triplets=no/such"], "no triplets at"),
        (["--model.path=no/such"], "no language model at"),
        (["--method=ppo"], "method"),
        (["--dtype=bfloat16", "--lora.rank=0"], "round small steps away"),
        (["--model.temperature=0"], "above 0"),
        (["--grpo.group_size=1"], "at least 2"),
        (["--lora.targets=query"], "no layers"),
        (["--start=no/such"], "no language model at"),
        (["--reward.embedder=package:no-such"], "pip install"),
        (["--model.max_prompt_tokens=5"], "held-out prompts exceed"),
        (["--resume"], "nothing to resume"),
        (["--rank=3"], "unknown key"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(change, words, argv, tmp_path, capsys):
    argv = [a for a in argv if a.split("=")[0] not in [c.split("=")[0] for c in change]]
    assert cli.main([*argv, *change, f"--output_dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("error: ") and words in err
    assert not (tmp_path / "run").exists()
