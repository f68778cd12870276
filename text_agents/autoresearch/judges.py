"""The two judges of specifications: the real sandbox, with a memory of what it has run, and a world model.

What the sandbox costs is counted by what is *asked* of it: a program whose outcome is remembered from earlier (in this
run, or in another one that shares the file) counts the computing seconds that it took when it really ran. So arms
that share a memory cost on paper what they would cost alone, and a busy machine does not change the count."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd

from text_agents.autoresearch.execute import Mode, execute, to_code
from text_agents.autoresearch.fidelity import cases_of
from text_agents.autoresearch.outcomes import OutcomeModel
from text_agents.autoresearch.rollouts import Judged, ResearchTask, Verdict
from text_agents.autoresearch.sandbox import Sandbox
from vla_wmrl.errors import UserError, require
from vla_wmrl.tracking import JsonLines, read_jsonl
from vla_wmrl.world_model.language import BUCKET_RANKS, STATUSES, Case, Prediction


def task_digest(task: ResearchTask) -> str:
    """What an outcome depends on besides the program: data, answers and boards of the task."""
    digest = hashlib.sha256(task.name.encode())
    for folder in (task.task.public, task.task.private):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def remembered(memory: str | Path) -> dict[str, Verdict]:
    """Outcomes by content, of a file that a judge has written. Raises UserError for one that none has."""
    require(not Path(memory).is_dir(), f"memory {memory} is a folder: name a file")
    known: dict[str, Verdict] = {}
    try:
        for row in read_jsonl(memory):
            rank = float("nan") if row["rank"] is None else row["rank"]
            known[row["key"]] = Verdict(row["status"], row["reward"], rank, row["seconds"], row.get("feedback", ""))
    except (ValueError, KeyError, TypeError) as error:  # bytes that are no text, text that is no JSON, JSON of something else
        raise UserError(f"memory {memory} is no file of sandbox outcomes: name another") from error
    return known


class SandboxJudge:
    """Real outcomes. `seconds`: computing seconds asked for; `asked`, `ran`: programs asked for and really run."""

    def __init__(self, sandbox: Sandbox, memory: str | Path | None = None, mode: Mode = "pipeline"):
        """mode: specifications or whole programs are what is judged.

        memory: JSON-lines file of outcomes by content, read at the start and appended to; None keeps them in memory."""
        self.sandbox, self.mode = sandbox, mode
        self.known: dict[str, Verdict] = {}
        self.file: JsonLines | None = None
        self.digests: dict[str, str] = {}
        self.seconds, self.asked, self.ran = 0.0, 0, 0
        if memory is not None:
            self.known = remembered(memory)
            self.file = JsonLines(memory)

    def key(self, task: ResearchTask, code: str) -> str:
        if task.name not in self.digests:
            self.digests[task.name] = task_digest(task) + json.dumps(asdict(self.sandbox.limits))
        return hashlib.sha256(f"{self.digests[task.name]}\n{code}".encode()).hexdigest()

    def program(self, task: ResearchTask, text: str) -> str:
        """The program of a text; of one that is none, what is wrong with it."""
        code, wrong = to_code(text, self.mode, task.facts)
        return wrong or code

    def __call__(self, tasks: Sequence[ResearchTask], texts: Sequence[str], keys: Sequence[Sequence[int]]) -> list[Verdict]:
        wanted = [self.key(t, self.program(t, text)) for t, text in zip(tasks, texts, strict=True)]
        waiting: dict[str, dict[str, str]] = {}  # task -> key -> text: equal programs run once
        for task, text, key in zip(tasks, texts, wanted, strict=True):
            if key not in self.known:
                waiting.setdefault(task.name, {})[key] = text
        by_name = {t.name: t for t in tasks}
        fresh: dict[str, Verdict] = {}
        for name, programs in waiting.items():
            task = by_name[name]
            for key, done in zip(
                programs, execute(task.task, task.facts, list(programs.values()), self.mode, self.sandbox), strict=True
            ):
                fresh[key] = Verdict(done.status, done.reward, done.rank, done.cpu_s, done.feedback)
                self.ran += 1
                if done.status != "ungraded":  # nobody ran it: the next one who asks gets another try
                    self._remember(key, name, fresh[key])
        verdicts = [self.known.get(key) or fresh[key] for key in wanted]
        self.asked += len(verdicts)
        self.seconds += sum(v.seconds for v in verdicts)
        return verdicts

    def _remember(self, key: str, task: str, verdict: Verdict) -> None:
        self.known[key] = verdict
        if self.file is not None:
            self.file.write({"key": key, "task": task, **asdict(verdict)})

    def close(self) -> None:
        """Close the memory's file; the sandbox belongs to whoever made it."""
        if self.file is not None:
            self.file.close()


