"""Configurations of `vla-wmrl research`. A comment beside a field is its help text; nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from vla_wmrl.errors import nearest, require

PREDICTORS = ("majority", "complexity", "text", "boosting", "forest", "language")  # of `research fidelity`


@dataclass
class SandboxConfig:
    workers: int = 1  # programs at a time
    pool: Literal["local", "ray"] = "local"  # boxes on this machine, or Ray's actors on many
    ray_address: str | None = None  # of pool=ray: a cluster, or auto for the one this machine is in; null: Ray alone here
    cpu_s: int = 60  # computing time a program may take
    wall_s: float = 240.0  # time on the clock before a program is stopped
    memory_mb: int = 2048  # of a program
    processes: int = 64  # processes and threads of a program
    disk_mb: int = 256  # of each of a program's private disks, in memory

    def validate(self) -> None:
        for name in ("workers", "cpu_s", "wall_s", "memory_mb", "processes", "disk_mb"):
            require(getattr(self, name) > 0, f"sandbox.{name}={getattr(self, name)} must be positive")
        require(self.pool == "ray" or self.ray_address is None, "sandbox.ray_address is for sandbox.pool=ray")
        have = self.pool == "local" or find_spec("ray") is not None
        require(have, "sandbox.pool=ray needs Ray, which is not installed: make env EXTRAS=dev,ray")
        require(self.memory_mb >= 64, f"sandbox.memory_mb={self.memory_mb} is below 64")
        require(self.processes >= 4, f"sandbox.processes={self.processes}: a solution needs at least 4")


@dataclass
class ResearchTasksConfig:
    """List the embedded tasks, write them to a folder, or check a task folder of your own."""

    task_dir: str | None = None  # a task folder to check and describe
    metric: str | None = None  # with --task_dir: metric of a folder that names none
    output_dir: str | None = None  # write the embedded tasks here, in MLE-Dojo's format
    bike_sharing: str | None = None  # folder with bike_hour.csv and Kaggle's boards: rebuild that task in output_dir

    def validate(self) -> None:
        require(self.bike_sharing is None or self.output_dir is not None, "--bike_sharing needs --output_dir=FOLDER")


@dataclass
class ResearchRunConfig:
    """Run one solution in the sandbox and grade it."""

    file: str | None = None  # a Python program, or a pipeline specification (.json)
    task: str | None = None  # embedded task
    task_dir: str | None = None  # or a task folder
    metric: str | None = None  # with --task_dir: metric of a folder that names none
    show_code: bool = False  # print the program that a specification stands for
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def validate(self) -> None:
        require(self.file is not None, "no solution: pass --file=solution.py, or a specification as .json")
        require((self.task is None) != (self.task_dir is None), "name one task: --task=NAME or --task_dir=FOLDER")
        self.sandbox.validate()


@dataclass
class ResearchEvalConfig:
    """Evaluate an agent on tasks: one JSON line a trajectory, a leaderboard view, summary.json."""

    output_dir: str | None = None  # results folder
    resume: bool = False  # keep the trajectories that output_dir already holds and run the rest
    seed: int = 0
    agent: Literal["random", "sound", "search", "policy", "chat"] = "sound"  # any, sound, local search; trained; a chat model
    policy: str | None = None  # policy: folder `policy` of a run of `research train`
    mode: Literal["pipeline", "code"] = "pipeline"  # chat: it writes specifications, or whole programs
    model: str | None = None  # chat: checkpoint folder or name; null: the packaged SmolLM2-135M, or the server's first
    url: str | None = None  # chat: address of an OpenAI-compatible server, e.g. http://localhost:8000/v1
    max_tokens: int = 2048  # chat: of an answer
    tasks: list[str] = field(default_factory=lambda: ["held_out"])  # names, or train, held_out, all
    task_dirs: list[str] = field(default_factory=list)  # task folders, held out
    episodes: int = 4  # trajectories a task
    turns: int = 4  # programs a trajectory; the best counts
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def validate(self) -> None:
        require(self.output_dir is not None, "no folder for the results: pass --output_dir=FOLDER")
        require(len(self.tasks) + len(self.task_dirs) > 0, "no task: pass --tasks or --task_dirs")
        require(self.episodes >= 1 and self.turns >= 1, "episodes and turns start at 1")
        require((self.agent == "policy") == (self.policy is not None), "--agent=policy and --policy=FOLDER belong together")
        require(self.max_tokens >= 16, f"max_tokens={self.max_tokens} leaves no room for an answer")
        chatting = self.agent == "chat" or (self.mode == "pipeline" and self.model is None and self.url is None)
        require(chatting, f"agent={self.agent} writes specifications by itself: mode, model and url belong to --agent=chat")
        self.sandbox.validate()


@dataclass
class ResearchFidelityConfig:
    """How well a predictor foretells executions, on a file of solutions with true outcomes."""

    data: str | None = None  # file of benchmarks/research_fidelity.py (JSON lines)
    output: str | None = None  # also write the figures here, as JSON
    predictor: list[str] = field(default_factory=lambda: ["text", "boosting", "forest"])  # beside majority and complexity
    per_task: int | None = None  # first programs of a task that are used; null: all (a language model needs seconds for one)
    model: str | None = None  # language: checkpoint folder or name; null: the packaged SmolLM2-135M, or the server's first
    url: str | None = None  # language: address of an OpenAI-compatible server, e.g. http://localhost:8000/v1
    max_tokens: int = 512  # language: of an answer
    bootstrap: int = 300  # draws of whole tasks for the intervals; 0: none
    seed: int = 0

    def validate(self) -> None:
        require(self.data is not None, "no data: pass --data=FILE made by benchmarks/research_fidelity.py")
        for name in self.predictor:
            require(name in PREDICTORS, f"unknown predictor {name!r}{nearest(name, PREDICTORS)}")
        require(self.per_task is None or self.per_task >= 1, f"per_task={self.per_task} must be at least 1, or null")
        language = "language" in self.predictor or (self.model is None and self.url is None)
        require(language, "model and url belong to --predictor=language")
        require(self.bootstrap >= 0, f"bootstrap={self.bootstrap}: use 0 for no intervals")


@dataclass
class ResearchReportConfig:
    """Write report.html of a run of research train or eval, and print its leaderboard."""

    output_dir: str | None = None  # folder of the run

    def validate(self) -> None:
        require(self.output_dir is not None, "no run: pass --output_dir=FOLDER of a run")
