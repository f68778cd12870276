"""A language model as world model: it reads a program and says how its execution would end (WMRL 2.6). Model-agnostic.

The prompt holds the task, its data, a brief of the sandbox and the numbered program; the answer is strict JSON with
the two most likely outcomes of different status. Beyond the papers, the reward is the *expected* one over the
predicted distribution (confidences, or log-probabilities where the model gives them) in place of seven atoms, so that
a calibration has something to work on; the papers' reward, of the first outcome alone, is `reward_top`.

Non-obvious behaviour
* Code that does not compile never reaches the model: its outcome is known (the compile gate).
* Broken JSON is counted and asked for once more, then the prediction is missing (None): never a reward of 0 or 0.1.
* A prompt beyond the model's context loses its data inventory, then its description; if it is still too long it is
  missing.
* The feedback shown to the agent comes from the *second* outcome, so that it is no copy of what the reward was made of.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

Status = Literal["malformed", "runtime_error", "no_submission", "valid", "ungraded"]
STATUSES: tuple[Status, ...] = ("malformed", "runtime_error", "no_submission", "valid")
LADDER = {"malformed": 0.0, "runtime_error": 0.1, "no_submission": 0.2}  # rewards of what is not valid
VALID_FLOOR = 0.5  # a valid submission is worth this and half its HumanRank on top
BUCKETS = ("low", "fair", "mid", "high")
CUTS = (0.1, 0.3, 0.6)  # of HumanRank, between the buckets
BUCKET_RANKS = np.array([0.05, 0.20, 0.45, 0.75])  # the HumanRank that a bucket stands for
REWARDS = np.array([0.0, 0.1, 0.2, *(VALID_FLOOR + (1 - VALID_FLOOR) * BUCKET_RANKS)])  # what a prediction can come to, rising
MAX_TASK_CHARS, MAX_CODE_CHARS, MAX_FEEDBACK, MAX_REASON = 4000, 8000, 420, 300

SCHEMA = {
    "type": "object",
    "properties": {
        "reason": {"type": "string", "maxLength": MAX_REASON},
        "predictions": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "status": {"enum": list(STATUSES)},
                    "error_type": {"type": ["string", "null"]},
                    "error_line": {"type": ["integer", "null"]},
                    "quality_bucket": {"enum": [*BUCKETS, None]},
                    "env_feedback": {"type": "string", "maxLength": MAX_FEEDBACK},
                    "confidence": {"type": "number", "minimum": 0, "maximum": 1},
                },
                "required": ["status", "error_type", "error_line", "quality_bucket", "env_feedback", "confidence"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["reason", "predictions"],
    "additionalProperties": False,
}


def consistent(name: str, values: Sequence, item: dict, before: Sequence[dict]) -> Sequence:
    """Values of a field that SCHEMA allows and `parse_prediction` accepts: statuses differ, and only valid ones have quality.

    item: the outcome's fields so far; before: the outcomes before it. For backends with constrained decoding."""
    if name == "status":
        return [v for v in values if v not in {outcome["status"] for outcome in before}]
    if name == "quality_bucket":
        return [v for v in values if (v is None) == (item["status"] != "valid")]
    return values


class BrokenPrediction(Exception):
    """The model's text is no prediction; the message says why."""


@dataclass(frozen=True)
class Case:
    """What the world model is told: the task's text and data inventory, the sandbox's brief, the program, and perhaps a
    report of a data analysis that was really run."""

    task: str
    description: str
    inventory: str
    brief: str
    code: str
    report: str = ""


@dataclass(frozen=True)
class Outcome:
    """One predicted end of an execution. `error_line` counts from 1; `bucket` is None unless the status is "valid"."""

    status: Status
    error_type: str | None
    error_line: int | None
    bucket: str | None
    feedback: str
    confidence: float


@dataclass(frozen=True)
class Prediction:
    """Outcomes, most likely first, and the distribution behind the reward: p_status [4], p_bucket [4] (given valid)."""

    outcomes: tuple[Outcome, ...]
    p_status: np.ndarray
    p_bucket: np.ndarray

    @property
    def reward(self) -> float:
        """Expected reward on the ladder, in [0, 1]."""
        return float(self.p_status @ ladder_values(self.p_bucket))

    @property
    def chances(self) -> np.ndarray:
        """How likely each of `REWARDS` is [7]: statuses that are not valid, then the buckets of a valid one."""
        return np.concatenate([self.p_status[:3], self.p_status[3] * self.p_bucket])

    @property
    def reward_top(self) -> float:
        """The papers' reward: of the first outcome alone, one of seven values."""
        first = self.outcomes[0]
        if first.status != "valid":
            return LADDER[first.status]
        return VALID_FLOOR + (1 - VALID_FLOOR) * float(BUCKET_RANKS[BUCKETS.index(first.bucket or "fair")])

    @property
    def feedback(self) -> str:
        return self.outcomes[-1].feedback


class LanguageModel(Protocol):
    """What a backend has to do. `generate` may ignore the schema (then more answers are broken)."""

    def generate(self, prompts: Sequence[str], schema: dict, max_tokens: int) -> list[str]: ...


