"""The command `vla-wmrl`: reads a config, composes, and turns mistakes into one line and exit code 2.

The only module of the core that knows `sim` and `text_agents`; imported, as all that is heavy, when needed.
"""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from vla_wmrl import arguments, config, config_commands
from vla_wmrl.errors import UserError, nearest, require

# command -> (config class, module, function that takes the config and returns an exit code or None)
COMMANDS: dict[str, tuple[type, str, str]] = {
    "doctor": (config_commands.DoctorConfig, "sim.doctor", "main"),
    "demos": (config_commands.DemosConfig, "sim.demos", "main"),
    "sft": (config_commands.SftConfig, "sim.sft", "main"),
    "train": (config.TrainConfig, "sim.launch", "train"),
    "eval": (config_commands.EvalConfig, "sim.evaluate", "main"),
    "report": (config_commands.ReportConfig, "vla_wmrl.report", "main"),
    "info": (config_commands.InfoConfig, "sim.info", "main"),
}
MAKES_A_FOLDER = ("demos", "sft", "train", "eval")

TEXT_AGENTS = {"text": "text_agents.commands", "research": "text_agents.autoresearch.commands"}  # groups of commands

# What may change when a run is resumed; everything else would make it a different run.
MAY_CHANGE = (
    "resume", "output_dir", "steps", "save_every", "keep_checkpoints", "device", "videos", "init_ids",
    "episodes_per_task", "workers.", "log.", "eval.",
)  # fmt: skip


def usage() -> str:
    lines = ["usage: vla-wmrl COMMAND [--config_path=FILE.yaml] [--key=value ...]", "", "commands:"]
    lines += [f"  {name:8s}{(cls.__doc__ or '').strip()}" for name, (cls, _, _) in COMMANDS.items()]
    lines += [f"  {'text':8s}Text agents (ALFWorld, tau2-bench, RWML): `vla-wmrl text` lists its commands."]
    lines += ["  research Agents that write machine-learning programs: `vla-wmrl research` lists its commands."]
    return "\n".join([*lines, "", "`vla-wmrl COMMAND --help` lists its keys."])


def read_config(command: str, argv: Sequence[str]):
    """The validated config of a command, with `output_dir` settled. Raises UserError; touches no folder."""
    cls = COMMANDS[command][0]
    if command not in MAKES_A_FOLDER:
        return arguments.load(cls, argv)
    _, texts = arguments.read_command_line(argv)
    saved = Path(texts.get("output_dir", "")) / "config.yaml"
    if texts.get("resume", "false").lower() == "true" and "output_dir" in texts and saved.is_file():
        cfg = resume_config(cls, argv, saved)
    else:
        cfg = arguments.load(cls, argv)
    if cfg.output_dir is None:
        require(not cfg.resume, "--resume needs --output_dir=FOLDER of the run to continue")
        name = cfg.job_name or {"train": getattr(cfg, "arm", ""), "sft": "sft"}.get(command) or cfg.env.suite
        cfg.output_dir = str(Path("outputs") / command / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    check_output_dir(cfg.output_dir, cfg.resume)
    return cfg


def resume_config(cls: type, argv: Sequence[str], saved: Path):
    """A run's own config with what the command line changes of it. Raises UserError where that makes it another run."""
    known = arguments.fields(cls)
    before = arguments.read_yaml(saved, known)
    cfg = arguments.load(cls, argv, base=before, base_name=str(saved))
    after = arguments.flatten(arguments.encode(cfg), leaves=list(known))
    for name, value in after.items():
        changed = name in before and value != before[name] and not name.startswith(MAY_CHANGE)
        require(not changed, f"cannot resume {saved.parent} with {name}={value}: the run has {before.get(name)}")
    return cfg


def check_output_dir(path: str, resume: bool) -> None:
    """Refuse a folder with results unless `resume`, and a resume without any. Raises UserError; touches nothing."""
    folder = Path(path)
    require(not folder.exists() or folder.is_dir(), f"output_dir {path} is a file: name a folder")
    results = folder.is_dir() and any(p.name != "config.yaml" for p in folder.iterdir())
    require(resume or not results, f"output_dir {path} holds a run: continue it with --resume, or name another")
    require(results or not resume, f"nothing to resume in {path}: leave out --resume to start")


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        from importlib.metadata import version

        print(version("vla-wmrl"))
        return 0
    command, rest = argv[0], list(argv[1:])
    if command in TEXT_AGENTS:
        return importlib.import_module(TEXT_AGENTS[command]).run(rest)
    require(command in COMMANDS, f"unknown command {command!r}{nearest(command, [*COMMANDS, *TEXT_AGENTS])}")
    cls, module, function = COMMANDS[command]
    if "--help" in rest or "-h" in rest:
        print(arguments.help_text(cls, command))
        return 0
    cfg = read_config(command, rest)
    return getattr(importlib.import_module(module), function)(cfg) or 0


def reader_has_gone() -> bool:
    """Whether whoever read our output has closed it (`| head`): then nobody is there to be told."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 2 a mistake of the user or a full disk, 130 interrupted."""
    try:
        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still writes at its end
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: the disk is full{where}: free some space and continue with --resume", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: continue with --resume and the same --output_dir", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
