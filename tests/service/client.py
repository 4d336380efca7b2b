"""Makes a Python client of an OpenAPI document, as any generator would: from the document alone."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_HEAD = '''"""Generated."""


class ApiError(Exception):
    def __init__(self, error):
        super().__init__(f"{error['code']} {error['type']}: {error['message']}")
        self.code, self.type, self.message = error["code"], error["type"], error["message"]


def _part(value):
    return str(value)


class Client:
    def __init__(self, send):
        self._send = send

    def _call(self, method, path, query, body, expected, shape):
        status, answer = self._send(
            method, path, {name: value for name, value in query.items() if value is not None}, body
        )
        if status != expected:
            raise ApiError(answer["error"])
        return None if shape is None else shape(**answer)
'''
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}


def generate(document: Mapping[str, Any], place: Path) -> ModuleType:
    """Write a client to a file, and load it."""
    place.write_text("\n".join([_HEAD, *_methods(document), *_shapes(document)]))
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _word(name: str) -> str:
    word = re.sub(r"\W", "_", name)
    return f"{word}_" if keyword.iskeyword(word) else word


def _methods(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield _method(path, method, operation)


def _method(path: str, method: str, operation: Mapping[str, Any]) -> str:
    parameters = operation.get("parameters", [])
    inside = re.findall(r"{(\w+)}", path)
    assert set(inside) == {one["name"] for one in parameters if one["in"] == "path"}
    asked = [one for one in parameters if one["in"] == "query"]
    arguments = ["self", *inside]
    words = [_query_argument(one) for one in asked]
    if "requestBody" in operation:
        words.append("body" if operation["requestBody"].get("required") else "body=None")
    if words:
        arguments += ["*", *words]
    (expected,) = (code for code in operation["responses"] if code in {"200", "201", "204"})
    content = operation["responses"][expected].get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    shape = schema.get("$ref", "").rpartition("/")[2] or ("dict" if schema else None)
    filled = re.sub(r"{(\w+)}", r"{_part(\1)}", path.removeprefix("/management/v1/"))
    query = ", ".join(f"{one['name']!r}: {_word(one['name'])}" for one in asked)
    body = "body" if "requestBody" in operation else "None"
    return (
        f"    def {operation['operationId']}({', '.join(arguments)}):\n"
        f"        return self._call({method.upper()!r}, f{filled!r}, {{{query}}}, {body}, "
        f"{expected}, {shape})\n"
    )


def _query_argument(parameter: Mapping[str, Any]) -> str:
    schema = parameter["schema"]
    kind = _TYPES.get(schema.get("type", ""), "object")
    given = "" if parameter.get("required") else f" = {schema.get('default')!r}"
    return f"{_word(parameter['name'])}: '{kind}'{given}"


def _shapes(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a class for each schema that is an object: it takes what the schema names, nothing else."""
    for name, schema in document["components"]["schemas"].items():
        names = list(schema.get("properties", {}))
        required = set(schema.get("required", ()))
        lines = [f"class {name}:", "    def __init__(self, **given):"]
        lines.append(
            f"        assert {sorted(required)!r} == sorted(set(given) & {required!r}), given"
        )
        lines.append(f"        assert set(given) <= {set(names)!r}, given")
        lines += [f"        self.{_word(one)} = given.get({one!r})" for one in names]
        yield "\n".join(lines if names else [f"class {name}:", "    pass"]) + "\n\n"
