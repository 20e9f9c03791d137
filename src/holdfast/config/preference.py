"""Settings of preference training: `dpo` and `reward-model`."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from holdfast.config.base import Section
from holdfast.config.losses_and_advantages import PREFERENCE_LOSSES
from holdfast.config.training import DpoOptimConfig, EvaluatedCommand, SftDataConfig, SupervisedCommand
from holdfast.errors import nearest

_HAS_REFERENCE = tuple(name for name, one in PREFERENCE_LOSSES.items() if one.has_reference)


class PreferenceLossConfig(Section):
    """The preference loss: which one, and its settings."""

    type: str = Field(
        default="dpo",
        description=", ".join(f"`{name}` ({one.source})" for name, one in PREFERENCE_LOSSES.items()) + ".",
    )

    beta: float | None = Field(default=None, gt=0)
    """With a reference: strength of the tie to it; `simpo`: scale of the reward; `orpo`: weight of the
    odds ratio beside the likelihood. Unset: 0.1, for `simpo` 2.0."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """`dpo`, `robust`: the share of pairs that are taken to be labelled the wrong way round."""

    margin: float | None = Field(default=None, ge=0)
    """`simpo`: how much more reward the chosen side should have. Unset: 0.5."""

    odpo_alpha: float = Field(default=0.0, ge=0)
    """`dpo`: this times a row's `margin` is how far apart the rewards of its two sides should be, beside what the loss
    asks for anyway (Amini et al. 2024, ODPO); 0: margins of rows are not read."""

    rpo_alpha: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's negative log-likelihood, a mean over its tokens, beside the loss (Pang et al. 2024,
    who take 1); `orpo` has such a term already."""

    desirable_weight: float = Field(default=1.0, gt=0)
    """`kto`: weight of good answers. The authors advise a ratio of this times their number to the same of bad ones
    between 1 and 4/3."""

    undesirable_weight: float = Field(default=1.0, gt=0)
    """`kto`: weight of bad answers."""

    reference: Literal["precomputed", "none"] | None = None
    """`precomputed`: log-probabilities under the reference, computed once before training; `none`: without
    one. Unset: none for `simpo` and `orpo`, which have none; precomputed for the others, of which all but `kto` can do
    without."""

    reference_model: str | None = Field(default=None, min_length=1)
    """Directory or hub name of the reference, a model with the policy's tokenizer; unset: the weights that the run
    starts with. It must not change during the run."""

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PREFERENCE_LOSSES:
            allowed = ", ".join(PREFERENCE_LOSSES)
            raise ValueError(f"there is no '{name}'.{nearest(name, PREFERENCE_LOSSES)} Allowed: {allowed}")
        return name

    @model_validator(mode="after")
    def _settle(self) -> Self:
        """Refuse what the loss does not know, and fill in what is unset."""
        built_in = PREFERENCE_LOSSES[self.type]
        if self.label_smoothing and not built_in.can_smooth:
            raise ValueError(
                f"label_smoothing = {self.label_smoothing} is for type = dpo and robust, got type = {self.type}"
            )
        if self.margin is not None and built_in.margin is None:
            raise ValueError(f"margin = {self.margin} is for type = simpo, got type = {self.type}")
        if self.odpo_alpha and (self.type != "dpo" or self.label_smoothing):
            raise ValueError(
                f"odpo_alpha = {self.odpo_alpha} is for type = dpo without label_smoothing, got type = {self.type} and "
                f"label_smoothing = {self.label_smoothing}: leave one of them out"
            )
        if self.rpo_alpha and self.type in ("orpo", "kto"):
            raise ValueError(
                f"rpo_alpha = {self.rpo_alpha} is for other types than orpo, whose first term is the likelihood of the "
                f"chosen answer, and kto, which has no pairs, got type = {self.type}: leave it out"
            )
        if self.type != "kto" and (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            raise ValueError(
                f"desirable_weight = {self.desirable_weight} and undesirable_weight = {self.undesirable_weight} are "
                f"for type = kto, got type = {self.type}: leave them out"
            )
        if self.type == "kto" and self.reference == "none":
            raise ValueError("reference = none is for other types than kto, which compares with a divergence from it")
        if self.reference == "precomputed" and not built_in.has_reference:
            raise ValueError(
                f"reference = precomputed is for {', '.join(_HAS_REFERENCE)}; {self.type} has no reference"
            )
        if self.reference_model is not None and (self.reference == "none" or not built_in.has_reference):
            raise ValueError(
                f"reference_model = '{self.reference_model}' has no use with type = {self.type} and reference = "
                f"{self.reference or 'none'}: leave it out"
            )
        if self.beta is None:
            self.beta = built_in.beta
        if self.margin is None:
            self.margin = built_in.margin
        if self.reference is None:
            self.reference = "precomputed" if built_in.has_reference else "none"
        return self

    @property
    def scale(self) -> float:
        """The resolved `beta`."""
        assert self.beta is not None, "the validator has filled it in"
        return self.beta


class PreferenceDataConfig(SftDataConfig):
    """The source of pairs, and how they become batches."""

    name: str = ""
    """Needed: a .jsonl, .json or .parquet file (JSON also as .gz), a directory of such files or of `save_to_disk`, or a
    dataset on a hub. Rows have `prompt`, `chosen` and `rejected` (all text, or all lists of messages), or `chosen`
    and `rejected` whose common beginning is the prompt; or, for `kto`, `prompt`, `completion` and `label`: see
    docs/data.md."""

    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the pairs held out for validation, chosen by `seed`."""

    batch_size: int = Field(default=64, ge=1)
    """Pairs of one optimizer step, over all ranks; answers for `dpo` with `loss.type = kto`."""

    micro_batch_size: int = Field(default=4, ge=1)
    """Pairs of full length in one forward pass on each rank, or twice as many answers of `kto`; gradients accumulate
    until the batch is done."""

    seq_len: int = Field(default=1024, ge=2, lt=2**31)
    """Most tokens of prompt and answer, for each side of a pair."""

    too_long: Literal["error", "drop", "truncate"] = "error"
    """The treatment of a pair that has a side of more than `seq_len` tokens. `drop` and `truncate` say how many."""

    train_on: Literal["all", "last"] = "all"
    """The part of an answer that counts, if the answer is a chat: `all` turns of the assistant after the prompt, or the
    `last` of them."""

    pack: bool = True
    """Fill micro-batches up to a budget of tokens, several pairs a row; sides and pairs never see each other. Models
    whose tokens meet outside of attention (docs/models.md) get one side a row, grouped by length. Off:
    `micro_batch_size` pairs at a time, one side a row."""


class DpoConfig(EvaluatedCommand):
    """Preference optimisation: `uv run dpo @ configs/reverse_text/dpo.toml`."""

    program = "dpo"

    optim: DpoOptimConfig = Field(default_factory=DpoOptimConfig)  # pyright: ignore[reportIncompatibleVariableOverride] - only read
    """Optimizer and learning-rate schedule."""

    data: PreferenceDataConfig = Field(default_factory=PreferenceDataConfig)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Pairs and batches."""

    loss: PreferenceLossConfig = Field(default_factory=PreferenceLossConfig)
    """Preference loss."""


class RewardLossConfig(Section):
    """The loss of a reward model: Bradley-Terry, -log sigmoid(r(chosen) - r(rejected) - margin of the row)."""

    center_coef: float = Field(default=0.0, ge=0)
    """Weight of (r(chosen) + r(rejected))², which keeps rewards around 0 (Eisenstein et al. 2023; they
    take 0.01). The first term sees differences only."""


class RewardTrainingConfig(SupervisedCommand):
    """Training of a reward model: `uv run reward-model @ configs/reverse_text/reward_model.toml`."""

    program = "reward-model"

    data: PreferenceDataConfig = Field(default_factory=PreferenceDataConfig)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Pairs and batches."""

    loss: RewardLossConfig = Field(default_factory=RewardLossConfig)
    """Loss of a pair."""

    @model_validator(mode="after")
    def _is_no_language_model(self) -> Self:
        if self.model.fp32_lm_head:
            raise ValueError(
                "model.fp32_lm_head is for language models; a reward model has no such layer: leave it out"
            )
        return self
