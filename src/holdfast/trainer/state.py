"""The state of a training run in checkpoints: parameters, persistent buffers, optimizer moments, counters.

Learning rate and weight decay are functions of configuration and step. The checkpoint library adds the random
generators: `holdfast.trainer.checkpoint.state`.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from holdfast.trainer.checkpoint.state import State
from holdfast.trainer.model.build import trained_parameters, trained_tensors
from holdfast.trainer.model.decoder import DecoderModel
from holdfast.trainer.optimizer import initial_moments

_log = logging.getLogger("trainer")


class Progress(msgspec.Struct):
    """Counters of a run.

    Attributes:
        step: optimizer steps done; also the policy version.
        samples: trained samples; for `sft` the position in the endless sample order.
        tokens: of these samples, with prompts.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0

    def advance(self, *, samples: int, tokens: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens


class TrainState(State):
    """Policy, optimizer, counters, and further parts by name. Tensors of a part are saved as `NAME.*`."""

    def __init__(
        self,
        policy: DecoderModel,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        parts: Mapping[str, State] | None = None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.progress = progress
        self.parts = dict(parts or {})

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state by name: `model.*`, `optim.*`, `PART.*`. Loading writes into these."""
        tensors = ModelState(self.policy, self.optimizer).tensors()
        for part, state in self.parts.items():
            tensors |= {f"{part}.{name}": tensor for name, tensor in state.tensors().items()}
        return tensors

    def values(self) -> dict[str, Any]:
        """Return the counters, and the values of the parts."""
        values = {name: state.values() for name, state in self.parts.items()}
        return msgspec.to_builtins(self.progress) | {name: value for name, value in values.items() if value}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore counters and parts, and warn of parts that only one side has."""
        counters = {name: value for name, value in values.items() if name in Progress.__struct_fields__}
        restored = msgspec.convert(counters, Progress)
        for field in Progress.__struct_fields__:
            setattr(self.progress, field, getattr(restored, field))
        for name, state in self.parts.items():
            if name in values:
                state.restore(values[name])
            elif state.values():
                _log.warning("the checkpoint holds no %s: it starts from scratch", name)
        for name in values.keys() - counters.keys() - self.parts.keys():
            _log.warning("the checkpoint holds %s, which this configuration does not use: it is dropped", name)


class ModelState(State):
    """The tensors of a model and of its optimizer: `model.*`, `optim.*`."""

    def __init__(self, model: DecoderModel, optimizer: torch.optim.Optimizer) -> None:
        self._hf_model = model.hf_model
        self._optimizer = optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name; moments are created before the first step."""
        tensors = {f"model.{name}": tensor for name, tensor in trained_tensors(self._hf_model).items()}
        for name, parameter in trained_parameters(self._hf_model).items():
            state = self._optimizer.state[parameter]
            if not state:
                state |= initial_moments(self._optimizer, parameter)
            tensors |= {f"optim.{name}.{key}": state[key] for key in sorted(state)}
        return tensors
