"""`load`: a KV cache out of a file that `save` wrote, with nothing computed anew."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specache_fx._log import warn_once
from specache_fx.backend import Backend, check_names
from specache_fx.compiled import backend_of
from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError, SavedCacheError
from specache_fx.runners.base import inference
from specache_fx.runners.border import hand_out
from specache_fx.runtime.handles.handle_form import FORMS, num_sides
from specache_fx.runtime.host.machine_memory import available_bytes
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.origin import Origin
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.session.snapshot import HEADER_FORM, HELD_OPTIONS, SessionHeader, restore
from specache_fx.saved.cache_tree import rebuild
from specache_fx.saved.fingerprint import check_ids, config_of, token_hash, weights_of
from specache_fx.saved.json_form import FormError, check
from specache_fx.saved.saving import FILE, FORMAT
from specache_fx.saved.tensor_file import AGAIN, TensorFile, opened, unreadable

logger = logging.getLogger(__name__)


def load(model: nn.Module, folder: str | Path, *, input_ids: torch.Tensor | None = None) -> Any:
    """Restore a KV cache that `save` wrote, in this process or another. Nothing is computed anew.

    `model` goes on with it as with the one that was saved: the tokens to come are the same, and so are the bytes on the
    device. It has the weights that the cache was made with, and the numbers in its modules: the same adapters are on,
    in the same order, with the same scaling. It has the same `policy`, `bits`, `group_size`, `residual_length`,
    `resident_layers`, `sink_tokens` and `quantizer`. Other options are the model's own. Where `top_k`, `lookahead`,
    `on_miss` or `aggregation` differ, the saved guess is dropped. The options of a function that was compiled around
    the model can't be seen; those that were saved are taken then.

    Args:
        model: Compiled with this backend (`specache_fx.compile`), on the device where the cache is to be.
        folder: As for `save`.
        input_ids: The tokens that the cache should begin the prompt with, integers `[batch, tokens]`. If given, the
            first ones have to be those that were saved with it.

    Returns:
        The cache that was given to `save`, for `model.generate(ids, past_key_values=...)`, `ids` with all tokens.

    Raises:
        ConfigError: If `input_ids` are no integers `[batch, tokens]`.
        HostMemoryError: If the host tier can't take it.
        SavedCacheError: If there is none, it is damaged or cut short, another version's, another model's, of other
            options or of other tokens. Nothing is left behind.
    """
    if input_ids is not None:
        check_ids(input_ids)
    warn_if_plain(model)
    with opened(Path(folder) / FILE) as file:
        weights = fitting(model, file, input_ids)
        if isinstance(weights, str):
            raise SavedCacheError(f"The cache in {str(folder)!r} is not loaded: {weights}")
        return restored(model, file, weights)


Weights = dict[str, torch.Tensor]


_FORM = {
    "format": int,
    "tokens": (str, None),
    "sessions": [
        {
            **HEADER_FORM,
            "places": [range(1 << 31)],
            "forms": [frozenset(FORMS)],
            "model_config": (str, None),
            "weights": {str: str},
            "values": {str: {str: str}},
        }
    ],
    "cache": dict,
}
_BITS = 8  # of a byte; a cache keeps one at least of each number of each token


def _check(file: TensorFile) -> None:
    """Make sure that a file's header has all that is read of it, and tells of no more than the file holds.

    Raises:
        FormError: If not.
        SavedCacheError: If it has a class that this version of transformers lacks.
    """
    check(file.about, _FORM, "")
    sessions, used, tensors = file.about["sessions"], set(), 0
    if not sessions:
        raise FormError("sessions is an empty list: expected one at least")
    for i, about in enumerate(sessions):
        shapes = [LayerShape(**shape) for shape in about["shapes"]]
        if not shapes or not about["weights"]:
            raise FormError(f"sessions[{i}] has no layers or no weights")
        if not 2 * len(shapes) == len(about["places"]) == len(about["forms"]):
            raise FormError(
                f"sessions[{i}].places is not two for each of {len(shapes)} layers, or forms is not"
            )
        numbers = sum(
            shape.num_kv_heads * (shape.key_dim + shape.value_dim) * max(0, shape.tokens(about["kv_len"]))
            for shape in shapes
        )
        if about["batch"] * numbers > _BITS * file.nbytes:
            raise FormError(f"sessions[{i}] tells of more tokens than the file holds")
        used.update(about["places"])
        tensors += _num_tensors(about["places"], about["forms"])
    plain = {int(name[6:]) for name in file.names if name[:6] == "plain." and name[6:].isdecimal()}
    if len(used) != tensors or used & plain:
        raise FormError("places names a tensor twice")
    known, missing = used | plain, used.copy()

    def tensor_of(place: Any) -> torch.Tensor:
        if place not in known:
            raise FormError(f"cache names tensor {place!r:.80}, which is not there")
        missing.discard(place)
        return torch.empty(0)

    try:
        rebuild(file.about["cache"], tensor_of, torch.device("cpu"))
    except (SavedCacheError, FormError):
        raise
    except Exception as error:  # whatever it is made of: nothing but the file comes in
        raise FormError(
            f"cache is no object that can be made ({type(error).__name__}: {error!s:.80})"
        ) from error
    if missing:
        raise FormError(f"cache lacks tensor {min(missing)}")


def fitting(model: nn.Module, file: TensorFile, input_ids: torch.Tensor | None = None) -> list[Weights] | str:
    """The weights of a model that a saved cache was made with, by session; or why there are none, and the remedy.

    Raises:
        SavedCacheError: If the file is damaged, as far as its header tells.
    """
    made_by = file.about.get("format")
    if type(made_by) is int and made_by != FORMAT:
        return f"its format is {made_by}, this version reads {FORMAT}. Save it again with this version."
    try:
        _check(file)
    except FormError as error:
        raise unreadable(file.path, error) from error
    except SavedCacheError as error:
        return str(error)
    kept = file.about["tokens"]
    batch, kv_len = (file.about["sessions"][0][name] for name in ("batch", "kv_len"))
    if input_ids is not None and kept is None:
        return "it was saved without input_ids, so its tokens can't be compared. Save it with them, or load without."
    if input_ids is not None and token_hash(input_ids[:, :kv_len]) != kept:
        return (
            f"its {batch} x {kv_len} tokens are not the first of input_ids. Read this prompt from its start."
        )
    options, found = options_of(model), []
    for about in file.about["sessions"]:
        try:
            saved = SpecacheConfig.from_options(about["config"])
            if options is None:  # these are taken then
                check_names(saved)
        except ConfigError as error:
            return f"its options are another version's: {error} Save it again with this version."
        if options is None and (nbytes := _ahead(saved, about)) > available_bytes():
            return (
                f"its options top_k, reserve and sink_tokens ask for {nbytes:,} bytes. Load it with a module that was"
                " compiled with options of its own."
            )
        for name in HELD_OPTIONS:
            mine, theirs = (None if each is None else getattr(each, name) for each in (options, saved))
            if options is not None and mine != theirs:
                return f"it has {name}={theirs!r}, the model {mine!r}. Compile the model with the option of the cache."
        if about["model_config"] is not None and config_of(model, about["model_config"]) is None:
            return "it is of a model with another config. Load it with the model that made it."
        weights = weights_of(model, about["weights"], about["values"])
        dtypes = {str(weight.dtype) for weight in model.parameters() if weight.is_floating_point()}
        if isinstance(weights, str) and f"torch.{about['dtype']}" not in dtypes:
            mine = " and ".join(sorted(dtypes))
            return f"it was saved in {about['dtype']}, the model is in {mine}. Load the model in that dtype."
        if isinstance(weights, str):
            return (
                f"it is another model's: this one {weights}. Load it with the model that made it, and with the same"
                " adapters and numbers."
            )
        found.append(weights)
    return found


def _num_tensors(places: Sequence[int], forms: Sequence[str]) -> int:
    """The tensors that a session's keys and values are in: of a pair in one.

    Raises:
        FormError: If keys and values are a pair, and not of one form and place.
    """
    count = 0
    for slot in range(0, len(places), 2):
        both = slice(slot, slot + 2)
        sides = max(map(num_sides, forms[both]))
        if sides == 2 and (len({*forms[both]}) > 1 or len({*places[both]}) > 1):
            raise FormError(f"forms[{slot}] or places[{slot}] of a pair differs from the next")
        count += 3 - sides
    return count


def _ahead(config: SpecacheConfig, about: Mapping[str, Any]) -> int:
    """Bytes that options ask for beyond the tokens of a cache."""
    numbers = sum(
        shape["num_kv_heads"] * (shape["key_dim"] + shape["value_dim"]) for shape in about["shapes"]
    )
    tokens = config.top_k + config.reserve + config.sink_tokens
    nbytes: int = tokens * about["batch"] * numbers * getattr(torch, about["dtype"]).itemsize
    return nbytes


def restored(
    model: nn.Module, file: TensorFile, weights: Sequence[Weights], kv_len: int | None = None
) -> Any:
    """The cache of a file with these `fitting` weights, or of its first `kv_len` tokens (`cuts`). Raises as `load`."""
    made: list[Session] = []
    tensors: dict[int, torch.Tensor] = {}
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    try:
        with inference():
            for i, about in enumerate(file.about["sessions"]):
                session = _session(model, file, i, about, weights[i], made)
                session.rewind(session.kv_len if kv_len is None else kv_len)
                issued = registry.issue(session)
                forms, slot = about["forms"], 0
                while slot < len(issued):
                    count = num_sides(forms[slot])
                    tensors[about["places"][slot]] = hand_out(issued[slot : slot + count], forms[slot], slot)
                    slot += count
            for name in file.names:
                kind, _, number = name.partition(".")
                if kind == "plain":
                    tensors[int(number)] = file.read(name).to(device, copy=True)
            return rebuild(file.about["cache"], tensors.__getitem__, device)
    except BaseException as error:
        for session in made:
            session.close()
        if _is_of_the_file(error):
            raise SavedCacheError(
                f"{file.path} lacks a part that a cache of this version has: {error}.{AGAIN}"
            ) from error
        raise


def _is_of_the_file(error: BaseException) -> bool:
    """Whether a file's content caused an error, not a lack of memory or a device."""
    if type(error) is RuntimeError:  # torch's own word for a tensor that doesn't fit
        return "DefaultCPUAllocator" not in str(error)
    kinds = LookupError, TypeError, ValueError, ArithmeticError
    return isinstance(error, kinds) and not isinstance(error, ConfigError)


