"""`vla-wmrl text compare`: a model before and after training, as `compare.json`, `weights.png` and a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from text_agents.compare import forgetting
from text_agents.compare.weights import change_ratios, pooled
from text_agents.config import CompareConfig
from vla_wmrl.errors import UserError
from vla_wmrl.stats import mcnemar, wilson
from vla_wmrl.tracking import write_json


def load(path: str, cfg: CompareConfig, dtype: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a model, or of a folder with an adapter, which is merged."""
    from text_agents.language_policy import LanguagePolicy

    policy = LanguagePolicy.from_pretrained(path, device=cfg.device, dtype=dtype)
    return policy.model, policy.tokenizer


def own_weights(model: Any) -> dict[str, Any]:
    """A model's weights by name; tied ones (a head that is the embedding) once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def weights(cfg: CompareConfig) -> dict:
    """Shares of changed weights. Raises UserError where the models are not of one kind."""
    before, after = (own_weights(load(path, cfg, cfg.dtype)[0]) for path in (cfg.before, cfg.after))
    try:
        rows = change_ratios(before, after, cfg.eta)
    except ValueError as error:
        raise UserError(f"{cfg.before} and {cfg.after} cannot be compared: {error}") from error
    total = sum(r["weights"] for r in rows)
    whole = sum(r["changed"] for r in rows) / total
    shares = {"all": whole, "by_layer": pooled(rows, "layer"), "by_module": pooled(rows, "module")}
    return {"eta": cfg.eta, "dtype": cfg.dtype, "weights": total, "changed": shares, "tensors": rows}


def known(path: str, cfg: CompareConfig) -> dict:
    """What one model knows, in float32."""
    model, tokenizer = load(path, cfg, "float32")
    found: dict[str, Any] = {}
    if cfg.tokens:
        found["text"] = forgetting.perplexity(model, tokenizer, cfg.tokens)
    if cfg.questions:
        found["questions"] = forgetting.answer(model, tokenizer)
    if cfg.lm_eval:
        found["lm_eval"] = lm_eval(model, tokenizer, cfg)
    return found


def lm_eval(model: Any, tokenizer: Any, cfg: CompareConfig) -> dict:
    """Results of lm-eval's tasks. Raises UserError without the package, or for tasks that it does not know."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError("lm_eval needs the package lm-eval, which is not installed: pip install lm-eval") from error
    try:
        found = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer),
            tasks=list(cfg.lm_eval),
            limit=cfg.lm_eval_limit,
            log_samples=False,
        )
    except (KeyError, ValueError) as error:
        raise UserError(f"lm-eval does not run {', '.join(cfg.lm_eval)}: {error}") from error
    return found["results"]


def questions_of(before: list[dict], after: list[dict]) -> dict:
    """Right answers before and after, with Wilson's intervals, and McNemar's exact p of the difference."""
    right = [np.array([row["right"] for row in rows]) for rows in (before, after)]
    n = len(right[0])
    kinds = list(dict.fromkeys(row["kind"] for row in before))
    of = {k: [int(sum(r["right"] for r in rows if r["kind"] == k)) for rows in (before, after)] for k in kinds}
    return {
        "n": n,
        "right": [int(r.sum()) for r in right],
        "interval": [list(wilson(int(r.sum()), n)) for r in right],
        "by_kind": of,
        "p": mcnemar(*right),
        "rows": [b | {"right": [b["right"], a["right"]]} for b, a in zip(before, after, strict=True)],
    }


def plot(shares: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.5), layout="constrained")
    for ax, (name, values) in zip(
        figure.subplots(1, 2), (("layer", shares["by_layer"]), ("module", shares["by_module"])), strict=True
    ):
        ax.bar(list(values), [100 * v for v in values.values()])
        ax.set(xlabel=name, ylabel="weights changed, %")
        ax.tick_params(axis="x", rotation=90, labelsize=7)
    figure.savefig(path, dpi=110)


def main(cfg: CompareConfig) -> None:
    folder = Path(cfg.output_dir)
    changed = weights(cfg)
    found = [known(path, cfg) for path in (cfg.before, cfg.after)]
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"before": cfg.before, "after": cfg.after, "weights": changed}
    lines = [f"weights changed by more than {cfg.eta:g} of themselves ({cfg.dtype}): {100 * changed['changed']['all']:.2f} %"]
    if cfg.tokens:
        result["text"] = [f["text"] for f in found]
        (b, a), n = (f["text"]["perplexity"] for f in found), found[0]["text"]["tokens"]
        lines.append(f"perplexity of {n} tokens of plain text: {b:.2f}, {a:.2f} ({math.log(a / b):+.3f} nats a token)")
    if cfg.questions:
        result["questions"] = told = questions_of(*(f["questions"] for f in found))
        lines.append(
            f"questions right: {told['right'][0]}, {told['right'][1]} of {told['n']} (p = {told['p']:.2g}, exact McNemar)"
        )
    if cfg.lm_eval:
        result["lm_eval"] = [f["lm_eval"] for f in found]
        lines.append(f"lm-eval: {', '.join(cfg.lm_eval)}, see compare.json")
    write_json(folder / "compare.json", result)
    plot(changed["changed"], folder / "weights.png")
    print("\n".join([*lines, f"written to {folder}"]))
