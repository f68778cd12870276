"""Settings of AutoResearch tried without a sandbox: a stand-in fitted to what finished `real` runs executed.

    OMP_NUM_THREADS=1 python benchmarks/research_surrogate.py judge --runs=outputs/research_ablation
    OMP_NUM_THREADS=1 python benchmarks/research_surrogate.py train --runs=outputs/research_ablation --seeds=10,11,12 \\
        --arm=wmrl --steps=10 [--anchors.minimum=1 ...]

Both replay the runs `real_*` of an ablation (benchmarks/research_ablation.py) from its memory: training tasks alone.
`judge`: how the world model's rewards of trajectories go with the sandbox's within their group, by updates: a model of the
past of other tasks, of all past, and of all past and two groups of every earlier update. `train`: `research train` where a
forest a task answers for the sandbox (a program that ran in a replayed run has its own outcome); a line a seed with the
reward and percentile on the training tasks after the last update. To choose by: it says nothing of held-out tasks."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from text_agents.autoresearch import judges, train
from text_agents.autoresearch.execute import Executed, brief
from text_agents.autoresearch.fidelity import cases_of, read_rows
from text_agents.autoresearch.outcomes import OutcomeModel
from text_agents.autoresearch.rollouts import Judged, SpecRollout, Verdict
from text_agents.autoresearch.sandbox import Limits
from text_agents.autoresearch.train_config import ResearchTrainConfig
from vla_wmrl import arguments
from vla_wmrl.errors import require
from vla_wmrl.types import Start
from vla_wmrl.world_model.language import LADDER, VALID_FLOOR

CONFIG = "configs/autoresearch.yaml"
BOX = SimpleNamespace(limits=Limits(cpu_s=20, wall_s=600.0))  # the config's; what a memory holds is of the same limits
NAN = float("nan")


def config(arm: str, seed: int, folder: str, argv: Sequence[str]) -> ResearchTrainConfig:
    fixed = [f"--arm={arm}", f"--seed={seed}", f"--output_dir={folder}", "--eval.before=false", "--eval.after=false"]
    return arguments.load(ResearchTrainConfig, [f"--config_path={CONFIG}", *fixed, *argv])


def groups_of(runs: Path, seed: int, steps: int) -> tuple[list, list[list[tuple[SpecRollout, ...]]]]:
    """Tasks, and the groups of each update of the run `real_<seed>`, replayed from the memory."""

    def refuse(task, facts, texts, mode, sandbox):
        return [Executed("ungraded", NAN, "", "") for _ in texts]

    with tempfile.TemporaryDirectory() as folder:
        cfg = config("real", seed, folder, [f"--memory={runs / 'outcomes.jsonl'}", f"--steps={steps}"])
        tasks = train.collect_tasks(cfg)
        judges.execute, kept = refuse, judges.execute
        run = train.Run(cfg, tasks, BOX)
        size, found = cfg.grpo.group_size, []
        after = run.after

        def collect(step, metrics):
            after(step, metrics)
            found.append([tuple(run.loop.executed[i : i + size]) for i in range(0, len(run.loop.executed), size)])

        run.after = collect
        run.run()
        run.close()
        judges.execute = kept
    graded = [np.isfinite(v.reward) for update in found for g in update for r in g for v in r.verdicts]
    require(np.mean(graded) > 0.9, f"{runs / 'outcomes.jsonl'} lacks programs of real_{seed}: it is of another run or machine")
    return tasks.all, found


def outcomes(tasks, updates) -> dict[tuple[str, str], Verdict]:
    return {
        (tasks[r.start.task_id].name, text): verdict
        for update in updates for group in update for r in group
        for text, verdict in zip(r.texts, r.verdicts, strict=True) if verdict.status != "ungraded"
    }  # fmt: skip


def features(text: str) -> dict[str, float]:
    """Choices of a specification, and the pairs of them that decide whether it runs."""
    spec = json.loads(text)
    params, model = spec.pop("params"), spec["model"]
    found = {f"{name}={value}": 1.0 for name, value in spec.items()}
    found |= {f"{model}.{name}={value}": 1.0 for name, value in params.items()}
    found |= {name: float(v) if isinstance(v, int | float) else -1.0 for name, v in params.items()}
    return found | {f"{model} {name}={spec[name]}": 1.0 for name in ("encode", "impute", "output")}


class StandIn:
    """In the place of `SandboxJudge`. `seconds`: as predicted for programs that never ran."""

    def __init__(self, known: dict[tuple[str, str], Verdict]):
        from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
        from sklearn.feature_extraction import DictVectorizer

        self.known, self.models = dict(known), {}
        self.seconds, self.asked, self.ran = 0.0, 0, 0
        for name in {task for task, _ in known}:
            own = [(text, v) for (task, text), v in known.items() if task == name]
            vectors = DictVectorizer(sparse=False)
            X = vectors.fit_transform([features(text) for text, _ in own])
            valid = np.array([v.status == "valid" for _, v in own])
            status = ExtraTreesClassifier(60, random_state=0).fit(X, [v.status for _, v in own])
            rank = ExtraTreesRegressor(60, random_state=0).fit(X[valid], [v.rank for _, v in own if v.status == "valid"])
            seconds = ExtraTreesRegressor(30, random_state=0).fit(X, np.log([v.seconds + 0.01 for _, v in own]))
            self.models[name] = (vectors, status, rank, seconds)

    def __call__(self, tasks, texts, keys) -> list[Verdict]:
        new: dict[str, list[str]] = {}
        for pair in dict.fromkeys(zip((t.name for t in tasks), texts, strict=True)):
            if pair not in self.known:
                new.setdefault(pair[0], []).append(pair[1])
        for name, programs in new.items():
            vectors, status, rank, seconds = self.models[name]
            X = vectors.transform([features(text) for text in programs])
            answers = zip(programs, status.predict(X), rank.predict(X), np.exp(seconds.predict(X)), strict=True)
            for text, said, place, spent in answers:
                valid = said == "valid"
                reward = VALID_FLOOR + (1 - VALID_FLOOR) * place if valid else LADDER[str(said)]
                self.known[name, text] = Verdict(str(said), float(reward), float(place) if valid else NAN, float(spent))
        found = [self.known[t.name, text] for t, text in zip(tasks, texts, strict=True)]
        self.seconds, self.asked = self.seconds + sum(v.seconds for v in found), self.asked + len(found)
        return found

    def close(self) -> None:
        pass


def train_in(stand_in: StandIn, arm: str, seed: int, argv: Sequence[str]) -> dict:
    """One run; its last policy on eight trajectories of each training task."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = config(arm, seed, folder, argv)
        tasks = train.collect_tasks(cfg)
        train.SandboxJudge, kept = lambda *_: stand_in, train.SandboxJudge
        run = train.Run(cfg, tasks, BOX)
        train.SandboxJudge = kept
        run.run()
        starts = [Start(task_id=t.number, init_id=0) for t in tasks.training]
        judged = [r for group in run.real.groups(starts, 8, (0xE7A1, seed)) for r in group]
        spent = run.loop.ledger.metrics().get("worker_time/sandbox_anchors_s", 0.0)
        run.close()
    reward, percentile = (float(np.mean([getattr(r, name) for r in judged])) for name in ("reward", "percentile"))
    return {"arm": arm, "seed": seed, "reward": reward, "percentile": percentile, "sandbox_s": spent}


