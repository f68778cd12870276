"""One turn of an agent for real: text to program, the sandbox runs it, the grader grades it, the ladder rewards it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from text_agents.autoresearch import scoring
from text_agents.autoresearch.pipeline import SpecError, code_of, parse
from text_agents.autoresearch.render import Facts, render
from text_agents.autoresearch.sandbox import Limits, Result, Sandbox
from text_agents.autoresearch.tasks import Grade, Task
from vla_wmrl.world_model.language import compile_gate

Mode = Literal["pipeline", "code"]
FEEDBACK_CHARS = 1000
REASONS = {
    "cpu_time": "The program exceeded its {limits.cpu_s} s of computing time.",
    "idle_time": "The program was still waiting after {limits.wall_s:g} s and was stopped.",
    "memory": "The program needed more than {limits.memory_mb} MB of memory.",
}


@dataclass(frozen=True)
class Executed:
    """What became of one text. `reward` is NaN where nobody graded it; times in seconds, 0 where nothing ran."""

    status: scoring.Status
    reward: float
    feedback: str
    code: str
    score: float = float("nan")
    rank: float = float("nan")
    medal: str | None = None
    error_type: str | None = None
    error_line: int | None = None
    sandbox_s: float = 0.0
    cpu_s: float = 0.0


def to_code(text: str, mode: Mode, facts: Facts) -> tuple[str, str]:
    """(program, "") of an agent's text, or ("", what is wrong with it)."""
    if mode == "code":
        return code_of(text), ""
    try:
        return render(parse(text, facts.kind), facts), ""
    except SpecError as error:
        return "", f"The specification is malformed: {error}."


def execute(task: Task, facts: Facts, texts: Sequence[str], mode: Mode, sandbox: Sandbox) -> list[Executed]:
    """Run and grade texts of one task, as many at a time as the sandbox has workers."""
    programs = [to_code(text, mode, facts) for text in texts]
    gates = [compile_gate(code) if code or not wrong else None for code, wrong in programs]
    jobs = [(task.name, code) for (code, wrong), gate in zip(programs, gates, strict=True) if not wrong and gate is None]
    results = iter(sandbox.run_many(jobs))
    found = []
    for (code, wrong), gate in zip(programs, gates, strict=True):
        if wrong or gate is not None:
            kind = ("SpecError", None) if wrong else (gate.error_type, gate.error_line)
            message = wrong or f"{gate.error_type}: {gate.feedback}"
            found.append(
                Executed("malformed", scoring.reward("malformed"), message, code, error_type=kind[0], error_line=kind[1])
            )
        else:
            found.append(judge(task, code, next(results), sandbox.limits))
    return found


def judge(task: Task, code: str, result: Result | None, limits: Limits) -> Executed:
    """The verdict on a program that went to the sandbox."""
    if result is None or result.reason == "busy":
        spent = result.wall_s if result else 0.0
        return Executed("ungraded", float("nan"), "The sandbox was not available.", code, sandbox_s=spent)
    times = {"sandbox_s": result.wall_s, "cpu_s": result.cpu_s}
    if result.reason != "ok":
        kind, line = error_of(result.stderr)
        kind = {"cpu_time": "TimeLimit", "idle_time": "TimeLimit", "memory": "MemoryError"}.get(result.reason, kind)
        reason = REASONS.get(result.reason, "").format(limits=limits)
        text = f"The program failed. {reason}\n{result.stderr[-FEEDBACK_CHARS:]}".strip()
        reward = scoring.reward("runtime_error")
        return Executed("runtime_error", reward, text, code, error_type=kind, error_line=line, **times)
    grade = task.grade(result.submission)
    message = f"Invalid submission: {result.note}" if result.note else grade.message
    return _graded(grade, message, code, times)


def _graded(grade: Grade, message: str, code: str, times: dict[str, float]) -> Executed:
    reward = scoring.reward(grade.status, grade.rank)
    kind = "InvalidSubmission" if grade.status == "no_submission" else None
    return Executed(grade.status, reward, message, code, grade.score, grade.rank, grade.medal, error_type=kind, **times)


def error_of(stderr: str) -> tuple[str | None, int | None]:
    """(exception's name, line of the program it came through last) of a traceback; None where there is none."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith((" ", "\t"))]
    named = [m[1] for line in lines if (m := re.match(r"([A-Za-z_][\w.]*)(?::|$)", line)) and m[1] != "Traceback"]
    at = re.findall(r'File "solution\.py", line (\d+)', stderr)
    return (named[-1].rpartition(".")[2] if named else None), (int(at[-1]) if at else None)


def brief(limits: Limits) -> str:
    """The sandbox as agents and world models are told of it."""
    return (
        f"Python 3.12 with numpy, pandas, scipy and scikit-learn; no network. One core, {limits.cpu_s} s of "
        f"computing time, {limits.memory_mb} MB of memory. The data are under the folder in the "
        "environment variable DATA_DIR; write the submission to the path in SUBMISSION_PATH."
    )
