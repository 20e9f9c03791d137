"""A trainer of `rl` in the process of a test, without its loop over the journal."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.config import TrainerConfig
from holdfast.protocol.rollouts import Batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.rl.components import RlComponents
from holdfast.trainer.rl.train_step import Learner
from holdfast.trainer.session import Stopwatch, TrainSession, start_session


@dataclass
class LearnerRun:
    session: TrainSession[Policy]
    parts: RlComponents
    learner: Learner

    def learn_from(self, batch: Batch) -> dict[str, float]:
        return self.learner.learn(batch, Stopwatch())

    def save(self, step: int) -> None:
        self.session.progress.step = step
        self.session.checkpointer.save(step)
        self.session.checkpointer.wait()

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of everything that is in a checkpoint as tensors."""
        return {name: tensor.clone() for name, tensor in self.session.checkpointer._state.tensors().items()}


def start_learner(
    output: Path, name: Path, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, *, resume_step: int | None = None,
    **settings: Any,
) -> LearnerRun:  # fmt: skip
    """Start a trainer of the model `name` in `output`, or let it go on from a step that is saved there."""
    (output / "run.json").write_text('{"run_id": "r"}')
    values: dict[str, Any] = {
        "output_dir": output, "max_steps": 100, "model": {"name": str(name)}, "optim": {"lr": 1e-3},
        "mismatch_limit": math.inf,  # where rollouts are made up
        "ckpt": {"interval": 1} | ({"resume_step": resume_step} if resume_step else {}),
    }  # fmt: skip
    config = TrainerConfig.model_validate(values | settings)
    parts = RlComponents(config, mesh)
    session = start_session(config, mesh, tokenizer, build_policy, pack=True, components=parts.begin)
    return LearnerRun(session, parts, Learner(config, session, parts, None))
