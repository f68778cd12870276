"""The training path: arms, resume to the same bits, mistakes as one line, and twins that follow the real rollouts."""

import json
import shutil

import numpy as np
import pytest
import torch

from text_agents.autoresearch import train
from text_agents.autoresearch.outcomes import prediction_of
from text_agents.autoresearch.rollouts import Judged, Verdict, prepare, roll
from text_agents.autoresearch.sandbox import INSTALL
from text_agents.autoresearch.spec_policy import SpecPolicy
from text_agents.autoresearch.tasks import load_task
from text_agents.autoresearch.train_config import ResearchTrainConfig
from vla_wmrl import arguments, checkpoint, cli
from vla_wmrl.errors import UserError
from vla_wmrl.tracking import read_jsonl
from vla_wmrl.types import Start

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bubblewrap is not installed: {INSTALL}")


@pytest.fixture
def tasks(make_task):
    found = prepare([load_task(make_task("first")), load_task(make_task("second", metric="auc"))], [False, True])
    return train.Tasks(found, found[:1], found[1:])


def verdict(text):
    """A stand-in for the sandbox: what a specification says decides."""
    spec = json.loads(text)
    if spec["encode"] == "none":
        return Verdict("runtime_error", 0.1, float("nan"), 1.0)
    rank = (len(spec["model"]) % 5) / 5
    return Verdict("valid", 0.5 + 0.5 * rank, rank, 1.0)


def honest(tasks, texts, keys):
    return [verdict(t) for t in texts]


class Coarse:
    """A world model that sees failures and nothing else; once it has learnt, what it was told."""

    def __init__(self):
        self.told = {}

    def learn(self, rows):
        self.told |= {(row["task"], row["code"]): row["reward"] for row in rows}

    def predict(self, cases):
        found = []
        for case in cases:
            fails = '"categorical", "passthrough"' in case.code
            if (case.task, case.code) in self.told:
                fails = self.told[case.task, case.code] < 0.5
            p_status = np.array([0.0, 0.9, 0.0, 0.1]) if fails else np.array([0.0, 0.1, 0.0, 0.9])
            found.append(prediction_of(p_status, np.full(4, 0.25)))
        return found


@pytest.fixture
def run(tasks, tmp_path, monkeypatch):
    """Runs of a tiny config with the stand-in sandbox."""

    class Judge:
        def __init__(self, sandbox, memory, mode):
            self.seconds, self.asked, self.ran = 0.0, 0, 0

        def __call__(self, tasks, texts, keys):
            found = honest(tasks, texts, keys)
            self.seconds += sum(v.seconds for v in found)
            self.asked += len(found)
            return found

        def close(self):
            pass

    monkeypatch.setattr(train, "SandboxJudge", Judge)
    monkeypatch.setattr(train, "make_predictor", lambda cfg, tasks: Coarse())
    monkeypatch.setattr(train, "brief", lambda limits: "brief")

    class Box:
        limits = None

    def go(name, *argv):
        sizes = ["--grpo.n_groups=3", "--grpo.group_size=4", "--turns=2", "--save_every=1", "--eval.episodes=2"]
        sizes += ["--debias.min_pairs=4", "--fusion.min_groups=1", "--policy.width=16"]
        cfg = arguments.load(ResearchTrainConfig, [f"--output_dir={tmp_path / name}", *sizes, *argv])
        made = train.Run(cfg, tasks, Box())
        made.run()
        made.close()
        return tmp_path / name

    return go


@pytest.mark.parametrize("arm", list(ResearchTrainConfig.ARMS))
def test_every_arm_trains_and_counts_what_it_executed(run, arm):
    folder = run(arm, f"--arm={arm}", "--steps=2")
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2] and rows[-1]["loss/looks"] > 0
    per_step = {"real": 3, "wm": 0}.get(arm, 1) * 4 * 2  # groups x members x turns, a second each
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["worker_time/sandbox_anchors_s"] == 2 * per_step
    after = read_jsonl(folder / "eval_after.jsonl")
    assert len(after) == 2 and {r["task"] for r in after} == {"second"} and all(r["held_out"] for r in after)
    assert ledger["worker_time/sandbox_evaluation_s"] == 2 * 2 * 2, "before and after"
    assert (folder / "policy" / "spec_policy.safetensors").is_file()
    page = (folder / "report.html").read_text()
    assert "second" in page and "sandbox: training" in page and "Reward, all groups" in page
    assert ("anchor pairs" in page) == (arm in ("debias", "wmrl"))


