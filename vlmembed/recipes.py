"""Recipes: runs as TOML files, one ``key = value`` a line, the keys being the flags' names."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from vlmembed.config import OF_THE_ENGINE, WHOLE_NUMBERS, EncodeConfig, setting_name
from vlmembed.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LISTS = ("inputs", "keep_columns", "reuse")
NUMBERS = ("timeout", "max_error_rate")

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(EncodeConfig)}
_REQUIRED = {"inputs": 'inputs = ["images"]', "output": 'output = "out.parquet"'}


def load_recipe(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> EncodeConfig:
    """Read a recipe, ``"-"`` from standard input. Relative paths in it count from the working directory, as on the
    command line.

    `sets` are ``"key=value"`` and stand over what the file says; of several with one key the last counts. Texts need no
    quotes, lists are TOML arrays or one element, ``"key="`` puts a setting back to its default.

    Raises:
        InputError: the file cannot be read.
        ConfigError: it is not TOML; a key is unknown, a value cannot be had, inputs or output are missing.
    """
    shown = os.fspath(path)
    if isinstance(sets, str):
        msg = f"sets is {sets!r}; it is a list of them: [{sets!r}]"
        raise ConfigError(msg)
    settings = _read_settings(shown)
    for text in sets:
        name, value = _parse_set(text)
        settings.pop(name, None)
        if value is not None:
            settings[name] = value
    for name, example in _REQUIRED.items():
        if not settings.get(name):
            value = example.partition(" = ")[2].strip('["]')
            msg = f"{shown} has no {name}: add {example}, or give --set {name}={value}"
            raise ConfigError(msg)
    try:
        return EncodeConfig.from_dict(settings)
    except ConfigError as error:  # two settings that contradict each other
        keys = [text.partition("=")[0].strip() for text in sets]  # values may hold logins
        msg = f"{' '.join([shown, *(f'--set {key}' for key in keys)])}: {error}"
        raise ConfigError(msg) from error


def _read_settings(shown: str) -> dict[str, Any]:
    """The file's settings by field name, each of a kind and size that it can have."""
    try:
        content = sys.stdin.buffer.read() if shown == "-" else Path(shown).read_bytes()
        text = content.decode("utf-8-sig")  # some editors put a byte order mark
    except UnicodeDecodeError as error:
        msg = f"{shown} is not text in UTF-8 ({error.reason} at byte {error.start}): a recipe is a TOML file"
        raise InputError(msg) from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        msg = f"recipe {shown!r} cannot be read ({reason}): name a TOML file with the settings of a run"
        raise InputError(msg) from error
    settings: dict[str, Any] = {}
    for key, value in _parse_toml(text, f"{shown} is not valid TOML").items():
        if _is_table(value):
            msg = f"{shown}: [{key}] is a table; settings stand alone, one key = value a line"
            raise ConfigError(msg)
        name = _name_of(key, shown)
        if name in settings:
            msg = f"{shown}: {key!r} is there twice, as {_flag(name)} and as {name}: leave one out"
            raise ConfigError(msg)
        settings[name] = _check(name, value, shown)
    return settings


def _name_of(key: str, where: str) -> str:
    """The field of a key.

    Raises:
        ConfigError: there is none; the message begins with `where` the key stands.
    """
    try:
        return setting_name(key, as_flags="_" not in key)
    except ConfigError as error:
        msg = f"{where}: {error}"
        raise ConfigError(msg) from error


def _parse_toml(text: str, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        msg = f"{what}: brackets are nested too deeply"
        raise ConfigError(msg) from None
    except ValueError as error:  # a number of thousands of digits is no TOMLDecodeError
        msg = f"{what}: {error}"
        raise ConfigError(msg) from error


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value))


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _check(name: str, value: Any, where: str) -> Any:  # noqa: ANN401  what TOML can hold
    """The value, if `EncodeConfig` takes it for this setting.

    Raises:
        ConfigError: it does not; the message begins with `where` the setting was made.
    """
    if name in LISTS and isinstance(value, str):
        msg = f"{where}: {_flag(name)} is {value!r}; it is a list: {_flag(name)} = [{json.dumps(value)}]"
        raise ConfigError(msg)
    alone = {"inputs": ["any"], "output": "any.lance" if value == "lance" else "", name: value}
    if name in OF_THE_ENGINE:
        alone = {"engine": "ray", **alone}
    try:
        EncodeConfig.from_dict(alone)
    except ConfigError as error:
        msg = f"{where}: {str(error).replace(name, _flag(name), 1)}"
        raise ConfigError(msg) from error
    return value


