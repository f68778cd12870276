"""The real `train` main on real LIBERO, at a debug size: two updates, then resumed to four, against four at once."""

import json

import pytest

from vla_wmrl.cli import main
from vla_wmrl.tracking import read_jsonl

# Seconds and worker timings differ from run to run, everything else must not.
TIMES = ("time/", "worker_time/")


@pytest.fixture(scope="module")
def arguments(policy_folder):
    return [
        "train", "--arm=real_branch", f"--policy.path={policy_folder}", "--env.task_ids=0", "--env.image_size=32",
        "--env.max_steps=24", "--grpo.n_groups=2", "--grpo.group_size=2", "--grpo.lr=1e-3", "--groups.looks=2",
        "--groups.start_episodes=1", "--eval.episodes_per_task=2", "--eval.videos=1", "--workers.n=1", "--save_every=1",
        "--log.tensorboard=false", "--groups.reward=progress",  # a random policy reaches no stage, but comes closer or not
    ]  # fmt: skip


def metrics(folder):
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_jsonl(folder / "metrics.jsonl")]


def test_a_run_resumed_after_two_updates_equals_one_of_four(arguments, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*arguments, "--steps=4", f"--output_dir={whole}"]) == 0
    assert main([*arguments, "--steps=2", "--eval.after=false", f"--output_dir={parts}"]) == 0
    assert main([*arguments, "--steps=4", f"--output_dir={parts}", "--resume=true"]) == 0
    assert len(metrics(whole)) == 4
    assert metrics(parts) == metrics(whole)
    assert any(row["loss/skipped"] == 0.0 and row["loss/grad_norm"] > 0 for row in metrics(whole)), "no update was made"
    last = [(f / "checkpoints" / "00000004" / "tensors.safetensors").read_bytes() for f in (whole, parts)]
    assert last[0] == last[1]

    rows = read_jsonl(whole / "eval_after.jsonl")
    assert [r["init_id"] for r in rows] and all(r["truncated"] and not r["success"] for r in rows)
    ledger = json.loads((whole / "ledger.json").read_text())
    assert ledger["steps/real_evaluation"] == 2 * 2 * 24
    page = (whole / "report.html").read_text()
    assert "<video" in page and "http" not in page.split("<body")[1][:200]


def test_a_run_with_a_world_model_is_the_same_for_one_and_two_workers_and_when_resumed(arguments, tmp_path):
    """Anchors and imagined groups share the workers: which worker imagines, and with what it has built, may change nothing."""
    wmrl = [*arguments, "--arm=wmrl", "--grpo.n_groups=20", "--anchors.fraction=0.1", "--debias.min_pairs=2", "--steps=2",
            "--world_model.fit_steps=4", "--world_model.decoder_steps=4", "--world_model.refit_every=1",
            "--world_model.refit_steps=2", "--world_model.look_noise=true", "--groups.start_episodes=6",
            "--groups.dream_resets=4",
            "--groups.dream_episodes=2", "--groups.dream_every=2", "--groups.dream_looks=3",
            "--eval.before=false", "--eval.after=false"]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*wmrl, f"--output_dir={one}"]) == 0
    assert main([*wmrl, f"--output_dir={two}", "--workers.n=2", "--steps=1"]) == 0
    assert main([*wmrl, f"--output_dir={two}", "--workers.n=2", "--resume=true"]) == 0
    assert len(metrics(one)) == 2 and metrics(one) == metrics(two)
    assert any(row["loss/skipped"] == 0.0 for row in metrics(one)), "no update was made"
    assert all(row["steps/imagined_rollouts"] > 0 for row in metrics(one))