def cuts(file: TensorFile) -> bool:
    """Whether a saved cache can be restored to fewer tokens, as exactly as if no more had been read.

    The host has the 16-bit pairs that return to the window, and nothing but the handles knows of the length: neither a
    number nor a tensor of the model's own.
    """
    if any(name.startswith("plain.") for name in file.names):
        return False
    sessions = [SpecacheConfig.from_options(about["config"]) for about in file.about["sessions"]]
    return all(config.placement.offload for config in sessions) and not _has_number(file.about["cache"])


def _has_number(tree: Any) -> bool:
    """Whether a result of `describe` has a number, which may count tokens."""
    if isinstance(tree, dict):
        return "tensor" not in tree and any(map(_has_number, tree.values()))
    if isinstance(tree, list):
        return any(map(_has_number, tree))
    return isinstance(tree, (int, float)) and not isinstance(tree, bool)


def _session(
    model: nn.Module,
    file: TensorFile,
    number: int,
    about: Mapping[str, Any],
    weights: Weights,
    made: list[Session],
) -> Session:
    """One session of a file; it is put into `made` before it is filled."""
    others = "places", "forms", "model_config", "weights", "values"
    header = SessionHeader.from_json({name: value for name, value in about.items() if name not in others})
    device = next((weight.device for weight in weights.values()), torch.device("cpu"))
    config, dtype = options_of(model) or header.config, getattr(torch, header.dtype)
    session = registry.open_session(config, header.shapes, dtype, device)
    made.append(session)
    # Perhaps of a cache object: a prompt that was not traced may have been saved.
    session.origin = Origin(config_of(model, about["model_config"]), layers_of_cache=True)
    session.origin.note(weights.items(), about["values"])
    front = f"{number}."
    restore(session, header, {n.removeprefix(front): file.read(n) for n in file.names if n.startswith(front)})
    return session


def warn_if_plain(model: nn.Module) -> None:
    """Warn where no module is seen to be compiled with this backend: a function around it may be."""
    if options_of(model) is None:
        warn_once(
            logger,
            "specache: a saved cache was asked for with a model that is not compiled with this backend. Only compiled"
            " code can use it: call specache_fx.compile(model, ...) first. Ignore this where a function"
            " around the model is compiled.",
        )


def options_of(model: nn.Module) -> SpecacheConfig | None:
    """The options that a module, or one inside, was compiled with by this backend; None where that can't be seen."""
    for module in model.modules():
        context = getattr(module, "dynamo_ctx", None)
        call = getattr(module, "_compiled_call_impl", None)
        call = getattr(call, "compiled", call)  # of a `Dispatcher`
        if context is None and inspect.isfunction(call):
            context = inspect.getclosurevars(call).nonlocals.get("self")
        backend, options = backend_of(context)
        if isinstance(backend, Backend):
            return SpecacheConfig.from_options(options)
    return None
