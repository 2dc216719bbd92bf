"""The OpenAPI document as one page: no scripts, nothing from elsewhere."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.45 ui-monospace, monospace }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8885; border-radius: 6px }
section { border-top: 1px solid #8885; margin-top: 2rem }
table { border-collapse: collapse } td { padding: .1rem 1rem .1rem 0; vertical-align: top }
summary { cursor: pointer }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """HTML of a document that :func:`flide.serve.openapi.document` made."""
    info, root = document["info"], document["servers"][0]["url"].rstrip("/")
    has_keys = bool(document["security"])
    parts = [f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"]
    parts += [f"<p>{_marked(paragraph)}</p>" for paragraph in info["description"].split("\n\n")]
    key = " KEY is your key." if has_keys else ""
    parts.append(f"<p>In examples <code>$URL</code> is where this server is, without the path.{key} ")
    parts.append(f'The same as <a href="{escape(root)}/openapi.json">OpenAPI document</a>.</p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            with_key = has_keys and operation.get("security") != []
            parts.append(_operation(method, path, root, operation, with_key=with_key))
    parts.append("<section><h2>Schemas</h2>")
    for name, schema in document["components"]["schemas"].items():
        title = f'<summary id="{escape(name)}"><code>{escape(name)}</code></summary>'
        parts.append(f"<details>{title}{_json(schema)}</details>")
    parts.append("</section>")
    head = f"<meta charset=utf-8><title>{escape(info['title'])}</title><style>{STYLE}</style>"
    viewport = '<meta name=viewport content="width=device-width">'
    return f"<!doctype html><html lang=en><head>{head}{viewport}</head><body>{''.join(parts)}</body></html>"


def _operation(method: str, path: str, root: str, operation: Mapping[str, Any], *, with_key: bool) -> str:
    parts = [f"<section><h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>"]
    if "description" in operation:
        parts.append(f"<p>{_marked(operation['description'])}</p>")
    command = f'curl "$URL{root}{path}"' + (' -H "Authorization: Bearer KEY"' if with_key else "")
    examples = _examples(operation["requestBody"]) if "requestBody" in operation else {}
    for name, example in examples.items():
        data = shlex.quote(json.dumps(example["value"], ensure_ascii=False))
        parts.append(f"<h3>{escape(example['summary'])}</h3>")
        parts.append(f"<pre>{escape(command)} -H 'Content-Type: application/json' \\\n  -d {escape(data)}</pre>")
        for status, response in operation["responses"].items():
            if name in _examples(response):
                parts.append(f"<p>{status}</p>{_json(_examples(response)[name]['value'])}")
    if not examples:
        parts.append(f"<pre>{escape(command)}</pre>")
    rows = (
        f"<tr><td>{status}<td>{escape(response['description'])}<td>{_schema_links(response)}"
        for status, response in operation["responses"].items()
    )
    parts.append(f"<table>{''.join(rows)}</table></section>")
    return "".join(parts)


def _examples(message: Mapping[str, Any]) -> dict[str, Any]:
    (media,) = message["content"].values()
    return dict(media.get("examples", {}))


def _schema_links(response: Mapping[str, Any]) -> str:
    (media,) = response["content"].values()
    schemas = media["schema"].get("anyOf", [media["schema"]])
    names = [schema["$ref"].rpartition("/")[2] for schema in schemas if "$ref" in schema]
    return ", ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, ensure_ascii=False, indent=2))}</pre>"


def _marked(text: str) -> str:
    """Text in which `backquotes` mark code."""
    return "".join(
        f"<code>{escape(part)}</code>" if index % 2 else escape(part) for index, part in enumerate(text.split("`"))
    )
