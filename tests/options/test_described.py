"""Each option is described once, with its field, and `help(DistributedLion)` shows it."""

from __future__ import annotations

import dataclasses
import inspect
import re

from hf_dlion import DistributedLion, Options
from hf_dlion.options.described import PLACEHOLDER, describes_options


def entries(docstring: str | None, section: str) -> dict[str, str]:
    """The text of each entry of a Google docstring's section, by name."""
    assert docstring is not None
    body = inspect.cleandoc(docstring).split(f"\n{section}:\n")[1].split("\n\n")[0]
    return dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", body, re.MULTILINE))


def test_every_field_is_described_in_order():
    names = [field.name for field in dataclasses.fields(Options)]
    assert list(entries(Options.__doc__, "Attributes")) == names


def test_the_optimizer_describes_every_argument():
    described = entries(DistributedLion.__doc__, "Args")
    assert described.keys() == inspect.signature(DistributedLion).parameters.keys()


def test_the_optimizer_describes_options_in_the_words_of_their_fields():
    described = entries(DistributedLion.__doc__, "Args")
    fields = entries(Options.__doc__, "Attributes")
    assert {name: described[name] for name in fields} == fields


def test_without_docstrings_nothing_is_described():
    class Bare:
        pass

    assert describes_options(Bare) is Bare
    assert Bare.__doc__ is None
    assert PLACEHOLDER not in (DistributedLion.__doc__ or "")
