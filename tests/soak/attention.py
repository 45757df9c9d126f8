"""Calls of attention: one structure, its program in jattn and the reference's results, and its cases."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import heads
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.decode import Decode
from jattn.kernels.native import Native
from jattn.sharding import HeadParallel, Ring, Ulysses
from tests import reference
from tests.reference.bounded import Bounded, Rounding, error_of, rounded
from tests.soak.draw import Structure, draw_structure, draw_values
from tests.soak.trial import Difference, Expected, Trial, compare, of_error
from tests.soak.vocabulary import Arrays

EAGER = 3  # number of draws of an eager structure that also run without jit; all but the first reuse compiled programs
ARGUMENTS = "mask bias sinks scale query_seq_lengths key_value_seq_lengths query_positions kv_positions".split()
LAYER = ("query", "key", "value", "out")


def implementation_of(name: str) -> Any:
    """The value of ``implementation=``."""
    kind, _, arguments = name.rstrip(")").partition("(")
    mesh = lambda devices, axis: jax.make_mesh((int(devices),), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
    classes = {
        "Blockwise": lambda queries, keys: Blockwise((int(queries), int(keys))),
        "Native": lambda few: Native(few=int(few)),
        "Decode": lambda size: Decode(int(size)),
        "HeadParallel": lambda devices: HeadParallel(mesh(devices, "heads"), "heads"),
        "Ulysses": lambda devices: Ulysses(mesh(devices, "sequence"), "sequence"),
        "Ring": lambda devices, layout: Ring(mesh(devices, "sequence"), "sequence", layout=layout),
    }
    return classes[kind](*arguments.split(", ")) if arguments else None if name in ("default", "nnx", "linen") else name


def make_program(structure: Structure, constants: Arrays) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """``arrays -> results by name``, with the names of ``expected``; ``constants`` are not arguments."""
    attend = _layer if structure.features else _attention

    def program(arrays: dict[str, Any]) -> dict[str, Any]:
        fixed = constants | {name: x for name, x in arrays.items() if name not in structure.learned}
        learned = {name: arrays[name] for name in structure.learned}
        results, pull = jax.vjp(lambda learned: attend(structure, learned | fixed), learned)
        (gradients,) = pull({name: fixed[f"{name}_cotangent"] for name in results})
        results |= {f"d {name}": x for name, x in gradients.items()}
        return results | _looks(structure, learned | fixed)

    return program


def _options(structure: Structure, arrays: dict[str, Any]) -> dict[str, Any]:
    options = {name: arrays[name] for name in ARGUMENTS if name in arrays}
    if structure.mask is not None:
        options["mask"] = structure.mask.build(arrays)
    if structure.mod is not None:
        options["score_mod"] = structure.mod.build(arrays)
    static = {"local_window_size": structure.window, "scale": structure.scale, "is_causal": structure.is_causal or None}
    return options | {name: value for name, value in static.items() if value is not None}


def _attention(structure: Structure, arrays: dict[str, Any]) -> dict[str, Any]:
    inputs = (arrays[name] for name in ("query", "key", "value"))
    options = {"implementation": implementation_of(structure.implementation), "return_residual": True}
    call = functools.partial(jattn.dot_product_attention, **options, **_options(structure, arrays))
    out, lse = in_form(structure.form, call)(*inputs)
    return {"out": out, "lse": lse}


def in_form(form: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` of query, key and value, in one of ``FORMS``."""
    last = lambda results: jax.tree.map(lambda x: x[-1], results)
    twice = lambda arrays: [jnp.stack([x, x]) for x in arrays]
    turned = lambda x: jax.lax.optimization_barrier(x.T).T  # the compiler may leave it as it lies
    return {
        "vmap": lambda *qkv: last(jax.vmap(call)(*twice(qkv))),
        "scan": lambda *qkv: last(jax.lax.scan(lambda _, x: (None, call(*x)), None, twice(qkv))[1]),
        "remat": jax.checkpoint(lambda *qkv: call(*qkv)),
        "transposed": lambda *qkv: call(*map(turned, qkv)),
    }.get(form, call)


