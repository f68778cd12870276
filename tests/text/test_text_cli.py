"""`vla-wmrl text`: help without heavy imports, mistakes as one line, and the quick start runs as it is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from text_agents import commands
from text_agents.config import DOMAINS, SPLITS
from vla_wmrl import arguments, cli

HEAVY = ("torch", "mujoco", "lerobot", "transformers", "numpy", "textworld", "tau2", "litellm", "sentence_transformers")


def test_help_of_every_text_command_imports_nothing_heavy():
    code = (
        "import sys; from vla_wmrl.cli import main\n"
        f"for name in {list(commands.COMMANDS)!r}: assert main(['text', name, '--help']) == 0\n"
        "assert main(['text', 'games', '--seeed=1']) == 2 and main(['text']) == 0\n"
        f"print('HEAVY', *[m for m in {HEAVY!r} if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rpartition("HEAVY")[2].split() == []
    assert done.stderr == "error: unknown key 'seeed' in the command line (did you mean seed?)\n"


def test_every_key_of_every_text_command_is_explained():
    for name, (cls, _, _) in commands.COMMANDS.items():
        text = arguments.help_text(cls, f"text {name}")
        assert all(f"--{key}=" in text for key in arguments.fields(cls))


def test_names_in_the_config_are_those_of_the_environments():
    from text_agents import alfworld_games, tau2_data

    assert set(SPLITS) == set(alfworld_games.SPLITS) and DOMAINS == tau2_data.DOMAINS


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["text", "gmaes"], "did you mean games"),
        (["text", "games"], "--output_dir"),
        (["text", "play", "--output_dir=x", "--agent=expert"], "agent"),
        (["text", "play", "--output_dir=x", "--data=no/such/folder"], "no folder"),
        (["text", "replay", "--output_dir=x", "--domains=retial"], "did you mean retail"),
        (["text", "replay", "--output_dir=x", "--solo"], "telecom only"),
        (["text", "triplets", "--output_dir=x", "--env=tau2"], "--agent=walkthrough"),
        (
            ["text", "triplets", "--output_dir=x", "--env=tau2", "--agent=walkthrough", "--domains=retial"],
            "did you mean retail",
        ),
        (["text", "rwml", "--triplets=no/such"], "--output_dir"),
        (["text", "calibrate-threshold"], "--triplets"),
        (["text", "calibrate-threshold", "--triplets=no/such"], "no triplets at"),
    ],
)
def test_mistakes_are_one_line_on_stderr(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not any(tmp_path.iterdir())


def test_the_quick_start_makes_games_plays_them_collects_triplets_and_calibrates(tmp_path, capsys):
    games, run, data = tmp_path / "games", tmp_path / "run", tmp_path / "triplets"
    assert cli.main(["text", "games", f"--output_dir={games}", "--train=4", "--valid_seen=0", "--valid_unseen=1"]) == 0
    assert cli.main(["text", "play", f"--data={games}", f"--output_dir={run}", "--agent=walkthrough"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["all"]["success"] == 1.0 and summary["games_hash"] and summary["versions"]["alfworld"]
    collect = ["text", "triplets", f"--data={games}", f"--output_dir={data}", "--agent=random", "--max_steps=6"]
    assert cli.main([*collect, "--rollouts=1", "--val=0.3"]) == 0
    assert {p.name for p in data.iterdir()} == {"train.parquet", "val.parquet", "card.json"}
    out = tmp_path / "tau.json"
    assert cli.main(["text", "calibrate-threshold", f"--triplets={data}", "--pairs=20", f"--output={out}"]) == 0
    assert "proposal" in json.loads(out.read_text())
    capsys.readouterr()
    assert cli.main(["text", "games", f"--output_dir={games}"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_language_model_plays_and_what_went_wrong_with_its_replies_is_counted(tiny_model, games_folder, tmp_path):
    argv = ["text", "play", f"--data={games_folder}", "--limit=1", "--agent=model", f"--output_dir={tmp_path}"]
    argv += ["--max_steps=2"]
    assert cli.main([*argv, f"--model.path={tiny_model}", "--model.max_new_tokens=4"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["all"]["actions"], summary["malformed_replies"]) == (2, 2)
    assert summary["model"] == str(tiny_model) and 0 <= summary["cut_replies"] <= 2


def test_triplets_of_a_policy_are_of_its_own_conversations_and_repeat_with_their_seed(
    tiny_model, games_folder, tmp_path, capsys
):
    argv = ["text", "triplets", f"--data={games_folder}", "--limit=2", "--agent=policy", "--rollouts=2", "--max_steps=3"]
    argv += [f"--model.path={tiny_model}", "--model.max_new_tokens=4", "--val=0.5"]
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert cli.main([*argv, f"--seed={seed}", f"--output_dir={tmp_path / name}"]) == 0
        card = json.loads((tmp_path / name / "card.json").read_text())
        digests.append(card["splits"]["train"]["digest"] + card["splits"]["val"]["digest"])
    assert card["source"]["triplets_before"] == 2 * 2 * 3 and card["source"]["model"] == str(tiny_model)
    assert card["source"]["episode_malformed"] == 1.0 and digests[0] == digests[1] != digests[2]


def test_a_prompt_that_does_not_fit_is_one_clear_line(tiny_model, games_folder, tmp_path, capsys):
    argv = ["text", "play", f"--data={games_folder}", "--limit=1", "--agent=model", f"--output_dir={tmp_path / 'run'}"]
    assert cli.main([*argv, f"--model.path={tiny_model}", "--model.max_prompt_tokens=9"]) == 2
    assert "exceeds the limit of 9" in capsys.readouterr().err


def test_a_replay_in_parts_is_the_replay_in_one(tmp_path):
    argv = ["text", "replay", "--domains=telecom", "--split=small", "--every=10", f"--output_dir={tmp_path}"]
    assert cli.main([*argv, "--limit=1"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["complete"] is False
    assert cli.main([*argv, "--resume"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"] and summary["domains"]["telecom"]["tasks"] == summary["planned"] == 2
    assert summary["domains"]["telecom"]["reward_1"] == 2 and summary["domains"]["telecom"]["do_nothing_1"] == 0


def test_triplets_of_tau2_come_from_the_tasks_own_actions_with_tools_masked(tmp_path):
    argv = ["text", "triplets", "--env=tau2", "--agent=walkthrough", "--domains=retail", "--limit=3", "--val=0.3"]
    assert cli.main([*argv, f"--output_dir={tmp_path / 'triplets'}"]) == 0
    card = json.loads((tmp_path / "triplets" / "card.json").read_text())
    assert card["source"]["env"] == "tau2" and card["source"]["tasks"] == 3
    assert set(card["splits"]["train"]["kinds"]) == {"user", "tool"} and set(card["splits"]["train"]["envs"]) == {"tau2-retail"}


def test_a_limit_of_tau2_tasks_leaves_no_domain_out(monkeypatch, tmp_path):
    from text_agents.rwml import collect

    seen = []
    monkeypatch.setattr(collect, "of_tau2", lambda task: seen.append(task.domain) or [])
    argv = ["text", "triplets", "--env=tau2", "--agent=walkthrough", "--limit=6", f"--output_dir={tmp_path / 'triplets'}"]
    assert cli.main(argv) == 2  # stubbed: nothing to split
    assert len(seen) == 6 and set(seen) == {"retail", "airline", "telecom"}
