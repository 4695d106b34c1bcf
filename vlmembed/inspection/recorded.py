"""The settings of a run that is recorded: what was asked for, and what was decided."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import TYPE_CHECKING, Any

from vlmembed.config import EncodeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_PLACES = ("inputs", "output")
_DEFAULTS = {each.name: each.default for each in dataclasses.fields(EncodeConfig) if each.name not in _OF_PLACES}


def settings_of(provenance: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings by name that are not their defaults because somebody said so, and those that ``auto`` or nothing was
    asked for, with what became of them.

    A recipe of another version is read as far as it goes.
    """
    names = set(provenance.get("decided", ()))
    if provenance["fingerprint"].get("emit") == "tokens":  # which are never normalised, whatever was asked for
        names.add("normalize")
    try:
        recipe = tomllib.loads(provenance.get("recipe", ""))
    except tomllib.TOMLDecodeError:
        return {}, {}
    settings = {name.replace("-", "_"): value for name, value in recipe.items()}
    decided = {name: value for name, value in settings.items() if name in names and value != "auto"}
    asked = {
        name: value
        for name, value in settings.items()
        if name not in names and name in _DEFAULTS and value != _plain(_DEFAULTS[name])
    }
    return asked, decided


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
