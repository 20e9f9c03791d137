"""AdamW, Muon against torch's own, clipping, the learning-rate schedule, and the moving average of weights."""

import math

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, get_scheduler

from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import AdamWConfig, MuonConfig, SftConfig, learning_rate, schedule_end
from holdfast.errors import TrainingError
from holdfast.trainer import optimizer as trainer_optimizer
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.tensor_names import DTYPES
from holdfast.trainer.optimizer import build_optimizer, check_finite, clip_gradients, hidden_matrices, update_parameters
from holdfast.trainer.rl.auxiliary_models import Ema
from holdfast.trainer.session import Stopwatch, memory_gib
from tests.conftest import ModelFactory


@pytest.mark.parametrize("low", [0.0, 0.2, 0.9])
@pytest.mark.parametrize(("warmup", "end"), [(0, 1), (1, 2), (2, 3), (3, 50), (0, 20), (1, 20), (4, 20)])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
def test_rates_are_those_of_transformers_without_a_step_at_0(schedule: str, warmup: int, end: int, low: float) -> None:
    """So every step trains, and the first behind the warm-up at the peak."""
    config = AdamWConfig(lr=0.25, warmup_steps=warmup, schedule=schedule, min_lr_ratio=low)  # type: ignore[arg-type]
    ours = [learning_rate(step, config, end) for step in range(1, end + 1)]
    assert min(ours) > 0 and ours[warmup] == max(ours) == 0.25
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.25)
    of_wsd = {"num_decay_steps": max(1, end // 10), "decay_type": "linear", "min_lr_ratio": low}
    name, fields = {
        "constant": ("constant_with_warmup", {}), "linear": ("polynomial", {"lr_end": 0.25 * low, "power": 1.0}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": low}), "inverse_sqrt": ("inverse_sqrt", {}),
        "wsd": ("warmup_stable_decay", of_wsd),
    }[schedule]  # fmt: skip
    scheduler = get_scheduler(name, optimizer, warmup, end, fields)
    theirs = []
    for _ in range(end):
        theirs += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
    if schedule != "wsd":  # whose warm-up begins at the lowest rate there
        assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_schedule_that_ends_at_a_step_of_its_own_ignores_max_steps(schedule: str) -> None:
    fixed = AdamWConfig(lr=0.25, warmup_steps=4, min_lr_ratio=0.1, schedule=schedule, schedule_steps=20)  # type: ignore[arg-type]
    stretched = fixed.model_copy(update={"schedule_steps": None})
    for step in range(1, 21):
        assert learning_rate(step, fixed, 40) == learning_rate(step, fixed, 5) == learning_rate(step, stretched, 20)
    assert {learning_rate(step, fixed, 40) for step in (20, 21, 30, 40)} == {learning_rate(20, stretched, 20)}
    assert learning_rate(21, stretched, 40) > 0.1, "without it the schedule is stretched to max_steps"
    assert (schedule_end(fixed, 40), schedule_end(stretched, 40), schedule_end(AdamWConfig(), 40)) == (20, 40, None)


def test_warm_up_must_fit_before_the_end_of_the_schedule_and_muon_what_is_trained() -> None:
    with pytest.raises(ValueError, match="warmup_steps .5. must be below optim.schedule_steps .5."):
        SftConfig.model_validate({"max_steps": 40, "optim": {"warmup_steps": 5, "schedule_steps": 5}})
    with pytest.raises(ValueError, match="warmup_steps .5. must be below max_steps .5."):
        SftConfig.model_validate({"max_steps": 5, "optim": {"warmup_steps": 5}})
    SftConfig.model_validate({"max_steps": 5, "optim": {"warmup_steps": 5, "schedule_steps": 6}})
    with pytest.raises(ValueError, match="critic.optim.warmup_steps .5. must be below max_steps .5."):
        critic = {"optim": {"warmup_steps": 5}}
        TrainerConfig.model_validate({"max_steps": 5, "advantage": "gae", "critic": critic})
    for refused, said in (
        ({"schedule": "wsd", "decay_steps": 3, "warmup_steps": 3}, "are more than max_steps .5."),
        ({"schedule": "cosine", "decay_steps": 3}, "decay_steps = 3 has no effect with .* set schedule to 'wsd'"),
        ({"schedule": "inverse_sqrt", "min_lr_ratio": 0.1}, "has no effect with .* 'linear', 'cosine' or 'wsd'"),
    ):
        with pytest.raises(ValueError, match=said):
            critic = {"optim": refused}
            TrainerConfig.model_validate({"max_steps": 5, "advantage": "gae", "critic": critic})
    for refused in ({"betas": (0.997, 0.95)}, {"betas": (0.9, 0.999)}, {"type": "muon", "momentum": 0.998}):
        with pytest.raises(ValueError, match="moments_dtype = 'bfloat16' needs decay rates of at most 0.96"):
            SftConfig.model_validate({"optim": refused | {"moments_dtype": "bfloat16"}})
    for config in (SftConfig, TrainerConfig):
        with pytest.raises(ValueError, match="optim.type = 'muon' is for whole matrices, and model.lora"):
            config.model_validate({"optim": {"type": "muon"}, "model": {"lora": {}}})
        with pytest.raises(ValueError, match="optim.type = 'muon' does not go with parallel.expert_parallel"):
            config.model_validate({"optim": {"type": "muon"}, "parallel": {"num_ranks": 2, "expert_parallel": 2}})
    with pytest.raises(ValueError, match="critic.optim.type = 'muon' does not go with parallel.expert_parallel"):
        critic, parallel = {"optim": {"type": "muon"}}, {"num_ranks": 2, "expert_parallel": 2}
        TrainerConfig.model_validate({"advantage": "gae", "critic": critic, "parallel": parallel})


@pytest.mark.parametrize(("limit", "scale"), [(math.inf, 1.0), (20.0, 1.0), (5.0, 0.5)])
def test_gradients_are_clipped_to_the_global_norm(limit: float, scale: float) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    parameters = list(model.parameters())
    gradients = [torch.tensor([[6.0]]), torch.tensor([8.0]), torch.tensor([[0.0]])]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    assert clip_gradients(model, limit) == pytest.approx(10.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)])
def test_broken_numbers_stop_training_with_advice(loss: float, norm: float) -> None:
    with pytest.raises(TrainingError, match="step 7: loss is .* Lower optim.lr") as caught:
        check_finite(7, loss=loss, grad_norm=norm)
    assert caught.value.exit_code == 3
    advice = "continue with --ckpt.resume-step latest, or start again with --clean if there is no checkpoint."
    assert str(caught.value).endswith(f"or look at this step's data; then {advice}")
    check_finite(7, loss=1.0, grad_norm=0.0)


def test_the_stopwatch_sums_phases_and_starts_again() -> None:
    stopwatch = Stopwatch()
    for _ in range(2):
        with stopwatch.phase("data"):
            pass
    with pytest.raises(KeyError), stopwatch.phase("failed"):
        raise KeyError
    taken = stopwatch.take()
    assert taken.keys() == {"time/data", "time/failed", "time/step"}
    assert 0 < taken["time/data"] <= taken["time/step"] and stopwatch.take().keys() == {"time/step"}


def test_memory_and_reductions_of_one_rank(mesh: Mesh) -> None:
    resident = psutil.Process().memory_info().rss / 1024**3
    assert memory_gib(mesh) == pytest.approx(resident, rel=0.2)
    values = {"a": 1.5, "b": 2.0**60 + 1}
    assert mesh.sum(values) == mesh.max(values) == values and mesh.is_main


MUON = MuonConfig(lr=0.02, momentum=0.9, weight_decay=0.1)


def names_of(model: nn.Module) -> set[str]:
    """The last parts of the names of what Muon takes of a model."""
    chosen = {id(matrix) for matrix in hidden_matrices(model)}  # type: ignore[arg-type]
    return {".".join(name.split(".")[-2:]) for name, one in model.named_parameters() if id(one) in chosen}


def test_embeddings_heads_norms_and_biases_are_not_for_muon(tiny_model: ModelFactory) -> None:
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    linear = {f"{name}.weight" for name in (*attention, *mlp)}
    assert names_of(AutoModelForCausalLM.from_pretrained(tiny_model(tied=False))) == linear
    assert names_of(AutoModelForSequenceClassification.from_pretrained(tiny_model("llama"), num_labels=1)) == linear
    gpt2 = names_of(AutoModelForCausalLM.from_pretrained(tiny_model("gpt2")))
    assert gpt2 == {"c_attn.weight", "c_proj.weight", "c_fc.weight"}
    stacked = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_pretrained(tiny_model("gpt_oss", tied=False, **stacked))
    assert names_of(model) == {f"{name}.weight" for name in (*attention, "router")}
    decayed, *_ = build_optimizer(model, AdamWConfig(weight_decay=0.1)).param_groups
    biases = {id(one) for name, one in model.named_parameters() if name.endswith("bias")}
    assert biases.isdisjoint(map(id, decayed["params"])), "experts have biases of two dimensions"


@pytest.mark.parametrize(("weight_decay", "dtype"), [(0.0, "float32"), (0.1, "float32"), (0.1, "bfloat16")])
def test_steps_are_those_of_torch(tiny_model: ModelFactory, weight_decay: float, dtype: str) -> None:
    """Of torch with moments that are rounded after each step, if ours are held in bfloat16."""
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tiny_model(tied=False)) for _ in range(2))
    optimizer = build_optimizer(ours, MUON.model_copy(update={"weight_decay": weight_decay, "moments_dtype": dtype}))
    matrices = hidden_matrices(theirs)
    known = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in theirs.parameters() if id(parameter) not in known]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [one for one in rest if one.ndim >= 2], "weight_decay": weight_decay},
            {"params": [one for one in rest if one.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.02, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for lr in (0.01, 0.02, 0.005):
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        update_parameters(optimizer, lr=lr)
        for one in (muon, adamw):
            update_parameters(one, lr=lr)
            for state in one.state.values():
                for key in state.keys() - {"step"}:
                    state[key] = state[key].to(DTYPES[dtype]).float()
    assert all(parameter.grad is None for parameter in ours.parameters())
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, msg=name)
        held: dict[str, Tensor] = optimizer.state[own]
        expected = (muon if id(other) in known else adamw).state[other]
        assert held.keys() == expected.keys() and {one.dtype for one in held.values()} <= {torch.float32, DTYPES[dtype]}
        assert all(torch.equal(one.float(), expected[key]) for key, one in held.items()), name


COMPACT = AdamWConfig(weight_decay=0.1, moments_dtype="bfloat16")


def rounded(wide: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even, by bits."""
    bits = wide.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("steps", [1, 20])
def test_moments_in_bfloat16_are_those_that_numpy_calculates(steps: int) -> None:
    drawn = np.random.default_rng(0)
    weights, first, second = drawn.standard_normal((3, 257)), np.zeros((3, 257)), np.zeros((3, 257))
    parameter = nn.Parameter(torch.from_numpy(weights.astype(np.float32)))
    optimizer = build_optimizer(nn.ParameterList([parameter]), COMPACT)
    for step in range(1, steps + 1):
        gradient = drawn.standard_normal((3, 257), dtype=np.float32)
        parameter.grad = torch.from_numpy(gradient)
        update_parameters(optimizer, lr=0.01)
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * np.square(gradient, dtype=np.float64)
        root = np.sqrt(second / (1 - 0.95**step)) + 1e-8
        weights = weights * (1 - 0.01 * 0.1) - 0.01 * first / (1 - 0.9**step) / root
        first, second = (rounded(one).astype(np.float64) for one in (first, second))
    torch.testing.assert_close(parameter.double().detach(), torch.from_numpy(weights), rtol=0, atol=3e-7 * steps)
    for key, expected in (("exp_avg", first), ("exp_avg_sq", second)):
        held = optimizer.state[parameter][key]
        apart = held.view(torch.int16).int() - torch.from_numpy(expected).bfloat16().view(torch.int16).int()
        assert held.dtype == torch.bfloat16 and int(apart.abs().max()) <= 1
        assert float((apart != 0).double().mean()) < 0.01


def test_what_is_kept_of_a_parameter_is_what_a_first_step_makes(tiny_model: ModelFactory) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    for config in (MUON, AdamWConfig(), COMPACT, MUON.model_copy(update={"moments_dtype": "bfloat16"})):
        optimizer = build_optimizer(model, config)
        made = {parameter: trainer_optimizer.initial_moments(optimizer, parameter) for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        update_parameters(optimizer, lr=1e-3)
        for parameter, moments in made.items():
            state: dict[str, Tensor] = optimizer.state[parameter]
            assert {key: (one.shape, one.dtype) for key, one in moments.items()} == {
                key: (one.shape, one.dtype) for key, one in state.items()
            }
            assert not any(one.any() for one in moments.values())


def test_a_parameter_without_a_gradient_stays(tiny_model: ModelFactory) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    update_parameters(build_optimizer(model, MUON), lr=0.1)
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


def test_many_updates_equal_the_weighted_sum_over_all_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(7, generator=generator) for _ in range(40)]
    ema = Ema({"a": steps[0]}, decay=0.9)
    for weights in steps[1:]:
        ema.update({"a": weights})
    last = len(steps) - 1
    expected = 0.9**last * steps[0].double()
    for step in range(1, len(steps)):
        expected += 0.1 * 0.9 ** (last - step) * steps[step].double()
    torch.testing.assert_close(ema.tensors()["a"].double(), expected, atol=1e-6, rtol=1e-5)


def test_the_average_is_a_copy_in_float32_that_stays_in_place_so_that_loading_reaches_it() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    ema = Ema({"a": weights}, decay=0.5)
    held = ema.tensors()["a"]
    with torch.no_grad():
        weights.add_(2.0)
    ema.update({"a": weights})
    assert held.tolist() == [2.0] * 3 and weights.tolist() == [3.0] * 3 and not held.requires_grad
    held.copy_(torch.tensor([4.0, 8.0, 9.0]))
    assert ema.tensors()["a"].tolist() == [4.0, 8.0, 9.0]
    weights = torch.ones(1, dtype=torch.bfloat16)
    ema = Ema({"a": weights}, decay=0.992)
    nudged = weights * 1.0078125  # the next bfloat16: 0.008 of the way is too little for that type
    for _ in range(3):
        ema.update({"a": nudged})
    (average,) = ema.tensors().values()
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(1 + 0.0078125 * (1 - 0.992**3), abs=1e-7)


def test_shards_stay_sharded_and_average_as_whole_tensors_do(mesh: Mesh) -> None:
    start, after = torch.randn(2, 6, 4)
    ema = Ema({"a": distribute_tensor(start, mesh.device_mesh, [Shard(0)])}, decay=0.992)
    ema.update({"a": distribute_tensor(after, mesh.device_mesh, [Shard(0)])})
    average = ema.tensors()["a"]
    assert isinstance(average, DTensor) and average.placements == (Shard(0),)
    whole = Ema({"a": start}, decay=0.992)
    whole.update({"a": after})
    assert torch.equal(average.to_local(), whole.tensors()["a"])
