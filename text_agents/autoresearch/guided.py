"""Constrained decoding with a local model: the form of a JSON answer is given, the model decides what is free in it.

For schemas made of objects, lists of a fixed length, enumerations, texts, numbers in an interval and whole numbers; every
property is written, in the schema's order. What a schema cannot say (values that depend on others) is for `allowed`.
Servers have engines for this; here a small model on one machine, which would hardly ever write valid JSON by itself.

Non-obvious behaviour
* An enumeration is drawn token by token among the values that are left, so a value's probability is the model's own
  given that only these may come.
* A text ends where the model ends it (a quote, a line break), or at its limit: it is never cut inside an escape, since the
  answer is put together from values, not from what was decoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LINES = 400  # whole numbers go up to here: lines of a program
SHORT = 16  # tokens of a text without a bound of its own
FORM = 160  # tokens that the form of an answer takes, about
Allowed = Callable[[str, Sequence, dict, Sequence[dict]], Sequence]


def everything(name: str, values: Sequence, item: dict, before: Sequence[dict]) -> Sequence:
    """No rule beyond the schema's."""
    return values


class Decoder:
    """One reply that grows: forced where its form is given, drawn where it is free. temperature 0: the likeliest token."""

    def __init__(self, model: Any, tokenizer: Any, prompt: Sequence[int], temperature: float, seed: Sequence[int]):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.rng = np.random.default_rng(seed)
        self.cache: Any = None
        self._read(prompt)

    def _read(self, ids: Sequence[int]) -> None:
        import torch

        if not len(ids):
            return
        device = next(self.model.parameters()).device
        with torch.no_grad():
            tokens = torch.tensor([list(ids)], device=device)
            out = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.logits = out.past_key_values, out.logits[0, -1].double().cpu().numpy()

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _draw(self, tokens: Sequence[int] | None = None) -> int:
        """A token, among these."""
        logits = self.logits if tokens is None else self.logits[list(tokens)]
        if self.temperature == 0:
            place = int(np.argmax(logits))
        else:
            p = np.exp((logits - logits.max()) / self.temperature)
            place = min(int(np.searchsorted(np.cumsum(p / p.sum()), self.rng.random(), side="right")), len(p) - 1)
        return place if tokens is None else tokens[place]

    def write(self, text: str) -> None:
        """Goes on with this text, whatever the model would say."""
        self._read(self._ids(text))

    def choose(self, options: Sequence[str]) -> str:
        """One of the texts. None may begin another."""
        left, at = {option: self._ids(option) for option in options}, 0
        while len(left) > 1:
            going = sorted({ids[at] for ids in left.values()})
            token = going[0] if len(going) == 1 else self._draw(going)
            left = {option: ids for option, ids in left.items() if ids[at] == token}
            at += 1
            self._read([token])
        [(option, ids)] = left.items()
        self._read(ids[at:])
        return option

    def text(self, max_tokens: int, max_chars: int) -> str:
        """Free text up to a quote, a line break, the end of the reply, or a limit."""
        ids: list[int] = []
        for _ in range(max_tokens):
            token = self._draw()
            now = self.tokenizer.decode([*ids, token], skip_special_tokens=True)
            if token == self.tokenizer.eos_token_id or '"' in now or "\n" in now or len(now) > max_chars:
                break
            ids.append(token)
            self._read([token])
        return self.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


def answer(decoder: Decoder, schema: dict, max_tokens: int, allowed: Allowed = everything) -> str:
    """A reply that follows `schema`, as JSON text of about `max_tokens` tokens. Raises ValueError for other schemas."""
    texts = max(8, (max_tokens - FORM) // max(1, _texts(schema)))
    return json.dumps(_value(decoder, schema, texts, allowed, "", {}, ()))


def _texts(schema: dict) -> int:
    """Bounded texts in an answer."""
    if schema.get("type") == "object":
        return sum(_texts(part) for part in schema["properties"].values())
    if schema.get("type") == "array":
        return schema["minItems"] * _texts(schema["items"])
    return int("maxLength" in schema)


def _value(decoder: Decoder, schema: dict, texts: int, allowed: Allowed, name: str, item: dict, before: Sequence[dict]) -> Any:
    """item: what the surrounding object holds so far; before: the earlier items of its list."""
    if "enum" in schema:
        options = {json.dumps(value): value for value in allowed(name, schema["enum"], item, before)}
        return options[decoder.choose(list(options))]
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    kind = next(k for k in kinds if k != "null")
    if kind == "object":
        return _object(decoder, schema, texts, allowed, before)
    if kind == "array":
        return _array(decoder, schema, texts, allowed)
    if kind == "string":
        if "null" in kinds and decoder.choose(["null", '"']) == "null":
            return None
        if "null" not in kinds:
            decoder.write('"')
        bounded = "maxLength" in schema
        found = decoder.text(texts if bounded else SHORT, schema.get("maxLength", 80))
        decoder.write('"')
        return found
    if kind == "integer":
        numbers = [*(["null"] if "null" in kinds else []), *(f"{i} " for i in range(1, LINES))]  # the blank: 1 begins 12
        return json.loads(decoder.choose(numbers))
    if kind == "number" and {"minimum", "maximum"} <= schema.keys():
        low, high = schema["minimum"], schema["maximum"]
        return float(decoder.choose([str(round(float(v), 2)) for v in np.linspace(low, high, 11)]))
    known = "enumerations, texts, whole numbers, numbers with both bounds, objects, lists"
    raise ValueError(f"no constrained decoding of {schema}: it knows {known}")


def _object(decoder: Decoder, schema: dict, texts: int, allowed: Allowed, before: Sequence[dict]) -> dict:
    found: dict[str, Any] = {}
    for name, part in schema["properties"].items():
        decoder.write(f'{", " if found else "{"}"{name}": ')
        found[name] = _value(decoder, part, texts, allowed, name, found, before)
    decoder.write("}")
    return found


def _array(decoder: Decoder, schema: dict, texts: int, allowed: Allowed) -> list:
    found: list[Any] = []
    for _ in range(schema["minItems"]):
        decoder.write(", " if found else "[")
        found.append(_value(decoder, schema["items"], texts, allowed, "", {}, tuple(found)))
    decoder.write("]")
    return found
