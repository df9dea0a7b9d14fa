"""The user's own function: `file.py:function` or `package.module:function`, imported as Python would."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from metapeak.tracer.errors import ModelConfigError, ModelNotFound, UnknownName

_OURS = os.path.dirname(__file__) + os.sep


def import_function(where: str, name: str) -> Callable[[], Any]:
    """The function `name` of a file or an importable module.

    Raises ModelNotFound (no file, module or function) and ModelConfigError (importing it fails).
    """
    module = _import_file(where) if where.endswith(".py") else _import_module(where)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            own = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
            mine = [key for key in own if getattr(vars(module)[key], "__module__", None) == module.__name__]
            raise ModelNotFound(f"{where}: {UnknownName('function', name, mine or own)}")
        value = getattr(value, part)
    if not callable(value):
        raise ModelNotFound(f"{where}:{name} is no function ({type(value).__name__}); name one that returns a model.")
    return value


def _import_file(where: str) -> Any:
    path = os.path.abspath(os.path.expanduser(where))
    if not os.path.isfile(path):
        raise ModelNotFound(f"There is no file '{where}' to take a function from.")
    _put_first_on_path(os.path.dirname(path))
    name = "metapeak_user_" + os.path.basename(path).removesuffix(".py").replace(".", "_").replace("-", "_")
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # so that dataclasses and pickling inside the file find their module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ModelConfigError(f"'{where}' cannot be imported: {cause_in_one_line(error)}.") from error
    return module


def _import_module(where: str) -> Any:
    _put_first_on_path(os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(error.name + ".")):
            raise ModelNotFound(
                f"There is no Python module '{where}' to take a function from: {error}. "
                "It is looked for in the current folder and among the installed packages."
            ) from error
        raise ModelConfigError(f"Module '{where}' cannot be imported: {cause_in_one_line(error)}.") from error
    except Exception as error:
        raise ModelConfigError(f"Module '{where}' cannot be imported: {cause_in_one_line(error)}.") from error


def _put_first_on_path(folder: str) -> None:
    """As `python file.py` does: what lies beside the file can be imported, also later."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def cause_in_one_line(error: BaseException) -> str:
    """What was raised and at which line of which file, in one line."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(("<", _OURS))), None)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {text}"
    at = f" ({os.path.basename(last.filename)}:{last.lineno})" if last else ""
    return f"{type(error).__name__}: {text}{at}"
