"""`vla-wmrl text rl`: two tiny updates in the games and with a world model, resumed bit-equal; mistakes are one line."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from text_agents.alfworld_games import find_games
from text_agents.rl import imagine
from text_agents.rl.imitate import searching, slipping
from text_agents.rl.rejection import accepted
from text_agents.rwml import prompts
from vla_wmrl import cli
from vla_wmrl.tracking import read_jsonl


@pytest.fixture
def argv(tiny_model, games_folder):
    return [
        "text", "rl", f"--games.data={games_folder}", f"--model.path={tiny_model}", "--model.max_new_tokens=4",
        "--model.max_prompt_tokens=1900", "--games.limit=3", "--episodes.max_steps=2", "--episodes.invalid_penalty=1",
        "--episodes.list_commands=false", "--grpo.n_groups=2", "--grpo.group_size=3", "--grpo.lr=1e-3", "--lora.rank=2",
        "--save_every=1", "--eval.before=false", "--eval.splits=valid_unseen", "--eval.limit=2", "--eval.max_steps=2",
    ]  # fmt: skip


@pytest.fixture
def graded(monkeypatch):
    """A random model that knows no commands: half of its replies are one that does something, by their length. The world
    model's answers likewise."""
    monkeypatch.setattr(prompts, "command_in", lambda output: ("look" if len(output) % 2 else "dance", True))
    said = ("Nothing happens.", "You are in the middle of a room.")
    monkeypatch.setattr(imagine, "predicted_state", lambda answer: said[len(answer) % 2])


def rows(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(folder / "metrics.jsonl")]


def wmrl(tiny_model):
    # of two groups one is the anchor; the calibration acts from the second update on
    return [
        "--arm=wmrl", "--anchors.fraction=0.5", "--debias.min_pairs=3", f"--world_model.model.path={tiny_model}",
        "--world_model.model.max_new_tokens=3", "--world_model.history=1", "--fusion.min_groups=1", "--guard.enabled=false",
    ]  # fmt: skip


@pytest.mark.parametrize("arm", ["real", "wmrl"])
def test_a_run_resumed_after_one_update_equals_one_of_two(arm, argv, tiny_model, tmp_path, graded):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv += ["--step_level.weight=1"] if arm == "real" else wmrl(tiny_model)
    assert cli.main([*argv, "--steps=2", f"--output_dir={whole}"]) == 0
    assert cli.main([*argv, "--steps=1", "--eval.after=false", f"--output_dir={parts}"]) == 0
    assert cli.main([*argv, "--steps=2", "--eval.after=true", f"--output_dir={parts}", "--resume"]) == 0
    first, second = rows(whole)
    assert rows(parts) == [first, second]
    name = "model/adapter_model.safetensors"
    assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert read_jsonl(whole / "eval_after.jsonl") == read_jsonl(parts / "eval_after.jsonl")
    assert second["loss/grad_norm"] > 0 and second["loss/log_ratio_abs_max"] < 1e-5
    spent = json.loads((whole / "ledger.json").read_text())
    if arm == "real":
        assert spent["steps/real_anchors"] == 24 and spent["steps/imagined"] == 0  # 2 updates, 2 x 3 episodes, 2 commands
        assert first["episode/steps"] == 2 and 0 < first["episode/invalid"] < 1 and first["success/env"] == 0
    else:
        assert spent["steps/real_anchors"] == 12 and spent["steps/imagined_rollouts"] == 24  # the anchors' twins, too
        assert (first["loss/skipped"], first["fusion/weight_wm"], second["calib/pairs"]) == (1.0, 0.0, 6.0)
        assert second["fusion/weight_wm"] > 0 and second["imagined/steps"] == 2
    summary = json.loads((whole / "eval_after.json").read_text())["valid_unseen"]
    assert summary["all"]["episodes"] == 2 and summary["games_hash"] and not summary["list_commands"]