class ScoringModel(LanguageModel, Protocol):
    """A backend that also gives log-probabilities [n, k] (up to a constant) of k `choices` after each of n prompts."""

    def choice_logprobs(self, prompts: Sequence[str], choices: Sequence[str]) -> np.ndarray: ...


def ladder_values(p_bucket: np.ndarray) -> np.ndarray:
    """Reward [4] of each status, the valid one by the expected HumanRank of p_bucket [4]."""
    return np.array([*LADDER.values(), VALID_FLOOR + (1 - VALID_FLOOR) * float(p_bucket @ BUCKET_RANKS)])


def bucket_of(rank: float) -> str:
    """The bucket of a HumanRank in [0, 1]."""
    return BUCKETS[int(np.searchsorted(CUTS, rank, side="right"))]


def compile_gate(code: str) -> Outcome | None:
    """The certain outcome of code that does not compile, or is empty; None where it does. Runs nothing."""
    if not code.strip():
        return Outcome("malformed", "EmptyProgram", None, None, "The program is empty.", 1.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "solution.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        return Outcome("malformed", type(error).__name__, error.lineno, None, f"{where}{error.msg}"[:MAX_FEEDBACK], 1.0)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:  # null bytes, nesting without end
        return Outcome("malformed", type(error).__name__, None, None, str(error)[:MAX_FEEDBACK], 1.0)
    return None


def certain(outcome: Outcome) -> Prediction:
    """The prediction that is sure of one outcome."""
    bucket = np.eye(4)[BUCKETS.index(outcome.bucket)] if outcome.bucket else np.full(4, 0.25)
    return Prediction((outcome,), np.eye(4)[STATUSES.index(outcome.status)], bucket)


INSTRUCTIONS = """You simulate a sandbox that runs and grades machine-learning programs. Do not run the program: trace
it. Go through parsing, running, submitting and scoring in this order; follow column names, types and shapes line by
line. Most programs that look plausible fail somewhere, so look for the line that fails before you judge quality.
Statuses: malformed (does not parse), runtime_error (raises, or exceeds a limit), no_submission (ends without a
submission the grader accepts), valid. Quality of a valid one against the leaderboard: low (bottom tenth), fair (up to
30 %), mid (up to 60 %), high; high is rare and needs a fitting model family, tuning and no bug. Answer with JSON
alone: {"reason": at most 300 characters, "predictions": [two outcomes of different status, likelier first]}, each
outcome {"status", "error_type" or null, "error_line" or null, "quality_bucket" or null, "env_feedback": what the
sandbox would print, at most 420 characters, without invented scores, "confidence": 0 to 1}."""
AGAIN = "\nYour last answer could not be read ({why}). Answer again, with the JSON object alone.\n"


def numbered(code: str, limit: int = MAX_CODE_CHARS) -> str:
    """The program with line numbers, cut in the middle beyond `limit` characters."""
    lines = [f"{i:4d}  {line}" for i, line in enumerate(code.splitlines(), 1)]
    text = "\n".join(lines)
    if len(text) <= limit:
        return text
    head, tail, size = [], [], 40
    while lines and size < limit:
        part = lines.pop(0) if len(head) <= len(tail) else lines.pop()
        (head if len(head) <= len(tail) else tail).append(part)
        size += len(part) + 1
    if size > limit:
        (head if len(head) > len(tail) else tail).pop()
    return "\n".join([*head, f"      ... {len(lines)} lines left out ...", *reversed(tail)])[:limit]


def build_prompt(case: Case, *, description: bool = True, inventory: bool = True) -> str:
    """The prompt of one case; the two parts that may be left out where the context is short."""
    half = MAX_TASK_CHARS // 2
    parts = [INSTRUCTIONS, f"\n## Sandbox\n{case.brief}", f"\n## Task {case.task}"]
    parts += [case.description[:half]] if description else []
    parts += [f"\n## Data\n{case.inventory[:half]}"] if inventory and case.inventory else []
    parts += [f"\n## Verified analysis of the data\n{case.report[:half]}"] if case.report else []
    return "\n".join([*parts, f"\n## Program\n{numbered(case.code)}\n", "## Prediction\n"])


def parse_prediction(text: str) -> Prediction:
    """The prediction in the model's answer. Raises BrokenPrediction where it is not exactly what SCHEMA asks for."""
    try:
        start = text.index("{")
        answer, _ = json.JSONDecoder().raw_decode(text, start)
    except ValueError as error:
        raise BrokenPrediction("no JSON object") from error
    items = answer.get("predictions") if isinstance(answer, dict) else None
    if not isinstance(items, list) or len(items) != 2:
        raise BrokenPrediction("predictions must be a list of two")
    outcomes = tuple(_outcome(item) for item in items)
    if outcomes[0].status == outcomes[1].status:
        raise BrokenPrediction(f"both predictions have the status {outcomes[0].status}")
    if outcomes[0].confidence < outcomes[1].confidence:
        outcomes = outcomes[::-1]
    return Prediction(outcomes, status_distribution(outcomes), bucket_distribution(outcomes))


def _outcome(item: object) -> Outcome:
    if not isinstance(item, dict):
        raise BrokenPrediction("a prediction must be an object")
    missing = [name for name in SCHEMA["properties"]["predictions"]["items"]["required"] if name not in item]
    if missing:
        raise BrokenPrediction(f"a prediction lacks {', '.join(missing)}")
    status, bucket, confidence = item["status"], item["quality_bucket"], item["confidence"]
    if status not in STATUSES:
        raise BrokenPrediction(f"unknown status {status!r}")
    if bucket not in (*BUCKETS, None) or (status == "valid" and bucket is None):
        raise BrokenPrediction(f"quality_bucket {bucket!r} for status {status}")
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
        raise BrokenPrediction(f"confidence {confidence!r} is no number in 0..1")
    line = item["error_line"]
    if line is not None and (isinstance(line, bool) or not isinstance(line, int) or line < 1):
        raise BrokenPrediction(f"error_line {line!r} is no line")
    for name in ("error_type", "env_feedback"):
        if not isinstance(item[name], str) and not (name == "error_type" and item[name] is None):
            raise BrokenPrediction(f"{name} must be text")
    kept = bucket if status == "valid" else None
    return Outcome(status, item["error_type"], line, kept, item["env_feedback"][:MAX_FEEDBACK], float(confidence))


def status_distribution(outcomes: Sequence[Outcome]) -> np.ndarray:
    """P(status) [4] from confidences; what they leave of 1 is spread over the statuses that were not named."""
    p = np.zeros(4)
    for outcome in outcomes:
        p[STATUSES.index(outcome.status)] = outcome.confidence
    if p.sum() >= 1 or not (p == 0).any():
        return p / p.sum()
    named = [STATUSES.index(o.status) for o in outcomes]
    others = np.array([i not in named for i in range(4)])
    return p + others * (1 - p.sum()) / others.sum()


def bucket_distribution(outcomes: Sequence[Outcome]) -> np.ndarray:
    """P(bucket | valid) [4]: the named one, or all alike where no outcome is valid."""
    named = [o.bucket for o in outcomes if o.bucket]
    return np.eye(4)[BUCKETS.index(named[0])] if named else np.full(4, 0.25)


class LanguageWorldModel:
    """Predictions of a language model for cases. `counts_`: gated, asked, broken, retried, too_long, missing."""

    def __init__(self, model: LanguageModel, *, retries: int = 1, max_tokens: int = 1024):
        """model: a backend; if it has `context_tokens` and `count_tokens(text)`, prompts are kept within them.

        retries: times a broken answer is asked for again. max_tokens: of an answer.
        """
        self.model, self.retries, self.max_tokens = model, retries, max_tokens
        self.counts_: Counter[str] = Counter()

    def predict(self, cases: Sequence[Case]) -> list[Prediction | None]:
        """A prediction a case, None where it is missing."""
        results: list[Prediction | None] = [None] * len(cases)
        waiting: dict[int, str] = {}
        for i, case in enumerate(cases):
            known = compile_gate(case.code)
            if known:
                results[i] = certain(known)
                self.counts_["gated"] += 1
            elif (prompt := self._fitting(case)) is None:
                self.counts_["too_long"] += 1
            else:
                waiting[i] = prompt
        prompts, tries = dict(waiting), 0
        while waiting and tries <= self.retries:
            self.counts_["retried" if tries else "asked"] += len(waiting)
            answers = self.model.generate(list(waiting.values()), SCHEMA, self.max_tokens)
            again: dict[int, str] = {}
            for i, answer in zip(list(waiting), answers, strict=True):
                try:
                    results[i] = parse_prediction(answer)
                except BrokenPrediction as error:
                    self.counts_["broken"] += 1
                    again[i] = prompts[i] + AGAIN.format(why=error)
            waiting, tries = again, tries + 1
        self.counts_["missing"] += sum(r is None for r in results)
        self._by_log_probabilities(prompts, results)
        return results

    def _fitting(self, case: Case) -> str | None:
        """The fullest prompt that leaves room for an answer and a reminder; None where none does."""
        limit = getattr(self.model, "context_tokens", None)
        for description, inventory in ((True, True), (True, False), (False, False)):
            prompt = build_prompt(case, description=description, inventory=inventory)
            if limit is None or self.model.count_tokens(prompt) + 64 + self.max_tokens <= limit:
                return prompt
        return None

    def _by_log_probabilities(self, prompts: dict[int, str], results: list[Prediction | None]) -> None:
        """Replace confidences by the model's own probabilities of statuses and buckets, where it gives them."""
        score = getattr(self.model, "choice_logprobs", None)
        rows = [i for i in prompts if results[i] is not None]
        if score is None or not rows:
            return
        status = _softmax(score([prompts[i] + '{"status": "' for i in rows], STATUSES))
        bucket = _softmax(score([prompts[i] + '{"status": "valid", "quality_bucket": "' for i in rows], BUCKETS))
        for i, p_status, p_bucket in zip(rows, status, bucket, strict=True):
            results[i] = replace(results[i], p_status=p_status, p_bucket=p_bucket)


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
