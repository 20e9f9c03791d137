"""Settings of preference training: `dpo` and `reward-model`."""

# Types narrow the type of their base, which nobody sets.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from holdfast.config.base import Section
from holdfast.config.by_type import ByType, models_by_type
from holdfast.config.data import SftDataConfig
from holdfast.config.training import EvaluatedCommand, SupervisedCommand


class PreferenceLossConfig(Section):
    """The preference loss, see docs/preferences.md."""

    type: str
    """`dpo` (Rafailov et al. 2023), `ipo` (Azar et al. 2023, by the mean log-ratio of an answer's tokens), `ipo_sum`
    (the same, by their sum), `hinge` (Zhao et al. 2023), `robust` (Chowdhury et al. 2024), `apo_zero` (D'Oosterlinck
    et al. 2024), `apo_down` (the same), `simpo` (Meng et al. 2024), `orpo` (Hong et al. 2024), `kto` (Ethayarajh et
    al. 2024, which takes answers that are labelled one by one too)."""

    beta: float = Field(default=0.1, gt=0)
    """With a reference: strength of the tie to it; `simpo`: scale of the reward; `orpo`: weight of the
    odds ratio beside the likelihood."""

    @staticmethod
    def of(**settings: Any) -> "AnyPreferenceLoss":
        """Return the loss that `type` names, with these settings. Raise pydantic's ValidationError for others."""
        return TypeAdapter[AnyPreferenceLoss](AnyPreferenceLoss).validate_python(settings)


class PairLoss(PreferenceLossConfig):
    """A loss of pairs without a likelihood."""

    rpo_alpha: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's negative log-likelihood, a mean over its tokens, beside the loss (Pang et al. 2024,
    who take 1); `orpo` has such a term already."""


class ReferencedLoss(PreferenceLossConfig):
    """A loss that compares with a reference."""

    reference: Literal["precomputed", "none"] = "precomputed"
    """`precomputed`: log-probabilities under the reference, computed once before training; `none`: without one. `kto`
    cannot do without."""

    reference_model: str | None = Field(default=None, min_length=1)
    """Directory or hub name of the reference, a model with the policy's tokenizer; unset: the weights that the run
    starts with. It must not change during the run."""

    @model_validator(mode="after")
    def _has_a_use_for_a_model(self) -> Self:
        if self.reference_model is not None and self.reference == "none":
            raise ValueError(
                f"reference_model = '{self.reference_model}' has no use with reference = none: leave one of them out"
            )
        return self


class ReferencedPairLoss(ReferencedLoss, PairLoss):
    """A loss of pairs that compares with a reference."""

    type: Literal["ipo", "ipo_sum", "hinge", "apo_zero", "apo_down"]


class RobustLoss(ReferencedPairLoss):
    """A loss of labels that may be wrong."""

    type: Literal["robust"] = "robust"

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The share of pairs that are taken to be labelled the wrong way round."""


class DpoLoss(RobustLoss):
    """DPO."""

    type: Literal["dpo"] = "dpo"

    odpo_alpha: float = Field(default=0.0, ge=0)
    """This times a row's `margin` is how far apart the rewards of its two sides should be, beside what the loss
    asks for anyway (Amini et al. 2024, ODPO); 0: margins of rows are not read."""

    @model_validator(mode="after")
    def _smooths_or_reads_margins(self) -> Self:
        if self.odpo_alpha and self.label_smoothing:
            raise ValueError(
                f"odpo_alpha = {self.odpo_alpha} does not go with label_smoothing = {self.label_smoothing}: leave one "
                "of them out"
            )
        return self


class SimpoLoss(PairLoss):
    """SimPO."""

    type: Literal["simpo"] = "simpo"
    beta: float = Field(default=2.0, gt=0)

    margin: float = Field(default=0.5, ge=0)
    """How much more reward the chosen side should have."""


class OrpoLoss(PreferenceLossConfig):
    """ORPO."""

    type: Literal["orpo"] = "orpo"


class KtoLoss(ReferencedLoss):
    """KTO, of single answers."""

    type: Literal["kto"] = "kto"
    reference: Literal["precomputed"] = "precomputed"

    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of good answers. The authors advise a ratio of this times their number to the same of bad ones between 1
    and 4/3."""

    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of bad answers."""


AnyPreferenceLoss = Annotated[DpoLoss | ReferencedPairLoss | RobustLoss | SimpoLoss | OrpoLoss | KtoLoss, ByType("dpo")]

PREFERENCE_LOSSES = models_by_type(AnyPreferenceLoss, PreferenceLossConfig)
"""The model of each preference loss."""


class PreferenceDataConfig(SftDataConfig):
    """The source of pairs, and how they become batches."""

    name: str = ""
    """Needed: a .jsonl, .json, .csv, .parquet or .arrow file (JSON and CSV also as .gz or .zst), a directory of such
    files or of `save_to_disk`, a glob, or a dataset on a hub. Rows have `prompt`, `chosen` and `rejected` (all text, or
    all lists of messages), or `chosen` and `rejected` whose common beginning is the prompt; or, for `kto`, `prompt`,
    `completion` and `label`: see docs/data.md."""

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
    rates = {"lr": 1e-6, "schedule": "linear"}

    data: PreferenceDataConfig = Field(default_factory=PreferenceDataConfig)
    """Pairs and batches."""

    loss: AnyPreferenceLoss = Field(default_factory=DpoLoss)
    """Preference loss."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return isinstance(self.loss, ReferencedLoss) and self.loss.reference != "none"

    @property
    def reference_model(self) -> str | None:
        """The model of the reference; None for the weights that the run starts with, or without a reference."""
        return self.loss.reference_model if isinstance(self.loss, ReferencedLoss) else None


class RewardLossConfig(Section):
    """The loss of a reward model: Bradley-Terry, -log sigmoid(r(chosen) - r(rejected) - margin of the row)."""

    center_coef: float = Field(default=0.0, ge=0)
    """Weight of (r(chosen) + r(rejected))², which keeps rewards around 0 (Eisenstein et al. 2023; they
    take 0.01). The first term sees differences only."""


class RewardTrainingConfig(SupervisedCommand):
    """Training of a reward model: `uv run reward-model @ configs/reverse_text/reward_model.toml`."""

    program = "reward-model"

    data: PreferenceDataConfig = Field(default_factory=PreferenceDataConfig)
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
