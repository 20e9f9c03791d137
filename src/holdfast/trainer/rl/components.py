"""The components of an RL run beside policy and optimizer, and their state. The algorithm asks for them.

Every component is in the checkpoints: tensors as `NAME.*`, values below `NAME`.
"""

import torch

from holdfast.config import TrainerConfig
from holdfast.errors import DataError
from holdfast.process.events import report
from holdfast.trainer.checkpoint.state import State
from holdfast.trainer.data.samples import refuse_other_tokens
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.decoder import freeze
from holdfast.trainer.model.parity_check import check_model, was_checked
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.model.value_model import ScalarModel
from holdfast.trainer.rl.auxiliary_models import Critic, Ema, FrozenModel, RewardModel, SyncedReference
from holdfast.trainer.rl.kl import EntropyCoefficient, KlCoefficient
from holdfast.trainer.rl.rewards import RunningMoments


class RlComponents:
    """The components of one run; A component that the configuration does not need is None. Collective to make. Raise
    ConfigError if a setting is missing; DataError if a model cannot be loaded, or knows the policy's tokens by other
    ids."""

    def __init__(self, config: TrainerConfig, mesh: Mesh) -> None:
        self._config = config
        self._mesh = mesh
        self._state: dict[str, State] = {}
        self.kl: KlCoefficient | None = None
        self.entropy: EntropyCoefficient | None = None
        self.reference: Policy | None = None
        self.synced: SyncedReference | None = None
        self.critic: Critic | None = None
        self.reward_model: RewardModel | None = None
        self.moments: RunningMoments | None = None
        self.ema: Ema | None = None
        if config.kl is not None:
            name = _reference_name(config)
            report("loading the reference", model=name)
            # A named reference has its own weights, also beside a policy with random weights.
            init = config.model.init if config.kl.reference is None else "pretrained"
            if config.kl.reference is not None:
                refuse_other_tokens(name, config.model.tokenizer_name, key="kl.reference")
            model = config.model.model_copy(update={"name": name, "lora": None, "init": init})
            self.reference = build_policy(model, mesh, seed=config.seed)
            freeze(self.reference)
            if config.kl.refresh_interval is None:
                self._state["reference"] = FrozenModel(name, self.reference.hf_model, key="kl.reference")
            self.kl = KlCoefficient(config.kl.coef, target=config.kl.target, horizon=config.kl.horizon)
            self._state["kl"] = self.kl
        if config.loss.entropy.coef > 0 or config.loss.entropy.target is not None:
            self._state["entropy"] = self.entropy = EntropyCoefficient(config.loss.entropy)
        if config.critic is not None:
            report("loading the critic", model=config.critic.name or config.model.name)
            if config.critic.name is not None:
                refuse_other_tokens(config.critic.name, config.model.tokenizer_name, key="critic.name")
            self.critic = Critic(config.critic, config.model, mesh, seed=config.seed)
            self._state["critic"] = self.critic.state
        if config.reward_model is not None:
            name = config.reward_model.name
            report("loading the reward model", model=name)
            self.reward_model = RewardModel(name, config.model, mesh)
            self._state["reward_model"] = FrozenModel(name, self.reward_model.model.hf_model, key="reward_model.name")
        if config.rewards.scale == "running":
            self._state["reward_moments"] = self.moments = RunningMoments()

    def begin(self, policy: Policy) -> tuple[dict[str, State], list[torch.optim.Optimizer]]:
        """Return the state of the components by name, and the optimizers that change it. `policy`: with the weights
        that a new run begins with. Raise DataError if the reference does not fit the policy."""
        tensors, kl = trained_tensors(policy.hf_model), self._config.kl
        if self._config.ema is not None:
            self._state["ema"] = self.ema = Ema(tensors, decay=self._config.ema.decay)
        if kl is not None and kl.refresh_interval is not None and self.reference is not None:
            name, hf_model = _reference_name(self._config), self.reference.hf_model
            self._state["reference"] = self.synced = SyncedReference(
                name, hf_model, tensors, interval=kl.refresh_interval
            )
        distillation = self._config.distillation
        if distillation is not None and distillation.divergence == "full" and self.reference is not None:
            _check_comparable(policy, self.reference, name=_reference_name(self._config))
        return self._state, [self.critic.optimizer] if self.critic is not None else []

    def shares_prompts(self, policy: Policy) -> bool:
        """Whether answers share the tokens of their prompt in the rows that all models read."""
        models = [policy, self.reference, self.critic and self.critic.model]
        return self._config.share_prompts and all(model.layout.shares for model in models if model is not None)

    def after_step(self, step: int, policy: Policy) -> None:
        """Update the moving average and the reference with the weights of `step`."""
        tensors = trained_tensors(policy.hf_model)
        if self.ema is not None:
            self.ema.update(tensors)
        if self.synced is not None:
            self.synced.after_step(step, tensors)

    def check_models(self) -> None:
        """Compare every model beside the policy with transformers' own forward pass. Collective. Raise DataError if one
        differs."""
        config, shares = self._config, self._config.share_prompts
        if was_checked(config):
            return
        models: list[tuple[Policy | ScalarModel, str, bool]] = []
        if self.reference is not None:
            models.append((self.reference, _reference_name(config), shares))
        if config.critic is not None and self.critic is not None:
            models.append((self.critic.model, config.critic.name or config.model.name, shares))
        if config.reward_model is not None and self.reward_model is not None:
            models.append((self.reward_model.model, config.reward_model.name, False))
        for model, name, share in models:
            check_model(model, self._mesh, name=name, pack=True, share=share, dtype=config.model.compute_dtype)


def _reference_name(config: TrainerConfig) -> str:
    assert config.kl is not None
    return config.kl.reference or config.model.name


def _check_comparable(policy: Policy, teacher: Policy, *, name: str) -> None:
    own, other = (one.hf_model.config.get_text_config().vocab_size for one in (policy, teacher))
    if own != other:
        raise DataError(
            f"distillation.divergence = 'full' compares whole vocabularies: kl.reference = '{name}' has {other} "
            f"tokens, the policy {own}. Set distillation.divergence = 'sampled', or name a teacher with the same"
        )
    if policy.layout.packs != teacher.layout.packs:
        raise DataError(
            f"distillation.divergence = 'full' has the teacher read the rows of the policy, and only one of them takes "
            f"several samples a row (kl.reference = '{name}'): set distillation.divergence = 'sampled'"
        )
