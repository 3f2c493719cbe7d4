"""MODEL: how a command gets its model and example batch.

package.module:factory   `factory()` returns (model, example_inputs); the current folder
                         is on the import path
path/to/config.json      a Hugging Face configuration, with --batch and --seq. It gives the
                         model of its architecture, on torch.device("meta"), and a batch of
                         input_ids and labels

--loss package.module:fn names the loss of a model that returns none: fn(outputs, batch) -> scalar.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import NotSupportedError, OptionError

if TYPE_CHECKING:
    from torch import nn

# Heads whose forward takes (input_ids, labels) of one shape [batch, seq].
_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
_FACTORY_HINT = "package.module:factory, where factory() returns (model, example_inputs)"
_LOSS_HINT = "--loss package.module:fn, where fn(outputs, batch) returns a scalar"


@dataclass(frozen=True)
class Subject:
    """A model and its example batch; and its loss, if the model returns none."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[..., Any] | None = None


def load_subject(
    name: str, batch: int | None = None, seq: int | None = None, *, real: bool = False
) -> Subject:
    """The model and example batch named on the command line.

    `real`: a configuration gets weights and random tokens on the CPU instead of meta tensors.

    Raises `OptionError` for a name that cannot be loaded, or sizes that are missing or unused.
    """
    if name.endswith(".json"):
        return _config_model(Path(name), batch, seq, real)
    _refuse_hub_id(name)
    if batch is not None or seq is not None:
        raise OptionError(
            "--batch and --seq are for a config.json",
            hint="a factory returns its own example batch",
        )
    return _factory_model(name)


def _refuse_hub_id(name: str) -> None:
    """Raises `OptionError` for `organisation/model`, and for a folder."""
    if ":" in name or not ("/" in name or Path(name).is_dir()):
        return
    if (Path(name) / "config.json").is_file():
        raise OptionError(f"{name} is a folder", hint=f"pass {name.rstrip('/')}/config.json")
    raise OptionError(
        f"{name} is no file here, and names of a model hub are not looked up",
        hint="download its config.json and pass that, with --batch 8 --seq 1024",
    )


def load_loss(name: str) -> Callable[..., Any]:
    """The function of `--loss`; raises `OptionError` if there is none of this name."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise OptionError(f"--loss {name} names no function", hint=_LOSS_HINT)
    found = getattr(_import(module_name, _LOSS_HINT), attribute, None)
    if isinstance(found, type):
        raise OptionError(f"--loss {name} is a class, not a function", hint=_LOSS_HINT)
    if not callable(found):
        raise OptionError(f"module {module_name} has no function {attribute!r}", hint=_LOSS_HINT)
    loss_fn: Callable[..., Any] = found
    return loss_fn


def is_plan_file(name: str) -> bool:
    """Is this the file of a plan rather than of a model? Raises `PlanError` if unreadable."""
    if not name.endswith(".json"):
        return False
    from autopar.plans import read_json

    content = read_json(name).members()
    return "graph_hash" in content or "model_type" not in content


def _factory_model(name: str) -> Subject:
    from torch import nn

    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise OptionError(f"{name!r} names no model", hint=f"{_FACTORY_HINT}; or a config.json")
    module = _import(module_name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise OptionError(f"module {module_name} has no function {attribute!r}", hint=_FACTORY_HINT)
    try:
        made = factory()
    except Exception as error:
        raise _users_fault(f"{name} failed", error) from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise OptionError(
            f"{name} returned {type(made).__name__}, not (model, example_inputs)",
            hint="example_inputs is a dict of keyword inputs or a tuple of positional ones",
        )
    return Subject(*made)


def _import(module_name: str, hint: str = _FACTORY_HINT) -> Any:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A wrong name, unless a module that the user's module imports is missing.
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"there is no module {error.name!r} here or installed", hint=hint
            ) from error
        raise _users_fault(f"importing {module_name} failed", error) from error
    except Exception as error:
        raise _users_fault(f"importing {module_name} failed", error) from error


def _users_fault(what: str, error: Exception) -> OptionError:
    """An error in the user's code, with its innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    return OptionError(
        f"{what}: {type(error).__name__}: {error}", where=where, hint="check that it runs alone"
    )


def _config_model(path: Path, batch: int | None, seq: int | None, real: bool) -> Subject:
    if batch is None or seq is None:
        raise OptionError(f"{path} needs the size of a batch", hint="--batch 8 --seq 1024")
    if batch < 1 or seq < 1:
        raise OptionError(f"--batch {batch} --seq {seq}: sizes are at least 1")
    config = read_config(path)
    import torch
    import transformers

    make = _model_class(transformers, config)
    torch.manual_seed(0)
    with torch.device("cpu" if real else "meta"):
        model = make(config)
    shape = (batch, seq)
    if real:
        size = config.get_text_config().vocab_size
        ids = torch.randint(size, shape)
        return Subject(model, {"input_ids": ids, "labels": ids.clone()})
    inputs = {
        key: torch.empty(shape, dtype=torch.int64, device="meta") for key in ("input_ids", "labels")
    }
    return Subject(model, inputs)


def read_config(path: Path) -> Any:
    """A Hugging Face configuration, with defaults for what its file leaves out."""
    from autopar.plans import read_json

    if "model_type" not in read_json(path).members():
        raise OptionError(f"{path} is no Hugging Face configuration: it has no model_type")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise OptionError(
            "a config.json needs the package transformers", hint="pip install transformers"
        ) from error
    try:
        return transformers.AutoConfig.from_pretrained(path)
    except Exception as error:
        raise OptionError(
            f"{path} is no Hugging Face configuration: {type(error).__name__}",
            hint="check that transformers.AutoConfig.from_pretrained reads it",
        ) from error


def _model_class(transformers: Any, config: Any) -> Any:
    """The function that makes the model of `config`; a causal model if it names no architecture."""
    name = (config.architectures or [None])[0]
    if name is None:
        return transformers.AutoModelForCausalLM.from_config
    found = getattr(transformers, name, None)
    if found is None or not name.endswith(_TOKEN_HEADS):
        raise NotSupportedError(
            f"the architecture {name} as a config.json",
            hint=f"{', '.join(_TOKEN_HEADS)} take input_ids and labels; "
            f"for others write a factory: {_FACTORY_HINT}",
        )
    return found._from_config