def judgements(tasks, updates, past) -> Iterator[dict]:
    """A row a world model and a third of the updates: correlation and slope of real on predicted rewards within groups."""
    known = outcomes(tasks, updates)
    fresh = judges.PastOutcomes(past, [t.name for t in tasks if not t.held_out], 4, "forest")
    judge = judges.WorldJudge(fresh, brief(BOX.limits))
    by_name = {t.name: t for t in tasks}
    cases = {pair: judge.case(by_name[pair[0]], pair[1]) for pair in known}
    whole = OutcomeModel("forest").fit(cases_of(past), past["status"].tolist(), past["reward"].tolist())
    for first in range(0, len(updates), 3):
        some = updates[first : first + 3]
        seen = outcomes(tasks, [update[:2] for update in updates[:first]])
        learnt = OutcomeModel("forest").fit(
            cases_of(past) + [cases[pair] for pair in seen],
            past["status"].tolist() + [v.status for v in seen.values()],
            past["reward"].tolist() + [v.reward for v in seen.values()],
        )
        for name, model in (("other tasks", fresh), ("all past", whole), ("and anchors", learnt)):
            pairs = list(outcomes(tasks, some))
            said = dict(zip(pairs, model.predict([cases[pair] for pair in pairs]), strict=True))
            x, y = [], []
            for group in (g for update in some for g in update):
                task = tasks[group[0].start.task_id].name
                group = [r for r in group if all((task, text) in said for text in r.texts)]
                verdicts = [[Verdict("valid", NAN, NAN, chances=tuple(said[task, t].chances)) for t in r.texts] for r in group]
                predicted = np.array([Judged.best_of(v, r.texts) for v, r in zip(verdicts, group, strict=True)])
                real = np.array([r.reward for r in group])
                x += list(predicted - predicted.mean())
                y += list(real - real.mean())
            x, y = np.array(x), np.array(y)
            moments = {"correlation": x @ y / np.sqrt(x @ x * (y @ y)), "slope": x @ y / (x @ x)}
            yield {"updates": f"{first + 1} to {first + len(some)}", "world model": name, **moments}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("judge", "train"))
    parser.add_argument("--runs", default="outputs/research_ablation")
    parser.add_argument("--real", default="0,1", help="seeds of the runs real_* that are replayed")
    parser.add_argument("--real_steps", type=int, default=10, help="their updates")
    parser.add_argument("--seeds", default="10", help="train: of the runs in the stand-in")
    parser.add_argument("--arm", default="wmrl")
    args, extra = parser.parse_known_args()
    replayed = [groups_of(Path(args.runs), seed, args.real_steps) for seed in map(int, args.real.split(","))]
    if args.what == "train":
        known = {pair: v for tasks, updates in replayed for pair, v in outcomes(tasks, updates).items()}
        for seed in map(int, args.seeds.split(",")):
            print(json.dumps(train_in(StandIn(known), args.arm, seed, extra)), flush=True)
        return
    past = read_rows("results/autoresearch/fidelity.jsonl.gz")
    past = past[~past["held_out"]].reset_index(drop=True)
    for seed, (tasks, updates) in zip(args.real.split(","), replayed, strict=True):
        for row in judgements(tasks, updates, past):
            print(json.dumps({"real": int(seed)} | row), flush=True)


if __name__ == "__main__":
    main()
