"""`vla-wmrl text COMMAND`: what is heavy is imported after the arguments are checked."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from text_agents import config
from text_agents.rl.config import TextRlConfig
from vla_wmrl import arguments
from vla_wmrl.errors import nearest, require

# command -> (config class, module, function that takes the config and returns an exit code or None)
COMMANDS: dict[str, tuple[type, str, str]] = {
    "games": (config.GamesConfig, "text_agents.alfworld_scenes", "main"),
    "play": (config.PlayConfig, "text_agents.play", "main"),
    "replay": (config.ReplayConfig, "text_agents.replay", "main"),
    "triplets": (config.TripletsConfig, "text_agents.rwml.collect", "main"),
    "rwml": (config.RwmlConfig, "text_agents.rwml.train", "main"),
    "rl": (TextRlConfig, "text_agents.rl.train", "main"),
    "small-model": (config.SmallModelConfig, "text_agents.small_model", "main"),
    "compare": (config.CompareConfig, "text_agents.compare.run", "main"),
    "calibrate-threshold": (config.CalibrateConfig, "text_agents.rwml.calibrate", "main"),
}

CONTINUES = ("rwml", "rl")  # commands whose runs have checkpoints


def usage() -> str:
    lines = ["usage: vla-wmrl text COMMAND [--config_path=FILE.yaml] [--key=value ...]", "", "commands:"]
    lines += [f"  {name:20s}{(cls.__doc__ or '').strip()}" for name, (cls, _, _) in COMMANDS.items()]
    return "\n".join([*lines, "", "`vla-wmrl text COMMAND --help` lists its keys."])


def run(argv: Sequence[str]) -> int:
    """Carry out a command; returns its exit code. Raises UserError."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    command, rest = argv[0], list(argv[1:])
    require(command in COMMANDS, f"unknown command 'text {command}'{nearest(command, list(COMMANDS))}")
    cls, module, function = COMMANDS[command]
    if "--help" in rest or "-h" in rest:
        print(arguments.help_text(cls, f"text {command}"))
        return 0
    cfg = _run_config(cls, rest) if command in CONTINUES else arguments.load(cls, rest)
    return getattr(importlib.import_module(module), function)(cfg) or 0


def _run_config(cls: type, argv: Sequence[str]):
    """The config of a run that may be a resumed one; its folder is checked. Raises UserError; touches no folder."""
    from vla_wmrl.cli import check_output_dir, resume_config

    _, texts = arguments.read_command_line(argv)
    saved = Path(texts.get("output_dir", "")) / "config.yaml"
    resumed = texts.get("resume", "false").lower() == "true" and "output_dir" in texts and saved.is_file()
    cfg = resume_config(cls, argv, saved) if resumed else arguments.load(cls, argv)
    check_output_dir(cfg.output_dir, cfg.resume)
    return cfg
