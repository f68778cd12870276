"""Requests to a server of OpenAI's protocol (vLLM, SGLang, llama.cpp, ...)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from vla_wmrl.errors import UserError, require


class TooLong(UserError):
    """A server says that a prompt is longer than its model's context."""


class Server:
    """url: with the version, e.g. http://localhost:8000/v1. Raises UserError for anything else."""

    def __init__(self, url: str, key: str = "", timeout_s: float = 600.0):
        require(url.startswith(("http://", "https://")), f"url {url!r} begins with neither http:// nor https://")
        self.url, self.key, self.timeout_s = url.rstrip("/"), key, timeout_s

    def first_model(self) -> str:
        """The name of the model that is served. Raises UserError when silent."""
        found = self.ask("/models").get("data") or []
        require(len(found) > 0, f"{self.url} serves no model")
        return str(found[0]["id"])

    def request(self, path: str, content: dict | None = None) -> str:
        """The answer's text; content: posted as JSON, else a GET. Raises UserError without an answer."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                return reply.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read()[:200].decode("utf-8", "replace")
            kind = TooLong if error.code == 400 and "context" in text.lower() else UserError
            raise kind(f"{self.url}{path} answers {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{self.url}{path} does not answer as a server of OpenAI's protocol does: {error}") from error

    def ask(self, path: str, content: dict | None = None) -> dict[str, Any]:
        """The answer as a JSON object. Raises UserError where it is none."""
        text = self.request(path, content)
        try:
            found = json.loads(text)
            require(isinstance(found, dict), "no object")
            return found
        except ValueError as error:
            raise UserError(f"{self.url}{path} does not answer as a server of OpenAI's protocol does: {error}") from error
