"""What pages of reports are made of: figures, tables and folded texts, on one page that asks nothing of the network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

MISSING = '<p class="missing">not recorded</p>'


def image(svg: str, alt: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def table(head: list[str], rows: list[list[str]], total: bool = False) -> str:
    """Cells are HTML already; with `total` the last row is one."""
    body = []
    for i, row in enumerate(rows):
        mark = ' class="total"' if total and i == len(rows) - 1 else ""
        body.append(f"<tr{mark}>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def tiled(shown: Sequence[tuple[str, str]]) -> str:
    """Figures of the page's top: (value, what it is), values as HTML."""
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{v}</b><small>{n}</small></div>' for v, n in shown) + "</div>"


def page(title: str, facts: Sequence[str], tiles: str, sections: Sequence[tuple[str, str]]) -> str:
    """The page as HTML text. `sections`: (heading, HTML)."""
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    body = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{css}</style></head><body><main><h1>{escape(title)}</h1>"
        f'<p class="soft">{escape(" · ".join(facts))}</p>{tiles}{body}</main></body></html>\n'
    )


def save(folder: str | Path, text: str) -> Path:
    """Write `<folder>/report.html` by one rename and return its path."""
    path = Path(folder) / "report.html"
    draft = path.with_name(".report.html.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return path