@pytest.mark.parametrize(("lag", "learn"), [(0, "false"), (1, "false"), (0, "true")])
def test_a_resumed_run_is_the_same_run(run, lag, learn):
    common = ("--eval.before=false", f"--anchors.lag={lag}", "--grpo.lr=0.01", f"--world_model.learn={learn}")
    whole = run("whole", "--steps=4", *common)
    run("parts", "--steps=2", *common)
    parts = run("parts", "--steps=4", *common, "--resume=true")
    a, b = (checkpoint.load(checkpoint.latest(f))["loop"]["learner"]["weights"] for f in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)
    kept = ["step", "reward/env_mean", "reward/wm_mean", "calib/pairs", "worker_time/sandbox_anchors_s"]
    kept += ["sandbox/asked"] if lag == 0 else []  # late ones are asked for while the row is written
    for first, second in zip(*(read_jsonl(f / "metrics.jsonl") for f in (whole, parts)), strict=True):
        assert [first.get(k) for k in kept] == [second.get(k) for k in kept]


@pytest.mark.parametrize("pairs", ["executed", "twins"])
def test_a_pair_is_one_trajectory_judged_twice_or_two_that_part(run, pairs):
    folder = run(pairs, "--steps=3", "--eval.before=false", f"--anchors.pairs={pairs}", "--turns=3")
    found = checkpoint.load(checkpoint.latest(folder))["loop"]["debias"]["pairs"]
    right = [(x > 0.5) == (y >= 0.5) for x, y in found]  # Coarse is sure enough of what it sees
    assert len(found) == 12 and (all(right) or pairs == "twins"), found


def test_a_pair_is_judged_before_its_outcome_is_learnt(run, monkeypatch):
    """Otherwise the calibration would see a world model that has been told the answers."""
    known = []
    grade = train.Run.grade

    def spy(self, group):
        told = set(self.world.predictor.told)
        known.append({(self.tasks[r.start.task_id].name, self.sandbox_code(r, t)) in told for r in group for t in r.texts})
        return grade(self, group)

    def code(self, rollout, text):
        return self.world.case(self.tasks[rollout.start.task_id], text).code

    monkeypatch.setattr(train.Run, "sandbox_code", code, raising=False)
    monkeypatch.setattr(train.Run, "grade", spy)
    folder = run("learn", "--steps=2", "--eval.before=false", "--world_model.learn=true")
    assert known[0] == {False} and len(known) == 2
    learnt = checkpoint.load(checkpoint.latest(folder))["world"]["learnt"]
    assert len(learnt) > 8 and all(len(row) == 4 for row in learnt), "programs of both updates"


def test_late_anchors_cost_what_was_asked_of_the_sandbox(run):
    folder = run("late", "--steps=3", "--anchors.lag=2", "--eval.before=false")
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [r["anchors/groups"] for r in rows] == [0, 0, 1] and rows[-1]["worker_time/sandbox_anchors_s"] == 8
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["worker_time/sandbox_anchors_s"] == 3 * 8, "the two groups that no update waited for are paid all the same"


def test_twins_begin_as_the_real_rollouts_do(tasks):
    """Same policy, same noise: they differ from where the world model told something else."""
    policy, starts = SpecPolicy(16), [Start(0, 5), Start(0, 6)]
    wrong = lambda tasks, texts, keys: [Verdict("no_submission", 0.2, float("nan"))] * len(texts)  # noqa: E731
    with torch.no_grad():
        policy.net[2].weight.normal_()
    real, same = (roll(policy, tasks.all, starts, 3, (1, 2), honest, 2, "real") for _ in range(2))
    other = roll(policy, tasks.all, starts, 3, (1, 2), wrong, 2, "imagined")
    assert [[r.texts for r in g] for g in real] == [[r.texts for r in g] for g in same]
    assert [[r.texts[0] for r in g] for g in real] == [[r.texts[0] for r in g] for g in other]
    assert [[r.texts[1] for r in g] for g in real] != [[r.texts[1] for r in g] for g in other]
    alone = roll(policy, tasks.all, starts[1:], 3, (1, 2), honest, 2, "real")
    assert [r.texts for r in alone[0]] == [r.texts for r in real[1]], "a group depends on the groups beside it"


def test_a_trajectory_is_worth_its_best_turn_and_an_ungraded_one_is_missing(tasks):
    seen = iter([Verdict("valid", 0.6, 0.2), Verdict("ungraded", float("nan"), float("nan")), Verdict("valid", 0.9, 0.8)])
    [[r]] = roll(SpecPolicy(8), tasks.all, [Start(0, 0)], 1, (0,), lambda *a: [next(seen)], 3, "real")
    assert (r.reward, r.percentile, r.success, r.steps) == (0.9, 80.0, True, 3)
    nobody = lambda *a: [Verdict("ungraded", float("nan"), float("nan"))]  # noqa: E731
    [[r]] = roll(SpecPolicy(8), tasks.all, [Start(0, 0)], 1, (0,), nobody, 2, "real")
    assert np.isnan(r.reward) and np.isnan(r.percentile) and not r.success


