"""Configurations as text: `--set a.b=value`, JSON (kept with every checkpoint), and the differences of two.

All three are driven by the annotations of the dataclasses in `config.py`; a new field needs nothing here.
"""

import ast
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from k3_jax import config as config_module
from k3_jax.config import ConfigError

_CLASSES = {name: cls for name, cls in vars(config_module).items() if is_dataclass(cls)}
_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "text", type(None): "None"}
_WORDS = {"true": True, "false": False, "none": None, "null": None, "inf": math.inf}
_ABSENT = object()
_TAG = "type"  # the JSON key that says which dataclass of a union an object is


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The annotated type of each field."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a type that is none is its only member."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _expected(hint: Any) -> str:
    """A type in words: "None or a number"."""
    if typing.get_origin(hint) is tuple:
        return f"a tuple of which each is {_expected(typing.get_args(hint)[0])}, such as (x, y), (x,) or ()"
    if is_dataclass(hint):
        return f"{hint.__name__}(...)"
    return _NAMES.get(hint) or " or ".join(map(_expected, _options(hint)))


def _no_field(path: str, name: str, cls: type, root: type | None = None) -> ConfigError:
    """Unknown name: the close matches, or fields of that name elsewhere in `root`, then all there are."""
    prefix, names = path + "." if path else "", list(_hints(cls))
    near = [prefix + match for match in difflib.get_close_matches(name, names)]
    near = near or [known for known in _paths(root or cls) if known.rpartition(".")[2] == name]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return ConfigError(f"{prefix}{name}: {cls.__name__} has no such field{hint} (fields: {', '.join(names)})")


def _paths(cls: type) -> list[str]:
    """Dotted names of all fields of a dataclass and of those inside it."""
    paths = []
    for name, hint in _hints(cls).items():
        paths.append(name)
        for option in _options(hint):
            paths += [f"{name}.{inner}" for inner in _paths(option)] if is_dataclass(option) else []
    return paths


# Values that are already Python objects


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the annotation wants it: a list becomes a tuple, an integer a float, an object a dataclass."""
    for option in _options(hint):
        if option is float and type(value) in (int, float) and not math.isnan(value):
            return float(value)
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            inner = typing.get_args(option)[0]
            return tuple(_convert(item, inner, f"{path}[{i}]") for i, item in enumerate(value))
        if is_dataclass(option) and isinstance(value, Mapping):
            return _from_object(value, hint, path)
        if type(value) is option and option is not float:
            return value
    raise ConfigError(f"{path} = {value!r}: expected {_expected(hint)}")


def _from_object(data: Mapping[str, Any], hint: Any, path: str) -> Any:
    """The dataclass that a JSON object describes."""
    classes = {option.__name__: option for option in _options(hint) if is_dataclass(option)}
    if len(classes) > 1:
        if data.get(_TAG) not in classes:
            raise ConfigError(f"{path}.{_TAG} = {data.get(_TAG)!r}: expected {' or '.join(classes)}")
        cls = classes[data[_TAG]]
        data = {key: value for key, value in data.items() if key != _TAG}
    else:
        (cls,) = classes.values()
    return _build(cls, data, path)


def _build[C](cls: type[C], values: Mapping[str, Any], path: str) -> C:
    """A dataclass from the values of its fields, which it checks itself; fields left out take their defaults."""
    hints, prefix = _hints(cls), path + "." if path else ""
    for name in values:
        if name not in hints:
            raise _no_field(path, name, cls)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise ConfigError(f"{prefix}{field.name} is missing: expected {_expected(hints[field.name])}")
    return cls(**{name: _convert(value, hints[name], prefix + name) for name, value in values.items()})


# JSON


def to_json(config: Any) -> dict[str, Any]:
    """A configuration as an object of JSON; `from_json` gives an equal one back."""
    result = {}
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        classes = [option for option in _options(hint) if is_dataclass(option)]
        tag = {_TAG: type(value).__name__} if len(classes) > 1 and is_dataclass(value) else {}
        result[name] = tag | to_json(value) if is_dataclass(value) else _plain(value)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [to_json(item) if is_dataclass(item) else _plain(item) for item in value]
    return value


def from_json[C](cls: type[C], data: Any) -> C:
    """The configuration that `to_json` wrote. A field that is missing takes its default, if it has one.

    Raises ConfigError that names the field for an unknown one and for a value of the wrong type or out of range.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{cls.__name__} = {data!r}: expected an object")
    return _build(cls, data, "")