Outcomes = dict[tuple[str, str], tuple[str, float]]  # (task, text) -> (status, reward)


class Predictor(Protocol):
    """A world model: a prediction a case, None where it is missing."""

    def predict(self, cases: Sequence[Case]) -> list[Prediction | None]: ...


class WorldJudge:
    """Outcomes that a world model foretells: the expected reward, and a status drawn from the predicted distribution
    for the agent to read (a simulated sandbox answers with one outcome, not with a mixture)."""

    def __init__(
        self, predictor: Predictor, limits_brief: str, reports: Mapping[str, str] | None = None, mode: Mode = "pipeline"
    ):
        """reports: task -> verified analysis of its data, for predictors that read one."""
        self.predictor, self.brief, self.reports, self.mode = predictor, limits_brief, reports or {}, mode
        self.texts: dict[str, tuple[str, str]] = {}  # task -> (description, inventory)
        self.known: dict[tuple[str, str], Prediction | None] = {}
        self.missing = 0
        self.learnt: Outcomes = {}

    def case(self, task: ResearchTask, text: str) -> Case:
        if task.name not in self.texts:
            self.texts[task.name] = (task.task.description, task.task.inventory())
        code = to_code(text, self.mode, task.facts)[0]  # "" for a specification that is none: malformed to every predictor
        return Case(task.name, *self.texts[task.name], self.brief, code, self.reports.get(task.name, ""))

    def __call__(self, tasks: Sequence[ResearchTask], texts: Sequence[str], keys: Sequence[Sequence[int]]) -> list[Verdict]:
        asked = list(zip((t.name for t in tasks), texts, strict=True))
        new = {pair: task for pair, task in zip(asked, tasks, strict=True) if pair not in self.known}
        cases = [self.case(task, text) for (_, text), task in new.items()]
        self.known |= dict(zip(new, self.predictor.predict(cases), strict=True))
        return [self._verdict(self.known[pair], key) for pair, key in zip(asked, keys, strict=True)]

    def grade(self, tasks: Sequence[ResearchTask], group: Sequence[Judged]) -> np.ndarray:
        """Rewards [G] that the world model gives executed trajectories: of each the best of its programs; NaN without one.

        It reads the programs alone, not what became of them: an agent that saw a failure writes another program, but the
        judgement of a program is the same as in an imagined trajectory."""
        found = []
        for rollout in group:
            own = [tasks[rollout.start.task_id]] * len(rollout.texts)
            found.append(Judged.best_of(self(own, rollout.texts, [(0,)] * len(own)), rollout.texts))
        return np.array(found)

    def learn(self, tasks: Sequence[ResearchTask], executed: Sequence[Judged]) -> None:
        """Have the predictor fitted again with what became of executed trajectories; a program counts once.

        Call it after their update: a pair of the calibration is a judgement from before its outcome was seen."""
        found = {
            (tasks[r.start.task_id].name, text): (v.status, v.reward)
            for r in executed
            for text, v in zip(r.texts, r.verdicts, strict=True)
            if v.status != "ungraded"
        }
        if new := {pair: outcome for pair, outcome in found.items() if pair not in self.learnt}:
            self._teach(tasks, new)
            self.known.clear()
        self.learnt |= new

    def state_dict(self) -> dict:
        """What it has learnt: lists of task, text, status, reward."""
        return {"learnt": [[*pair, *outcome] for pair, outcome in self.learnt.items()]}

    def load_state_dict(self, state: dict, tasks: Sequence[ResearchTask]) -> None:
        self.learnt = {(name, text): (status, reward) for name, text, status, reward in state["learnt"]}
        if self.learnt:
            self._teach(tasks, self.learnt)

    def _teach(self, tasks: Sequence[ResearchTask], outcomes: Outcomes) -> None:
        by_name = {t.name: t for t in tasks}
        rows = [asdict(self.case(by_name[n], x)) | {"status": s, "reward": r} for (n, x), (s, r) in outcomes.items()]
        self.predictor.learn(rows)

    def counts(self) -> dict[str, int]:
        """Predictions that are missing, and what a language model's answers were like: asked, broken, retried, too long."""
        return {**getattr(self.predictor, "counts_", {}), "missing": self.missing}

    def _verdict(self, prediction: Prediction | None, key: Sequence[int]) -> Verdict:
        if prediction is None:  # broken or too long: absent, never 0
            self.missing += 1
            return Verdict("ungraded", float("nan"), float("nan"))
        uniform = np.random.default_rng(list(key)).random()
        status = STATUSES[min(int(np.searchsorted(np.cumsum(prediction.p_status), uniform, side="right")), 3)]
        rank = float(prediction.p_bucket @ BUCKET_RANKS) if status == "valid" else float("nan")
        told = next((o.feedback for o in prediction.outcomes if o.status == status), "")
        return Verdict(status, prediction.reward, rank, feedback=told, chances=tuple(prediction.chances.tolist()))