def _parse_set(text: str) -> tuple[str, Any]:
    """Field and value of ``"key=value"``; None for the default.

    Raises:
        ConfigError: it is not written like that, the key is unknown, the field cannot have this value.
    """
    key, equals, value = (each.strip() for each in text.partition("="))
    where = f"--set {key}"
    if not equals:
        msg = f"{where}: there is no = behind it; write --set key=value, such as --set limit=100"
        raise ConfigError(msg)
    name = _name_of(key, where)
    if not value:
        return name, None
    return name, _check(name, _value_of(name, value, where), where)


def _value_of(name: str, text: str, where: str) -> Any:  # noqa: ANN401  whatever the field can hold
    if name in LISTS:
        if text.startswith("[") and (text.endswith("]") or text[1:2] in ('"', "'")):  # not a pattern: [ab]*.jpg
            return _toml_value(text, f'{where}: {_flag(name)} is no TOML array, such as {_flag(name)}=["a", "b"]')
        one = _unquoted(text)
        return [each for each in one.split(",") if each] if name == "keep_columns" and one == text else [one]
    if name in WHOLE_NUMBERS or name in NUMBERS or isinstance(_DEFAULTS[name], bool):
        try:
            return _toml_value(text, where)
        except ConfigError:
            return text  # which the field refuses with its own words
    return _unquoted(text)


def _toml_value(text: str, what: str) -> Any:  # noqa: ANN401  what TOML can hold
    found = _parse_toml(f"value = {text}", what)
    if found.keys() != {"value"}:
        msg = f"{what}: it is more than one line"
        raise ConfigError(msg)
    return found["value"]


def _unquoted(text: str) -> str:
    """A text as it stands, or what is in its quotes if it is a TOML string."""
    if text[0] not in "\"'" or text[-1] != text[0]:
        return text
    try:
        value = _toml_value(text, "")
    except ConfigError:
        return text
    return value if isinstance(value, str) else text


def recipe_text(provenance: Mapping[str, Any]) -> str:
    """The recipe of an output, from its provenance, as a file that `load_recipe` reads and that makes the output again.

    Everything that was decided in that run is in it (device, dtype, attention, sizes), so that the same is decided.

    Raises:
        InputError: the provenance holds none.
    """
    try:
        recorded = tomllib.loads(provenance["recipe"])
        model, number = provenance["model"], provenance["versions"]["vlmembed"]
        made_with = f"model {model['name']} ({model['revision']}), weights {model['weights_sha256']}"
    except (KeyError, TypeError, ValueError) as error:
        msg = f"the output holds no recipe that can be read ({error}): it was not written by vlmembed encode"
        raise InputError(msg) from error
    notes = [
        f"Made an output with vlmembed {number}, {made_with}.",
        "Once more: vlmembed run THIS_FILE --set output=again.parquet",
        "Relative paths count from the folder in which it was run.",
        *_gaps(recorded),
    ]
    settings = {_flag(key): value for key, value in recorded.items() if key not in _unwritable(recorded)}
    return "".join(f"# {_on_one_line(note)}\n" for note in notes) + "\n" + tomli_w.dumps(settings)


def _unwritable(recorded: Mapping[str, Any]) -> list[str]:
    """Settings with names of files that are no Unicode: TOML is."""

    def is_unicode(value: object) -> bool:
        texts = value if isinstance(value, list) else [value]
        return not any("\ud800" <= each <= "\udfff" for text in texts for each in str(text))

    return [key for key, value in recorded.items() if not is_unicode(value)]


def _gaps(recorded: Mapping[str, Any]) -> list[str]:
    """What a recipe cannot hold, of what this one would need."""
    gaps = [
        f"{_flag(key)} names a file whose name is not UTF-8, which TOML cannot hold: give --set {_flag(key)}=NAME."
        for key in _unwritable(recorded)
    ]
    if "-" in recorded.get("inputs", ()):
        gaps.append('The list that came from standard input ("-") is not in it: feed it in again.')
    if any("://" in str(place) for place in (*recorded.get("inputs", ()), recorded.get("output", ""))):
        gaps.append("Logins, signatures and options of URLs are left out: the environment must have what they had.")
    if any(recorded.get(name) for name in ("cache", "reuse")):
        gaps.append(
            "Embeddings come from the cache and from earlier outputs again: --set cache= --set reuse= for none."
        )
    return gaps


def _on_one_line(text: str) -> str:
    """For a comment: a name in a file of a stranger may hold anything."""
    return "".join(character if character.isprintable() else "?" for character in text)