def _looks(structure: Structure, arrays: dict[str, Any]) -> dict[str, Any]:
    """The weights and statistics that the structure requests."""
    results = {}
    if structure.weights:
        results["weights"] = jattn.attention_weights(arrays["query"], arrays["key"], **_options(structure, arrays))
    if structure.statistics:
        implementation = implementation_of(structure.implementation)
        implementation = implementation if isinstance(implementation, Blockwise | HeadParallel | Ring) else None
        options = {name: value for name, value in _options(structure, arrays).items() if name != "sinks"}
        options |= {name: arrays[name] for name in ("tokens", "eligible") if name in arrays}
        of = heads.statistics(arrays["query"], arrays["key"], implementation=implementation, **options)
        results |= {f"of support {name}": x for name, x in of.pop("support").items()}
        results |= {f"of {name}": x for name, x in of.items()}
    return results


def _layer(structure: Structure, arrays: dict[str, Any]) -> dict[str, Any]:
    """The output of a Flax module with these parameters."""
    _, _, _, N, K, H, D = structure.sizes
    options = _options(structure, arrays)
    sinks = options.pop("sinks", None)
    settings = {"num_kv_heads": K, "value_dim": D, "param_dtype": structure.dtype, "sinks": sinks is not None}
    parameters = {name: {part: arrays[f"{name} {part}"] for part in ("kernel", "bias")} for name in LAYER}
    inputs = arrays["inputs_q"], arrays["inputs_k"]
    if structure.implementation == "linen":
        parameters |= {} if sinks is None else {"sinks": sinks}
        module = jattn.linen.MultiHeadDotProductAttention(N, qkv_features=N * H, **settings)
        return {"out": module.apply({"params": parameters}, *inputs, **options)}
    module = jattn.nnx.MultiHeadAttention(N, structure.features, N * H, rngs=nnx.Rngs(0), **settings)
    for name, of_map in parameters.items():
        for part, x in of_map.items():
            setattr(getattr(module, name), part, nnx.Param(x))
    if sinks is not None:
        module.sinks = nnx.Param(sinks)
    return {"out": module(*inputs, **options)}


def expected(structure: Structure, arrays: Arrays) -> Expected:
    """The expected results of a case by name, with tolerances."""
    with np.errstate(all="ignore"):
        results = _expected_layer(structure, arrays) if structure.features else _expected_attention(structure, arrays)
    last = lambda x, error, dtype: (x, rounded(x, error, abs(x), dtype))
    dtypes = dtypes_of(structure, results)
    return {name: last(np.asarray(x), error_of(x), dtypes[name]) for name, x in results.items()}


def dtypes_of(structure: Structure, names: Any) -> dict[str, Any]:
    """The dtype of each result."""
    known = {f"d {name}": recipe.dtype for name, recipe in structure.recipes.items()} | {"out": structure.dtype}
    return {name: known.get(name, structure.wide) for name in names}