def test_a_trained_adapter_can_be_gone_on_from(argv, tmp_path, graded):
    assert cli.main([*argv, "--steps=1", f"--output_dir={tmp_path / 'first'}"]) == 0
    on = ["--steps=0", "--eval.before=true", f"--start={tmp_path / 'first' / 'model'}", f"--output_dir={tmp_path / 'on'}"]
    assert cli.main([*[a for a in argv if "eval.before" not in a], *on]) == 0
    after, before = (read_jsonl(tmp_path / run) for run in ("first/eval_after.jsonl", "on/eval_before.jsonl"))
    assert [r["commands"] for r in after] == [r["commands"] for r in before] and len(after) == 2
    assert not (tmp_path / "on" / "model").exists()


def test_imitation_of_walkthroughs_lowers_the_loss_resumes_and_its_model_can_be_gone_on_from(argv, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changed = {"--episodes.max_steps=2": "--episodes.max_steps=15", "--grpo.lr=1e-3": "--grpo.lr=1e-2"}
    changed |= {"--games.limit=3": "--games.limit=2", "--lora.rank=2": "--lora.rank=8"}  # every update sees the same games
    argv = [changed.get(a, a) for a in argv]
    sft = [*argv, "--method=sft", "--eval.after=false"]
    assert cli.main([*sft, "--steps=4", f"--output_dir={whole}"]) == 0
    assert cli.main([*sft, "--steps=2", f"--output_dir={parts}"]) == 0
    assert cli.main([*sft, "--steps=4", f"--output_dir={parts}", "--resume"]) == 0
    assert rows(parts) == rows(whole)
    first, *_, last = rows(whole)
    assert last["loss/nll"] < first["loss/nll"] - 0.05 and first["steps/real_demonstrations"] > 0
    on = ["--steps=0", f"--start={whole / 'model'}", f"--output_dir={tmp_path / 'on'}"]
    assert cli.main([*argv, *on]) == 0


def test_imitation_of_everything_learns_from_what_games_say_too(argv, tmp_path):
    """A model with random weights that imitates commands alone hardly learns to copy names: they are a sixth of the words."""
    argv = [*argv, "--method=sft", "--eval.after=false", "--steps=1"]
    looks = {}
    for what in ("commands", "everything"):
        assert cli.main([*argv, f"--imitate={what}", f"--output_dir={tmp_path / what}"]) == 0
        [row] = rows(tmp_path / what)
        looks[what] = row["loss/looks"]
    assert 0 < looks["commands"] < looks["everything"] / 3


def test_searching_demonstrations_look_in_vain_first_and_still_reach_the_goal(games_folder):
    """After a walkthrough alone a model invents the thing wherever it is: it has never seen a place without it."""
    games = find_games("train", str(games_folder))
    searched = 0
    for game in games:
        plan = searching(game, np.random.default_rng(0))
        assert plan == searching(game, np.random.default_rng(0))
        visits, walkthrough = plan[: -len(game.walkthrough)], plan[-len(game.walkthrough) :]
        assert walkthrough == list(game.walkthrough) and not set(visits) & set(walkthrough)
        kinds = {c.split()[1] for c in walkthrough if c.startswith("take ")}
        state, _ = game.start()
        for command in plan:
            assert command in state.commands
            state, text = game.step(state, command)
            if command in visits and "you see" in text:
                assert not any(f" {kind} " in text for kind in kinds)
        assert game.won(state)
        searched += len(visits)
    assert searched > 0


def test_slipping_demonstrations_go_on_to_the_goal_after_commands_that_do_nothing(games_folder):
    """Of clean demonstrations a model learns nothing for after its first wrong command: 86 % of all did nothing."""
    games = find_games("train", str(games_folder))
    idle = astray = 0
    for seed in range(3):
        for game in games:
            plan, slips = slipping(game, np.random.default_rng(seed), 30)
            assert (plan, slips) == slipping(game, np.random.default_rng(seed), 30) and len(plan) <= 30
            state, _ = game.start()
            for i, command in enumerate(plan):
                assert (command in state.commands) or i in slips
                idle += command not in state.commands
                astray += i in slips and command in state.commands
                state, _ = game.step(state, command)
            assert game.won(state)
    assert idle > 0 and astray > 0


@pytest.fixture
def looking_wins(monkeypatch):
    """A game is won by looking, which half of a random model's replies do (see `graded`)."""
    from text_agents.alfworld import AlfworldEnv
    from text_agents.protocol import StepResult

    step = AlfworldEnv.step

    def look_and_win(self, action):
        found = step(self, action)
        return StepResult(found.observation, 1.0, True, False, found.info | {"won": True}) if action == "look" else found

    monkeypatch.setattr(AlfworldEnv, "step", look_and_win)


def test_rft_imitates_the_shortest_success_of_a_game_and_resumes(argv, tmp_path, graded, looking_wins):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [*argv, "--method=rft", "--eval.after=false"]
    assert cli.main([*argv, "--steps=2", f"--output_dir={whole}"]) == 0
    assert cli.main([*argv, "--steps=1", f"--output_dir={parts}"]) == 0
    assert cli.main([*argv, "--steps=2", f"--output_dir={parts}", "--resume"]) == 0
    assert rows(parts) == rows(whole)
    first = rows(whole)[0]
    assert first["rft/accepted"] == 2 and first["success/env"] > 0 and first["loss/nll"] > 0  # of two games
    assert first["steps/real"] == first["steps/real_anchors"] > 0
    name = "model/adapter_model.safetensors"
    assert (whole / name).read_bytes() == (parts / name).read_bytes()


def test_rft_without_a_success_takes_no_step(argv, tmp_path):
    assert cli.main([*argv, "--method=rft", "--steps=1", "--eval.after=false", f"--output_dir={tmp_path / 'run'}"]) == 0
    [row] = rows(tmp_path / "run")
    assert (row["rft/accepted"], row["loss/skipped"], "loss/nll" in row) == (0.0, 1.0, False)


def test_rft_accepts_one_episode_a_game_the_shortest():
    def played(success, steps):
        return SimpleNamespace(success=success, steps=steps)

    long, short, lost = played(True, 9), played(True, 4), played(False, 2)
    assert accepted([(long, lost, short), (lost, lost), (short, played(True, 4))]) == [short, short]


def test_groups_without_contrast_take_no_step(argv, tmp_path):
    """Replies of a random model name no command: all are invalid, and nothing is to be learnt."""
    assert cli.main([*argv, "--steps=1", "--eval.after=false", f"--output_dir={tmp_path / 'run'}"]) == 0
    [row] = rows(tmp_path / "run")
    assert row["loss/skipped"] == 1.0 and row["episode/invalid"] == 1.0 and row["episode/malformed"] == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--games.data=no/such"], "no folder"),
        (["--model.path=no/such"], "no language model at"),
        (["--start=no/such"], "no language model at"),
        (["--model.max_prompt_tokens=2100"], "2048 positions"),
        (["--model.temperature=0"], "above 0"),
        (["--arm=wmrl", "--episodes.list_commands=true"], "fixes episodes.list_commands to false"),
        (["--arm=wmrl", "--anchors.fraction=0"], "must lie between 0 and 1"),
        (["--arm=real", "--world_model.kind=language"], "fixes world_model.kind to none"),
        (["--arm=gigpo"], "arm"),
        (["--method=sft", "--arm=mix"], "imitates what was executed"),
        (["--method=rft", "--arm=wmrl"], "imitates what was executed"),
        (["--eval.splits=train"], "both trained on and evaluated"),
        (["--eval.splits=valid_uneen"], "did you mean valid_unseen"),
        (["--step_level.weight=1", "--grpo.advantage_scale=shared"], "no shared scale"),
        (["--step_level.gamma=0"], "(0, 1]"),
        (["--grpo.group_size=1"], "at least 2"),
        (["--resume"], "nothing to resume"),
        (["--episode.batch=3"], "did you mean episodes.batch"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(change, words, argv, tmp_path, capsys):
    argv = [a for a in argv if a.split("=")[0] not in [c.split("=")[0] for c in change]]
    assert cli.main([*argv, *change, f"--output_dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("error: ") and words in err
    assert not (tmp_path / "run").exists()