class PastOutcomes:
    """`OutcomeModel`s fitted on past executions. With two folds of the training tasks or more, on those of *other* tasks: the
    task at hand is as new to its world model as it would be to a language model. With one, on all of them. A held-out task
    is new to it either way. Fitted when first asked."""

    def __init__(self, rows: pd.DataFrame, tasks: Sequence[str], folds: int = 4, form: str = "boosting"):
        """rows: of `fidelity.read_rows`, those of `tasks` and of other tasks; held-out tasks' rows must not be among
        them. folds: of the training tasks; a task is predicted by a fit on the other folds."""
        self.rows, self.folds, self.form = rows, folds, form
        self.own: list[dict] = []  # of `learn`
        self.fold = {name: i % folds for i, name in enumerate(sorted(tasks))}
        self.models_: dict[int, OutcomeModel] = {}
        # what the past cost the sandbox: once, for every run that uses it
        self.seconds = float(rows["cpu_s"].sum()) if "cpu_s" in rows.columns else 0.0

    def predict(self, cases: Sequence[Case]) -> list[Prediction | None]:
        found: list[Prediction | None] = [None] * len(cases)
        other = 0 if self.folds == 1 else -1  # a task without rows here is new to all of them
        fold = [self.fold.get(case.task, other) for case in cases]
        for k in dict.fromkeys(fold):
            index = [i for i, f in enumerate(fold) if f == k]
            for i, prediction in zip(index, self._model(k).predict([cases[i] for i in index]), strict=True):
                found[i] = prediction
        return found

    def learn(self, rows: Sequence[dict]) -> None:
        """Executions of the run itself, of any training task (fields of `Case`, status, reward): every model is fitted again
        with all of them when it is next asked."""
        self.own += rows
        self.models_.clear()

    def _model(self, fold: int) -> OutcomeModel:
        if fold not in self.models_:
            rows = self.rows[[self.folds == 1 or self.fold.get(t, -2) != fold for t in self.rows["task"]]]
            rows = pd.concat([rows, pd.DataFrame(self.own)], ignore_index=True) if self.own else rows
            self.models_[fold] = OutcomeModel(self.form).fit(cases_of(rows), rows["status"].tolist(), rows["reward"].tolist())
        return self.models_[fold]
