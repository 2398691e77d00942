"""Recipes: Python files whose `get_config()` returns a RunConfig.

A relative path is looked for in the working directory, then beside the package and one folder above it, so that
`configs/tiny.py` names the shipped recipe everywhere: a checkout has `configs/` above the package, a wheel inside it.
"""

import traceback
import types
from pathlib import Path

from k3_jax.config import ConfigError, RunConfig

_PACKAGE = Path(__file__).resolve().parent


def find_recipe(path: str | Path) -> Path:
    """The file that `path` names. Raises ConfigError that lists the folders it is not in, and the shipped recipes."""
    path = Path(path).expanduser()
    folders = tuple(dict.fromkeys((Path.cwd(), _PACKAGE, _PACKAGE.parent)))
    for folder in folders:
        if (folder / path).is_file():  # an absolute path stands by itself
            return folder / path
    where = "this file" if path.is_absolute() else "a file in " + ", ".join(str(folder) for folder in folders)
    raise ConfigError(f"--config = {path}: expected {where}; the shipped recipes are {', '.join(shipped_recipes())}")


def shipped_recipes() -> list[str]:
    """The recipes that come with the package, as `--config` takes them."""
    for folder in (_PACKAGE, _PACKAGE.parent):
        if (folder / "configs" / "tiny.py").is_file():
            files = sorted((folder / "configs").glob("*.py"))
            return [f"configs/{file.name}" for file in files if file.name != "__init__.py"]
    return []


def load_recipe(path: str | Path) -> RunConfig:
    """Runs a recipe's `get_config()`. Whatever is wrong with the file is a ConfigError that names file and line."""
    file = find_recipe(path)
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    try:
        # Not through the import system: it would write a __pycache__ beside the user's recipe.
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
        config = _call(module, file)
    except (Exception, SystemExit) as error:
        raise ConfigError(_describe(error, file)) from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{file}: get_config() returned {type(config).__name__}: expected a k3_jax.config.RunConfig")
    return config


def _call(module: types.ModuleType, file: Path) -> object:
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        found = "a value of that name is not a function" if get_config is not None else "there is none"
        raise ConfigError(f"expected a function get_config() that returns a RunConfig; {found}")
    return get_config()


def _describe(error: BaseException, file: Path) -> str:
    """`file:line: what happened`; the line is the recipe's own, not that of the code it calls."""
    if isinstance(error, OSError) and not error.__traceback__.tb_next:
        return f"--config = {file}: cannot be read ({error.strerror})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(file) else None
    line = lines[-1] if line is None and lines else line
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    kind = "" if isinstance(error, ConfigError) else type(error).__name__ + (": " if text else "")
    return f"{file}:{line}: {kind}{text}" if line else f"{file}: {kind}{text}"