def test_second_attempts_count_in_what_a_predicted_trajectory_is_worth():
    """Of two programs that are valid with probability 1/2, the best of the expectations says 0.3125; one is valid with 3/4."""
    chances = (0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0)
    coin = Verdict("valid", 0.5 * 0.1 + 0.5 * 0.525, 0.05, chances=chances)
    assert Judged.best_of([coin], ["a"]) == pytest.approx(0.3125)
    assert Judged.best_of([coin, coin], ["a", "b"]) == pytest.approx(0.25 * 0.1 + 0.75 * 0.525)
    assert Judged.best_of([coin, coin], ["a", "a"]) == pytest.approx(0.3125), "the same program has the same outcome"
    missing = Verdict("ungraded", float("nan"), float("nan"))
    assert Judged.best_of([missing, coin], ["a", "b"]) == pytest.approx(0.3125)
    assert np.isnan(Judged.best_of([missing], ["a"]))
    real = [Verdict("runtime_error", 0.1, float("nan")), Verdict("valid", 0.7, 0.4)]
    assert Judged.best_of(real, ["a", "b"]) == 0.7


def test_starts_depend_on_seed_and_step_and_repeat_no_task_early():
    starts = train.TaskStarts(range(5), 3)
    assert starts.draw(7, 8) == train.TaskStarts(range(5), 3).draw(7, 8) != starts.draw(8, 8)
    assert len({s.task_id for s in starts.draw(7, 8)[:5]}) == 5
    assert len({s.key for s in starts.draw(0, 8) + starts.draw(1, 8)}) == 16


def test_learning_raises_the_reward_of_real_execution(run):
    folder = run("learn", "--arm=real", "--steps=12", "--grpo.n_groups=8", "--grpo.lr=0.01", "--eval.before=false")
    rewards = [r["reward/env_mean"] for r in read_jsonl(folder / "metrics.jsonl")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.02


@needs_bwrap
def test_an_update_runs_in_the_real_sandbox_and_again_from_its_memory(tasks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "collect_tasks", lambda cfg: tasks)
    sizes = ["--grpo.n_groups=2", "--grpo.group_size=2", "--turns=1", "--eval.episodes=1", "--eval.before=false"]
    argv = ["research", "train", "--arm=real", "--steps=1", f"--memory={tmp_path / 'memory.jsonl'}", *sizes]
    assert cli.main([*argv, f"--output_dir={tmp_path / 'run_1'}"]) == 0, capsys.readouterr().err
    assert "second" in capsys.readouterr().out
    known = read_jsonl(tmp_path / "memory.jsonl")
    assert cli.main([*argv, f"--output_dir={tmp_path / 'run_2'}"]) == 0, capsys.readouterr().err
    assert read_jsonl(tmp_path / "memory.jsonl") == known and 2 <= len(known) <= 5
    first, again = (json.loads((tmp_path / name / "ledger.json").read_text()) for name in ("run_1", "run_2"))
    spent = "worker_time/sandbox_anchors_s"
    assert first[spent] == again[spent] > 0, "what is remembered still counts"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--output_dir"),
        (["--output_dir=x", "--arm=rael"], "rael"),
        (["--output_dir=x", "--arm=real", "--world_model.kind=outcomes"], "arm=real fixes world_model.kind"),
        (["--output_dir=x", "--tasks=wine"], "held out"),
        (["--output_dir=x", "--tasks=wines"], "did you mean wine"),
        (["--output_dir=x", "--grpo.group_size=1"], "at least 2"),
        (["--output_dir=x", "--turns=9"], "1..8"),
        (["--output_dir=x", "--anchors.lag=-1"], "anchors.lag=-1 is negative"),
        (["--output_dir=x", "--arm=real", "--anchors.lag=1"], "both sources"),
        (["--output_dir=x", "--anchors.lag=1", "--world_model.learn=true"], "knows more"),
        (["--output_dir=x", "--world_model.kind=language", "--world_model.learn=true"], "trains by `research world`"),
        (["--output_dir=x", "--resume=true"], "nothing to resume"),
        (["--output_dir=x", "--world_model.data=nowhere.jsonl", "--tasks=diabetes", "--eval.tasks=wine"], "no file nowhere"),
        (["--output_dir=x", "--sandbox.cpu=1"], "did you mean sandbox.cpu_s"),
        (["--output_dir=x", "--sandbox.ray_address=auto"], "is for sandbox.pool=ray"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "make_sandbox", lambda *a: __import__("contextlib").nullcontext(None))
    assert cli.main(["research", "train", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not list(tmp_path.iterdir())


def test_the_committed_config_is_valid_and_fixes_nothing_against_its_arm():
    from pathlib import Path

    path = Path(__file__).parents[2] / "configs" / "autoresearch.yaml"
    for arm in ResearchTrainConfig.ARMS:
        cfg = arguments.load(ResearchTrainConfig, [f"--config_path={path}", "--output_dir=x", f"--arm={arm}"])
        assert (cfg.grpo.n_groups, cfg.grpo.group_size, cfg.turns) == (8, 8, 4)
    with pytest.raises(UserError, match="must lie between 0 and 1"):
        arguments.load(ResearchTrainConfig, ["--output_dir=x", "--arm=mix", "--anchors.fraction=1"])
