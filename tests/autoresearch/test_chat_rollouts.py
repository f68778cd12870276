"""A chat model that trains on AutoResearch: what it wrote carries gradient, what it read does not; any loop trains it."""

import json

import numpy as np
import pytest
import torch

from text_agents.autoresearch import train
from text_agents.autoresearch.chat_rollouts import roll_chat
from text_agents.autoresearch.outcomes import prediction_of
from text_agents.autoresearch.rollouts import Verdict, prepare
from text_agents.autoresearch.sandbox import Limits
from text_agents.autoresearch.tasks import load_task
from text_agents.autoresearch.train_config import ResearchTrainConfig
from text_agents.language_policy import LanguagePolicy
from vla_wmrl import arguments, checkpoint, cli
from vla_wmrl.errors import UserError
from vla_wmrl.tracking import read_jsonl
from vla_wmrl.types import Start

LENGTHS = {"max_new_tokens": 12, "max_prompt_tokens": 6000}


@pytest.fixture(scope="module")
def policy(tiny_long_model):
    return LanguagePolicy.from_pretrained(str(tiny_long_model))


@pytest.fixture
def tasks(make_task):
    return prepare([load_task(make_task("first")), load_task(make_task("second"))], [False, True], "code")


def judged(tasks, texts, keys):
    """A stand-in for the sandbox: the length of a reply decides."""
    ranks = [(len(text) % 10) / 10 for text in texts]
    return [Verdict("valid", 0.5 + r / 2, r, 1.0, f"rank {r}") for r in ranks]


def go(policy, tasks, judge=judged, turns=2, **more):
    starts = [Start(0, 5), Start(1, 6)]
    options = {"mode": "code", "limits": Limits(), **LENGTHS, **more}
    return roll_chat(policy, tasks, starts, 3, (1, 2), judge, turns, "real", **options)


def test_replies_carry_gradient_and_tasks_and_observations_do_not(policy, tasks):
    for rollout in [r for group in go(policy, tasks) for r in group]:
        said = [policy.chat.decode(rollout.token_ids[rollout.policy_mask & (rollout.turn_id == t)]) for t in (0, 1)]
        assert said == list(rollout.texts)
        read = policy.chat.decode(rollout.token_ids[~rollout.policy_mask])
        assert "fenced block" in read and f"[valid] {rollout.verdicts[0].feedback}" in read
        assert rollout.reward == max(v.reward for v in rollout.verdicts) and rollout.steps == 2 and rollout.success


def test_a_trajectory_depends_on_its_key_alone_and_twins_part_where_they_are_told_otherwise(policy, tasks):
    fails = lambda tasks, texts, keys: [Verdict("runtime_error", 0.1, float("nan"), feedback="x" * 40)] * len(texts)  # noqa: E731
    real, apart, twin = go(policy, tasks), go(policy, tasks, batch=1), go(policy, tasks, fails)
    assert [[r.texts for r in g] for g in real] == [[r.texts for r in g] for g in apart]
    assert [[r.texts[0] for r in g] for g in real] == [[r.texts[0] for r in g] for g in twin]
    assert [[r.texts[1] for r in g] for g in real] != [[r.texts[1] for r in g] for g in twin]
    assert twin[0][0].percentile == 0.0 and not twin[0][0].success


def test_what_nobody_graded_is_absent_and_a_conversation_ends_at_the_limit(policy, tasks):
    nobody = lambda tasks, texts, keys: [Verdict("ungraded", float("nan"), float("nan"))] * len(texts)  # noqa: E731
    rollout = go(policy, tasks, nobody)[0][0]
    assert rollout.reward is None and not rollout.valid and np.isnan(train.reward_of(rollout)) and np.isnan(rollout.percentile)
    n = len(go(policy, tasks, turns=1)[0][0].token_ids)
    short = go(policy, tasks, max_prompt_tokens=n + 5)[0][0]
    assert short.stop_reason == "token_limit" and short.steps == 1 and short.valid
    with pytest.raises(UserError, match="task first has a prompt of"):
        go(policy, tasks, max_prompt_tokens=50)


class Coarse:
    """A world model that likes some programs."""

    def predict(self, cases):
        good = [len(case.code) % 2 for case in cases]
        return [prediction_of(np.array([0.0, 0.2 + 0.6 * g, 0.0, 0.8 - 0.6 * g]), np.full(4, 0.25)) for g in good]


@pytest.fixture
def run(tasks, tmp_path, monkeypatch, tiny_long_model):
    class Judge:
        def __init__(self, sandbox, memory, mode):
            assert mode == "code"
            self.seconds, self.asked, self.ran = 0.0, 0, 0

        def __call__(self, tasks, texts, keys):
            return judged(tasks, texts, keys)

        def close(self):
            pass

    monkeypatch.setattr(train, "SandboxJudge", Judge)
    monkeypatch.setattr(train, "make_predictor", lambda cfg, tasks: Coarse())

    class Box:
        limits = Limits()

    def go(name, *argv):
        sizes = ["--grpo.n_groups=3", "--grpo.group_size=3", "--turns=2", "--save_every=1", "--eval.episodes=2"]
        sizes += ["--debias.min_pairs=3", "--fusion.min_groups=1", "--chat.model.max_new_tokens=8", "--grpo.lr=0.001"]
        chat = ["--policy.kind=chat", f"--chat.model.path={tiny_long_model}", "--chat.model.max_prompt_tokens=6000"]
        cfg = arguments.load(ResearchTrainConfig, [f"--output_dir={tmp_path / name}", *sizes, *chat, *argv])
        made = train.Run(cfg, train.Tasks(tasks, tasks[:1], tasks[1:]), Box())
        made.run()
        made.close()
        return tmp_path / name

    return go


def test_a_chat_model_trains_in_the_loop_resumes_and_is_found_again(run):
    whole = run("whole", "--steps=3", "--eval.before=false", "--chat.lora.rank=2")
    rows = read_jsonl(whole / "metrics.jsonl")
    assert [r["anchors/groups"] for r in rows] == [1, 1, 1] and rows[1]["loss/skipped"] == 0
    assert rows[1]["loss/log_ratio_abs_max"] < 1e-3 and rows[1]["loss/looks"] > 9
    run("parts", "--steps=1", "--eval.before=false", "--chat.lora.rank=2")
    parts = run("parts", "--steps=3", "--eval.before=false", "--chat.lora.rank=2", "--resume=true")
    a, b = (checkpoint.load(checkpoint.latest(f))["loop"]["learner"]["weights"] for f in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)
    after = read_jsonl(whole / "eval_after.jsonl")
    assert len(after) == 2 and len(after[0]["texts"]) == 2
    assert "adapter_config.json" in {p.name for p in (whole / "policy").iterdir()}
    again = run("again", "--steps=1", "--eval.before=false", "--arm=real", f"--policy.path={whole / 'policy'}")
    assert json.loads((again / "ledger.json").read_text())["steps/real_anchors"] == 3 * 3 * 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policy.kind=chat", "--anchors.lag=1"], "cannot be late"),
        (["--policy.kind=chat", "--chat.model.temperature=0"], "temperature"),
        (["--policy.kind=chat", "--chat.mode=prose"], "prose"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["research", "train", "--output_dir=x", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not list(tmp_path.iterdir())