def differences(a: Any, b: Any) -> list[str]:
    """One line per field that differs, of two configurations or of what `to_json` made of them:
    `optimizer.learning_rate: 0.001 != 0.002`."""
    return _differences(a, b, "")


def _differences(a: Any, b: Any, path: str) -> list[str]:
    if is_dataclass(a) and type(a) is type(b):
        a, b = ({name: getattr(config, name) for name in _hints(type(a))} for config in (a, b))
    if not (isinstance(a, Mapping) and isinstance(b, Mapping) and a.get(_TAG) == b.get(_TAG)):
        return [] if a == b else [f"{path or 'config'}: {_show(a)} != {_show(b)}"]
    prefix = path + "." if path else ""
    return [
        line for name in {**a, **b} for line in _differences(a.get(name, _ABSENT), b.get(name, _ABSENT), prefix + name)
    ]


def _show(value: Any) -> str:
    return "(absent)" if value is _ABSENT else repr(value)


# --set


def apply_overrides[C](config: C, assignments: Sequence[str]) -> C:
    """`config` with each `a.b=value` set, in order. The result is checked once, when all are set.

    Values are Python literals, read by the field's type: text needs no quotes, `true` is True, `null` is None, and a
    nested dataclass is written as a call: `optimizer.schedule=WarmupStableDecay(decay_fraction=0.2)`.
    """
    draft = _draft(config)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set {assignment}: expected field=value, such as optimizer.learning_rate=1e-3")
        _assign(draft, path.strip(), text.strip())
    return _finish(draft)


@dataclasses.dataclass
class _Draft:
    """A dataclass that is not checked until all its fields are set."""

    cls: type
    values: dict[str, Any]


def _draft(config: Any) -> _Draft:
    values = {name: getattr(config, name) for name in _hints(type(config))}
    return _Draft(type(config), {name: _draft(v) if is_dataclass(v) else v for name, v in values.items()})


def _finish(draft: _Draft) -> Any:
    values = {name: _finish(v) if isinstance(v, _Draft) else v for name, v in draft.values.items()}
    return draft.cls(**values)


def _assign(draft: _Draft, path: str, text: str) -> None:
    root, names = draft.cls, path.split(".")
    for i, name in enumerate(names):
        if name not in draft.values:
            raise _no_field(".".join(names[:i]), name, draft.cls, root)
        if i == len(names) - 1:
            break
        here, inner = ".".join(names[: i + 1]), draft.values[name]
        if not isinstance(inner, _Draft):
            raise ConfigError(f"{path}: {here} is {inner!r}, which has no fields; set {here} itself")
        draft = inner
    value = _parse(text, _hints(draft.cls)[name], path)
    draft.values[name] = _draft(value) if is_dataclass(value) else value


def _parse(text: str, hint: Any, path: str) -> Any:
    """Command-line text as the annotation wants it. Raises ConfigError that names field, value and expected type."""
    options = _options(hint)
    word = _WORDS.get(text.lower(), text)
    if word is None and type(None) in options:
        return None
    if isinstance(word, bool) and bool in options:
        return word
    if str in options:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        value = _evaluate(ast.parse(text, mode="eval").body, path)
    except ConfigError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{path} = {text}: expected {_expected(hint)}") from None
    return _convert(value, hint, path)


def _evaluate(node: ast.expr, path: str) -> Any:
    """Literals, tuples and calls of the configuration's own classes; nothing else is Python here."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in _CLASSES:
            return _call(_CLASSES[name], node, path)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_evaluate(item, path) for item in items)
        case ast.Name(id=name) if name.lower() in _WORDS:
            return _WORDS[name.lower()]
        case _:
            return ast.literal_eval(node)


def _call(cls: type, node: ast.Call, path: str) -> Any:
    names = list(_hints(cls))
    if len(node.args) > len(names) or any(keyword.arg is None for keyword in node.keywords):
        raise ConfigError(f"{path} = {ast.unparse(node)}: expected {cls.__name__}({', '.join(names)})")
    values = {name: _evaluate(arg, path) for name, arg in zip(names, node.args, strict=False)}
    values |= {keyword.arg: _evaluate(keyword.value, path) for keyword in node.keywords}
    return _build(cls, values, path)
