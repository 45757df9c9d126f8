"""Computes a case with jattn: builds masks and score functions from the specs, and one function to compile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import heads, masks, score_mods
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.decode import Decode
from jattn.kernels.native import Native
from jattn.sharding import HeadParallel, Ring
from tests.soak.draw import MASK_FUNCTIONS, MOD_FUNCTIONS, Arrays, Spec, Structure

ARGUMENTS = (
    "bias", "sinks", "scale", "query_seq_lengths", "key_value_seq_lengths", "query_positions", "kv_positions",
)  # fmt: skip


def mask_of(spec: Spec, arrays: dict[str, Any]) -> Any:
    """The mask described by the spec."""
    given = [arrays[name] for name in spec.arrays]
    parts = [mask_of(part, arrays) for part in spec.parts]
    plain = not any(isinstance(part, masks.Mask) for part in parts)
    match spec.kind:
        case "and":
            return masks.and_masks(*parts) if plain else parts[0] & parts[1]
        case "or":
            return masks.or_masks(*parts) if plain else parts[0] | parts[1]
        case "not":
            return masks.Not(*parts) if plain else ~parts[0]
        case "function":
            return MASK_FUNCTIONS[spec.static[0]](jnp.asarray(given[0]))
    kind = {
        "causal": masks.Causal, "window": masks.SlidingWindow, "prefix": masks.Prefix, "padding": masks.Padding,
        "segments": masks.Segments, "dense": masks.Dense,
    }[spec.kind]  # fmt: skip
    return kind(*spec.static, *given)


def mod_of(spec: Spec, arrays: dict[str, Any]) -> Any:
    """The score function described by the spec."""
    given = [arrays[name] for name in spec.arrays]
    match spec.kind:
        case "then":
            return score_mods.then(*(mod_of(part, arrays) for part in spec.parts))
        case "alibi":
            return score_mods.Alibi(*given)
        case "relative":
            return score_mods.RelativeBias(*given, *spec.static)
        case "cap":
            return score_mods.SoftCap(*given, *spec.static)
    return MOD_FUNCTIONS[spec.kind](jnp.asarray(given[0]))


def implementation_of(name: str) -> Any:
    """The value of ``implementation=``."""
    if name in ("default", "nnx", "linen"):
        return None
    if "(" not in name:
        return name
    kind, arguments = name[:-1].split("(")
    first, *rest = arguments.split(", ")
    match kind:
        case "Blockwise":
            return Blockwise((int(first), int(rest[0])))
        case "Native":
            return Native(few=int(first))
        case "Decode":
            return Decode(int(first))
        case "HeadParallel":
            return HeadParallel(_mesh(int(first), "heads"), "heads")
        case "Ring":
            return Ring(_mesh(int(first), "sequence"), "sequence", layout=rest[0])
    raise AssertionError(name)


def _mesh(devices: int, name: str) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), (name,), axis_types=(jax.sharding.AxisType.Auto,))


def make_program(structure: Structure, constants: Arrays) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """``arrays -> results by name``, with the names of ``reference.expected``; ``constants`` are not arguments."""
    attend = _layer if structure.features else _attention

    def program(arrays: dict[str, Any]) -> dict[str, Any]:
        fixed = constants | {name: x for name, x in arrays.items() if name not in structure.learned}
        learned = {name: arrays[name] for name in structure.learned}
        results, pull = jax.vjp(lambda learned: attend(structure, learned | fixed), learned)
        cotangents = {name: fixed[f"{name}_cotangent"] for name in results}
        (gradients,) = pull(cotangents)
        results |= {f"d {name}": x for name, x in gradients.items()}
        return results | _looks(structure, learned | fixed)

    return program


def _options(structure: Structure, arrays: dict[str, Any]) -> dict[str, Any]:
    options = {name: arrays[name] for name in ("mask", *ARGUMENTS) if name in arrays}
    if structure.mask is not None:
        options["mask"] = mask_of(structure.mask, arrays)
    if structure.mod is not None:
        options["score_mod"] = mod_of(structure.mod, arrays)
    if structure.window is not None:
        options["local_window_size"] = structure.window
    if structure.scale is not None:
        options["scale"] = structure.scale
    return options | ({"is_causal": True} if structure.is_causal else {})


def _attention(structure: Structure, arrays: dict[str, Any]) -> dict[str, Any]:
    out, lse = jattn.dot_product_attention(
        *(arrays[name] for name in ("query", "key", "value")),
        implementation=implementation_of(structure.implementation),
        return_residual=True,
        **_options(structure, arrays),
    )
    return {"out": out, "lse": lse}


def _looks(structure: Structure, arrays: dict[str, Any]) -> dict[str, Any]:
    """The weights and statistics that the structure requests."""
    found = {}
    if not (structure.weights or structure.statistics):
        return found
    query, key, options = arrays["query"], arrays["key"], _options(structure, arrays)
    if structure.weights:
        found["weights"] = jattn.attention_weights(query, key, **options)
    if structure.statistics:
        how = implementation_of(structure.implementation)
        how = how if isinstance(how, Blockwise | HeadParallel | Ring) else None
        options.pop("sinks", None)
        beside = {name: arrays[name] for name in ("tokens", "eligible") if name in arrays}
        of = heads.statistics(query, key, implementation=how, **beside, **options)
        found |= {f"of {name}": x for name, x in of.items() if name != "support"}
        found |= {f"of support {name}": x for name, x in of["support"].items()}
    return found


def _layer(structure: Structure, arrays: dict[str, Any]) -> dict[str, Any]:
    """The output of a Flax module with these parameters."""
    _, _, _, N, K, H, D = structure.sizes
    M, dtype = structure.features, jnp.dtype(structure.dtype)
    options = _options(structure, arrays)
    sinks = options.pop("sinks", None)
    settings: dict[str, Any] = {"num_kv_heads": K, "value_dim": D, "param_dtype": dtype, "sinks": sinks is not None}
    parameters = {
        name: {part: arrays[f"own {name} {part}"] for part in ("kernel", "bias")}
        for name in ("query", "key", "value", "out")
    }
    inputs = arrays["inputs_q"], arrays["inputs_k"]
    if structure.implementation == "linen":
        if sinks is not None:
            parameters |= {"sinks": sinks}
        module = jattn.linen.MultiHeadDotProductAttention(N, qkv_features=N * H, **settings)
        return {"out": module.apply({"params": parameters}, *inputs, **options)}
    module = jattn.nnx.MultiHeadAttention(N, M, N * H, rngs=nnx.Rngs(0), **settings)
    for name, of_map in parameters.items():
        for part, x in of_map.items():
            setattr(getattr(module, name), part, nnx.Param(x))
    if sinks is not None:
        module.sinks = nnx.Param(sinks)
    return {"out": module(*inputs, **options)}


def constants_of(structure: Structure, arrays: Arrays) -> Arrays:
    """The arrays that are constants of a ``static`` structure's program: NumPy integers and bools."""
    if not structure.static:
        return {}
    return {name: np.asarray(x) for name, x in arrays.items() if not structure.recipes[name].learned}
