"""Configs in and out: YAML file + command line -> dataclass, dataclass -> YAML, and help text from their comments.

draccus decodes the values; keys are checked here first, so that an unknown one suggests the nearest. Precedence: field
defaults, the file, what the arm fixes, the command line.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Sequence
from pathlib import Path

import draccus
import yaml
from draccus.utils import DecodingError

from vla_wmrl.arms import apply_arm
from vla_wmrl.errors import UserError, nearest, require


def read_command_line(argv: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Split `--key=value`, `--key value` and bare `--flag` (true) into (config_path, {dotted key: text})."""
    values: dict[str, str] = {}
    i = 0
    while i < len(argv):
        require(
            argv[i].startswith("--") and len(argv[i]) > 2,
            f"unexpected argument {argv[i]!r}: options look like --key=value",
        )
        key, equals, value = argv[i][2:].partition("=")
        i += 1
        if not equals:
            alone = i == len(argv) or argv[i].startswith("--")
            value = "true" if alone else argv[i]
            i += not alone
        values[key] = value
    return values.pop("config_path", None), values


def fields(cls: type, prefix: str = "") -> dict[str, object]:
    """{dotted name: type} of every leaf of a config class."""
    hints, found = typing.get_type_hints(cls), {}
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            found |= fields(hint, f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = hint
    return found


def flatten(tree: dict, prefix: str = "", leaves: Sequence[str] = ()) -> dict[str, object]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in leaves:
            flat |= flatten(value, f"{prefix}{key}.", leaves)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(flat: dict[str, object]) -> dict:
    tree: dict = {}
    for name, value in flat.items():
        *sections, key = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree


def read_yaml(path: str | Path, known: dict[str, object]) -> dict[str, object]:
    """A YAML file as {dotted key: value}. Raises UserError where it is missing or not a mapping."""
    path = Path(path)
    if not path.is_file():
        siblings = [str(p) for p in sorted(path.parent.glob("*.yaml"))]
        raise UserError(f"no config file {path}" + (nearest(str(path), siblings) if siblings else ""))
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise UserError(f"{path} is not YAML" + (f" (line {where.line + 1})" if where else "")) from error
    require(isinstance(tree, dict), f"{path} must hold keys and values")
    return {k: v for k, v in flatten(tree, leaves=list(known)).items() if not (v is None and _is_section(k, known))}


def _is_section(name: str, known: dict[str, object]) -> bool:
    return any(k.startswith(f"{name}.") for k in known)


def check_keys(names: Sequence[str], known: dict[str, object], where: str) -> None:
    for name in names:
        if name in known:
            continue
        require(not _is_section(name, known), f"{where}: {name} is a section, set one of its keys (--{name}.KEY=value)")
        near_leaf = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
        hint = f" (did you mean {near_leaf[0]}?)" if near_leaf else nearest(name, list(known))
        raise UserError(f"unknown key {name!r} in {where}{hint}")


def parse_text(text: str, hint: object) -> object:
    """A command-line value as the decoder wants it: lists also as "1,2" and ranges "0-9"."""
    options = typing.get_args(hint)
    if type(None) in options and text.lower() in ("null", "none", ""):
        return None
    if list in (typing.get_origin(hint), *map(typing.get_origin, options)):
        items: list[object] = []
        for part in re.sub(r"^\[|\]$", "", text.strip()).split(","):
            span = re.fullmatch(r"\s*(\d+)-(\d+)\s*", part)
            if span and "int" in str(hint):
                items.extend(range(int(span[1]), int(span[2]) + 1))
            elif part.strip():
                items.append(part.strip().strip("'\""))
        return items
    return {"true": True, "false": False}.get(text.lower(), text) if hint is bool else text


def load(cls: type, argv: Sequence[str], base: dict[str, object] | None = None, base_name: str = ""):
    """A validated config of class `cls` from command-line arguments (and the YAML file that --config_path names).

    `base`: {dotted key: value} that takes the file's place (a resumed run's own config). Raises UserError.
    """
    known = fields(cls)
    config_path, texts = read_command_line(argv)
    file_values, where = base, base_name
    if base is None:
        file_values = read_yaml(config_path, known) if config_path else {}
        where = str(config_path)
    check_keys(list(file_values), known, where)
    check_keys(list(texts), known, "the command line")
    file_values = {k: parse_text(v, known[k]) if isinstance(v, str) else v for k, v in file_values.items()}
    line_values = {k: parse_text(v, known[k]) for k, v in texts.items()}
    cfg = decode(cls, file_values | line_values)
    if "arm" in known:
        explicit = set(line_values) if "arm" in line_values else set(line_values) | set(file_values)
        apply_arm(cfg, explicit)
    cfg.validate()
    return cfg


def decode(cls: type, flat: dict[str, object]):
    """An object of `cls` with the values of `flat` {dotted key: value} over its own defaults.

    Its own: a command may give a section other defaults than the section's class has (`eval` runs official states with exact
    stepping), and naming one key of a section may not reset the others.
    """
    own = {k: v for k, v in flatten(encode(cls()), leaves=list(fields(cls))).items() if k in fields(cls)}
    try:
        return draccus.decode(cls, nest(own | flat))
    except DecodingError as error:
        raise UserError(_one_line(str(error))) from error


def _one_line(message: str) -> str:
    message = re.sub(r"\s*\(<class '[^']*'>\)", "", message)
    failed = re.match(r"`(.+?)`: Failed when parsing value='(.*?)' into field .* of type (\S+)\.", message, re.S)
    if failed:
        return f"{failed[1]}: {failed[2]!r} is no {failed[3]}"
    return re.sub(r"^`(.+?)`", r"\1", " ".join(message.split()))


def encode(cfg: object) -> dict:
    """A config as nested dicts of plain values."""
    return draccus.encode(cfg)


def save(cfg: object, path: str | Path) -> None:
    """Write a config as YAML that `--config_path` reads back."""
    Path(path).write_text(yaml.safe_dump(encode(cfg), sort_keys=False), encoding="utf-8")


def help_text(cls: type, command: str) -> str:
    """Usage, the class docstring and one line a field: name, default, comment."""
    lines = [f"usage: vla-wmrl {command} [--config_path=FILE.yaml] [--key=value ...]", "", cls.__doc__ or "", ""]
    lines += _describe(cls, cls(), "")
    return "\n".join(lines)


def _describe(cls: type, instance: object, prefix: str) -> list[str]:
    hints, lines, sections = typing.get_type_hints(cls), [], []
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))
    for f in dataclasses.fields(cls):
        value, hint = getattr(instance, f.name), hints[f.name]
        if dataclasses.is_dataclass(hint):
            sections += ["", f"{prefix}{f.name}:", *_describe(hint, value, f"{prefix}{f.name}.")]
            continue
        comment = comments.get(f.name, "")
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        notes = [comment] if comment else []
        notes += ["one of " + ", ".join(map(str, choices))] if choices else []
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        lines.append(f"  --{prefix}{f.name}={shown}".ljust(44) + "  " + "; ".join(notes))
    return lines + sections
