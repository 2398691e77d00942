"""Mistakes made on purpose."""

import inspect
import sys


def replace(monkeypatch, function, changes: dict[str, str], *importers):
    """Compile a function's source with some of its text changed, where it is defined and where it is imported."""
    source, module = inspect.getsource(function), sys.modules[function.__module__]
    for old, new in changes.items():
        assert source.count(old) == 1, f"{function.__name__} has no longer: {old}"
        source = source.replace(old, new)
    namespace = dict(vars(module))
    exec(source, namespace)
    for place in (module, *importers):
        monkeypatch.setattr(place, function.__name__, namespace[function.__name__])
