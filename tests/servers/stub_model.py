"""Qwen3 in numpy, float32: the result of one token depends on nothing but the tokens before it. Shapes: R rows (a token
of some sequence each), H hidden size, A query heads, K key heads, G query heads of each key head, D size of a head, T
length of a cache, V vocabulary."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_BLOCKS = (16, 8, 4, 2, 1)
_MOST_ROWS = max(_BLOCKS)


@dataclass(frozen=True)
class Shape:
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    tied: bool

    @classmethod
    def read(cls, model_dir: Path) -> Shape:
        """Read it. Raises `ValueError`: the model is not a plain Qwen3."""
        config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if config.get("model_type") != "qwen3" or rope.get("rope_type", "default") != "default":
            raise ValueError(f"the stub engine serves plain Qwen3 models, and {model_dir} holds {config!r:.200}")
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_key_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab_size=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
            tied=config["tie_word_embeddings"],
        )


class Cache:
    """Keys and values of sequences of at most T tokens, each in a slot of its own."""

    def __init__(self, shape: Shape, length: int) -> None:
        self.length = length
        self._free: list[int] = []
        self._size = (shape.num_layers, 0, shape.num_key_heads, length, shape.head_dim)
        self.keys = np.zeros(self._size, np.float32)
        self.values = np.zeros(self._size, np.float32)

    def take(self) -> int:
        if not self._free:
            count = self.keys.shape[1]
            more = np.zeros((self._size[0], max(8, count), *self._size[2:]), np.float32)
            self.keys = np.concatenate([self.keys, more], axis=1)
            self.values = np.concatenate([self.values, more], axis=1)
            self._free = list(range(count, self.keys.shape[1]))
        return self._free.pop()

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Give a slot the beginning of another one."""
        for cached in (self.keys, self.values):
            cached[:, target, :, :num_tokens] = cached[:, source, :, :num_tokens]


class Model:
    """The forward pass with one set of weights, by their names in files."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Floats]) -> None:
        self.shape = shape
        self._tensors = tensors
        halves = np.arange(0, shape.head_dim, 2, dtype=np.float32) / np.float32(shape.head_dim)
        self._frequencies = (np.float32(1) / np.float32(shape.rope_theta) ** halves).astype(np.float32)

    def logits(self, cache: Cache, tokens_R: Ints, positions_R: Ints, slots_R: Ints) -> Floats:
        """Return the logits (R, V) behind each token, whose keys and values are put into the cache. The tokens before a
        row's are in the cache, or rows as well."""
        num_rows = len(tokens_R)
        spare = -num_rows % _MOST_ROWS
        x_RH = self._tensors["model.embed_tokens.weight"][np.pad(tokens_R, (0, spare))]
        angles_RD = positions_R[:, None].astype(np.float32) * np.tile(self._frequencies, 2)
        cos_RD, sin_RD = np.cos(angles_RD), np.sin(angles_RD)
        past_RT = np.arange(cache.length) <= positions_R[:, None]
        for layer in range(self.shape.num_layers):
            name = f"model.layers.{layer}"
            y_RH = self._norm(x_RH, f"{name}.input_layernorm")
            q_RAD = self._heads(y_RH, f"{name}.self_attn.q", num_rows)
            k_RKD = self._heads(y_RH, f"{name}.self_attn.k", num_rows)
            v_RKD = self._linear(y_RH, f"{name}.self_attn.v_proj")[:num_rows].reshape(k_RKD.shape)
            cache.keys[layer, slots_R, :, positions_R] = _rotated(k_RKD, cos_RD, sin_RD)
            cache.values[layer, slots_R, :, positions_R] = v_RKD
            keys_RKTD, values_RKTD = cache.keys[layer, slots_R], cache.values[layer, slots_R]
            attended = _attend(_rotated(q_RAD, cos_RD, sin_RD), keys_RKTD, values_RKTD, past_RT)
            x_RH = x_RH + self._linear(np.pad(attended, ((0, spare), (0, 0))), f"{name}.self_attn.o_proj")
            y_RH = self._norm(x_RH, f"{name}.post_attention_layernorm")
            gate = self._linear(y_RH, f"{name}.mlp.gate_proj")
            gate = gate / (1 + np.exp(-gate)) * self._linear(y_RH, f"{name}.mlp.up_proj")
            x_RH = x_RH + self._linear(gate, f"{name}.mlp.down_proj")
        head = "model.embed_tokens" if self.shape.tied else "lm_head"
        return self._linear(self._norm(x_RH, "model.norm"), head)[:num_rows]

    def _heads(self, x_RH: Floats, name: str, num_rows: int) -> Floats:
        projected = self._linear(x_RH, f"{name}_proj")[:num_rows]
        return self._norm(projected.reshape(num_rows, -1, self.shape.head_dim), f"{name}_norm")

    def _linear(self, x_RI: Floats, name: str) -> Floats:
        weight_OI = self._tensors[f"{name}.weight"]
        return _multiply(x_RI, weight_OI, _block_of(*weight_OI.shape))

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.shape.norm_eps))
        return x * scale * self._tensors[f"{name}.weight"]


def _rotated(x_RAD: Floats, cos_RD: Floats, sin_RD: Floats) -> Floats:
    first, second = np.split(x_RAD, 2, axis=-1)
    return x_RAD * cos_RD[:, None] + np.concatenate([-second, first], axis=-1) * sin_RD[:, None]


def _attend(q_RAD: Floats, keys_RKTD: Floats, values_RKTD: Floats, past_RT: NDArray[np.bool_]) -> Floats:
    """Return what the heads of each row read, (R, A * D)."""
    num_rows, num_heads, size = q_RAD.shape
    q_RKGD = q_RAD.reshape(num_rows, keys_RKTD.shape[1], -1, size)
    scores_RKGT = np.matmul(q_RKGD, keys_RKTD.swapaxes(-1, -2)) * np.float32(size**-0.5)
    scores_RKGT = np.where(past_RT[:, None, None], scores_RKGT, np.float32(-np.inf))
    weights_RKGT = np.exp(scores_RKGT - scores_RKGT.max(axis=-1, keepdims=True))
    weights_RKGT /= weights_RKGT.sum(axis=-1, keepdims=True)
    return np.matmul(weights_RKGT, values_RKTD).reshape(num_rows, num_heads * size)


def _multiply(x_RI: Floats, weight_OI: Floats, block: int) -> Floats:
    blocks_BIR = x_RI.reshape(-1, block, x_RI.shape[1]).swapaxes(1, 2)
    found_BRO = np.matmul(weight_OI, blocks_BIR).swapaxes(1, 2)
    # Numpy sums up a row whose numbers lie apart in another order.
    return np.ascontiguousarray(found_BRO.reshape(len(x_RI), len(weight_OI)))


@functools.cache
def _block_of(num_outputs: int, num_inputs: int) -> int:
    """Return how many rows at once this machine multiplies alike: a kernel may sum up the last of them otherwise."""
    random = np.random.default_rng(0)
    weight_OI = random.standard_normal((num_outputs, num_inputs), dtype=np.float32)
    for block in _BLOCKS:
        same_RI = np.tile(random.standard_normal(num_inputs, dtype=np.float32), (block, 1))
        if len({row.tobytes() for row in _multiply(same_RI, weight_OI, block)}) == 1:
            return block
    raise AssertionError("one row is like itself")