def _arguments(structure: Structure, arrays: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
    """The float arrays as arguments of the reference, and its options."""
    rounding = Rounding(structure.wide, structure.dtype)
    floats = {name: Bounded(x, rounding) for name, x in arrays.items() if structure.recipes[name].learned}
    options = {name: floats[name] for name in ("bias", "sinks") if name in floats}
    if structure.mod is not None:
        options["modify"] = structure.mod.define(arrays, *structure.places(arrays))
    return floats, options | {"scale": arrays.get("scale", structure.scale)}


def _expected_attention(structure: Structure, arrays: Arrays) -> dict[str, Any]:
    floats, options = _arguments(structure, arrays)
    visible = structure.visible(arrays)
    names = ("query", "key", "value", "out_cotangent", "lse_cotangent")
    *inputs, of_out, of_lse = (floats[name] if structure.batched else floats[name][None] for name in names)
    call = reference.attend(*inputs, visible, **options)
    # its products may be rounded to the arrays' dtype, as those of results
    gradients = call.gradients(Bounded(of_out.value, of_out.rounding, np.zeros(of_out.shape)), of_lse)
    results = {"out": call.out, "lse": call.lse} | {f"d {name}": gradients[name] for name in structure.learned}
    if structure.weights:
        results["weights"] = call.weights
    if structure.statistics:
        beside = structure.sequences(arrays) | {"tokens": arrays.get("tokens")}
        beside["counts"] = arrays.get("eligible", beside["counts"])
        if structure.mod is not None or "bias" in arrays:
            beside["lowest"] = float(max(-1e8, np.finfo(np.float16).min / 2 if structure.dtype == np.float16 else -1e8))
        of = reference.statistics(call.scores, visible, slots=structure.slots(), **beside)
        results |= {f"of {name}": x for name, x in of.items()}
    if structure.batched:
        return results
    alone = {"out", "lse", "d query", "d key", "d value", "weights"}
    return {name: x[0] if name in alone or name.startswith("of ") else x for name, x in results.items()}


def _expected_layer(structure: Structure, arrays: Arrays) -> dict[str, Any]:
    floats, options = _arguments(structure, arrays)
    parameters = {f"{name} {part}": floats[f"{name} {part}"] for name in LAYER for part in ("kernel", "bias")}
    arguments = floats["inputs_q"], floats["inputs_k"], parameters, floats["out_cotangent"]
    results = reference.layer(*arguments, structure.visible(arrays), **options)
    return {name: results[name] for name in ("out", *(f"d {name}" for name in structure.learned))}


class CallTrial(Trial):
    """A structure and its program, which is compiled when the first case runs."""

    def __init__(self, seed: int, index: int, mode: str):
        super().__init__(seed, index)
        self.structure = draw_structure(seed, index, mode)
        self.label, self.eager = f"{self.structure.dtype.name}, {self.structure.implementation}", self.structure.eager
        self.outcomes, self.jitted = self.structure.covers(), None

    def run(self, arrays: Arrays, eagerly: bool = False) -> dict[str, np.ndarray]:
        """Computes the results with jattn."""
        recipes = self.structure.recipes.items() if self.structure.static else ()
        static = {name for name, recipe in recipes if not recipe.learned}
        if self.jitted is None:  # the constants are the same in every draw
            self.program = make_program(self.structure, {name: arrays[name] for name in static})
            self.jitted = jax.jit(self.program)
        with jax.enable_x64(self.structure.x64):
            arguments = {name: x for name, x in arrays.items() if name not in static}
            program = self.program if eagerly else self.jitted
            if self.structure.form != "threads":
                return jax.device_get(program(arguments))

            def in_thread(_: int) -> dict[str, np.ndarray]:
                with jax.enable_x64(self.structure.x64):  # a setting of its thread
                    return jax.device_get(program(arguments))

            with ThreadPoolExecutor(4) as threads:
                first, *others = threads.map(in_thread, range(4))
            for other in others:
                jax.tree.map(np.testing.assert_array_equal, other, first)
            return first

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """Also without jit, in the first draws of an eager structure."""
        arrays = draw_values(self.structure, self.seed, draw)
        wanted, wrong, worst = expected(self.structure, arrays), [], 0.0
        dtypes = {name: dtype for name, dtype in dtypes_of(self.structure, wanted).items() if "support" not in name}
        for eagerly in (False, True) if self.structure.eager and draw < EAGER else (False,):
            try:
                differences, ratio = compare(self.run(arrays, eagerly), wanted, dtypes)
            except Exception as error:  # the soak continues
                differences, ratio = [of_error(error)], 0.0
            wrong += [dataclasses.replace(x, name="eagerly, " * eagerly + x.name) for x in differences]
            worst = max(worst, ratio)
        return wrong, worst
