"""The public surface: its names, what importing costs, and the hierarchy of errors."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import sakiyomi
from sakiyomi import errors

NAMES = [
    "LLM",
    "CapacityError",
    "Chunk",
    "CorruptModelError",
    "DownloadError",
    "DrafterError",
    "Generation",
    "ModelError",
    "ModelNotFoundError",
    "NgramDrafter",
    "OptionError",
    "PolicyError",
    "PromptError",
    "SakiyomiError",
    "SamplingParams",
    "Stats",
    "SuffixDrafter",
    "Token",
    "UnsupportedModelError",
    "__version__",
    "accelerate",
    "load",
    "restore",
]


def test_these_are_the_public_names():
    """A name that is added or taken away is a change for users: change this list on purpose."""
    assert sakiyomi.__all__ == NAMES
    assert dir(sakiyomi) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name):
    found = getattr(sakiyomi, name)
    assert found is not None
    if inspect.isclass(found):
        assert found.__name__ == name
        assert found.__doc__


def test_a_star_import_brings_exactly_these():
    namespace: dict[str, object] = {}
    exec("from sakiyomi import *", namespace)
    assert sorted(namespace.keys() - {"__builtins__"}) == sorted(NAMES)


def test_an_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError, match="module 'sakiyomi' has no attribute 'laod'"):
        sakiyomi.laod  # noqa: B018
    assert not hasattr(sakiyomi, "torch")


def test_importing_waits_for_nothing_heavy():
    heavy = ("torch", "transformers", "numpy", "tokenizers", "jinja2", "safetensors", "huggingface_hub", "gguf", "rich")
    code = f"""
import sys, sakiyomi
print(sakiyomi.__version__, *(name for name in {heavy} if name in sys.modules))
sakiyomi.OptionError
print(*(name for name in {heavy} if name in sys.modules))
sakiyomi.SamplingParams
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [sakiyomi.__version__, "", "True False"]


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert sakiyomi.__version__ == version("sakiyomi")


def drawn_parents() -> dict[str, str]:
    """Return each error's parent in the drawing at the top of errors.py."""
    path: list[str] = []
    parents = {}
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"([│├└─ ]*)(\w+Error)\b", line)
        if drawn:
            depth = len(drawn[1]) // 4
            path = [*path[:depth], drawn[2]]
            if depth:
                parents[drawn[2]] = path[depth - 1]
    return parents


def test_the_errors_are_related_as_they_are_drawn():
    parents = drawn_parents()
    classes = {name: each for name, each in vars(errors).items() if inspect.isclass(each)}
    assert {"SakiyomiError", *parents} == set(classes)
    for name, parent in parents.items():
        assert classes[name].__bases__[0] is classes[parent]
        assert getattr(sakiyomi, name) is classes[name]
    assert classes["SakiyomiError"].__bases__ == (Exception,)


@pytest.mark.parametrize("name", ["OptionError", "PromptError"])
def test_bad_values_are_value_errors_too(name):
    assert issubclass(getattr(errors, name), ValueError)
    assert not issubclass(errors.ModelError, ValueError)
