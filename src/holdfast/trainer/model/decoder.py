"""A transformers model and how samples lie in its rows: what policy, reward model and critic have in common.

Shape legend: B rows, L tokens of a row, N predicted tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
)

from holdfast.errors import DataError
from holdfast.trainer.data.packing import PackedIndex
from holdfast.trainer.mesh import SequenceGroup
from holdfast.trainer.model.context_parallel import RowSlice, reason_against
from holdfast.trainer.model.packing_check import PACKED, find_layout
from holdfast.trainer.model.structure import decoder_of, last_position, pair_cost, rotate_by_sample, takes_positions


def freeze(model: nn.Module) -> None:
    """Take a model out of training, without dropout."""
    model.eval()
    model.requires_grad_(False)


T = TypeVar("T")


class DecoderModel(nn.Module):
    """A transformers model and how samples lie in its rows: what `Policy` and `ScalarModel` have in common.

    Attributes:
        layout: whether samples can share a row, what they cost there, and the attention to use.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.layout = PACKED
        self._needs_positions = rotate_by_sample(hf_model)
        self._last_position = last_position(hf_model)
        self._sequence: SequenceGroup | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Return what `function` does with the whole parameters, as `forward` sees them. Collective."""
        return function()

    def prepare(self) -> None:
        """Find out how the model is to be used. Called once, inside `run`, while all weights are 1; collective."""
        if self._needs_positions and not takes_positions(self.hf_model):
            raise DataError(
                f"{type(self.hf_model).__name__} turns its rotary embeddings by the length of a row (rope_type in its "
                "config.json) and takes no positions of tokens, so samples of a row cannot be told apart"
            )
        found = find_layout(self.hf_model, self._all_hidden_states, self.layout.attention)
        # Rotary embeddings that turn by the length of a sample turn a prompt's tokens otherwise for each answer.
        shares = found.packs and found.attention == "packed" and not self._needs_positions
        self.layout = replace(found, pair_cost=pair_cost(self.hf_model), shares=shares)

    def share_rows(self, ranks: SequenceGroup | None) -> None:
        """Have ranks share the rows of every pass from now on. Called behind `prepare`.

        Raises:
            DataError: the model does not allow it.
        """
        if ranks is None:
            return
        reason = self.layout.reason
        if not reason and self.layout.attention != "packed":
            reason = f"model.attention = {self.layout.attention}, and only packed attention is computed so"
        if not reason and self._needs_positions:
            reason = "its rotary embeddings turn by the length of a sample, which a slice does not show"
        for heads, key_heads in sorted(self.layout.heads):
            reason = reason or reason_against(heads, key_heads, ranks.size)
        if reason:
            raise DataError(
                f"parallel.sequence_parallel = {ranks.size}: {type(self.hf_model).__name__} cannot be computed in "
                f"slices of its rows: {reason}. Set parallel.sequence_parallel = 1 or another number"
            )
        self._sequence = ranks

    def row_slice(self, rows_BL: Tensor) -> RowSlice | None:
        """Return which tokens of the rows this rank computes; None: all."""
        return None if self._sequence is None else RowSlice(self._sequence, rows_BL.shape[1])

    def _all_hidden_states(self, input_ids_1L: Tensor) -> Tensor:
        positions_1L = torch.arange(input_ids_1L.shape[1], device=input_ids_1L.device)[None]
        index = PackedIndex.from_lengths([input_ids_1L.shape[1]], device=input_ids_1L.device)
        return self.hidden_states(
            input_ids_1L, positions_1L, positions_1L[0], packed_index=index if self.layout.packs else None
        )

    def hidden_states(
        self, input_ids_BL: Tensor, position_ids_BL: Tensor, index_N: Tensor, *, packed_index: PackedIndex | None
    ) -> Tensor:
        """Return the decoder's hidden states (N, H) at places in the flattened (B * L) rows; of these, those in
        this rank's slice where ranks share rows: see `row_slice`.

        Args:
            packed_index: layout of samples when the single row is packed.

        Raises:
            DataError: a sample is longer than the model has positions.
        """
        longest = input_ids_BL.shape[1] if packed_index is None else packed_index.max_len
        if self._last_position is not None and longest > self._last_position:
            raise DataError(
                f"a sample has {longest} tokens, and {type(self.hf_model).__name__} has positions for "
                f"{self._last_position} (max_position_embeddings in its config.json): shorten it"
            )
        kwargs: dict[str, object] = {}
        if (row := self.row_slice(input_ids_BL)) is not None:
            kwargs["row_slice"] = row
            index_N = row.places(index_N)
            input_ids_BL, position_ids_BL = row.of(input_ids_BL), row.of(position_ids_BL)
        decoder = decoder_of(self.hf_model)
        if self.layout.packs or self._needs_positions:
            kwargs["position_ids"] = position_ids_BL
        if packed_index is not None:
            assert self.layout.packs, f"{type(self.hf_model).__name__} cannot be packed: {self.layout.reason}"
            if self.layout.attention == "packed":
                kwargs["packed_index"] = packed_index
            else:
                borders, longest = packed_index.cu_seqlens, packed_index.max_len
                kwargs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
                kwargs |= {"max_length_q": longest, "max_length_k": longest}
        output = decoder(input_ids=input_ids_BL, use_cache=False, **kwargs)
        return output.last_hidden_state.flatten(0, 1).index_select(0, index_N)
